"""`kvrelay verify`'s rows about speculation: prompts whose text repeats, so that the decode worker drafts what comes next.

Their tokens must be Hugging Face's, with drafts kept and drafts thrown away; so must those that a draft model drafts: the model itself,
with the last token of each draft made wrong. Control: drafts that are believed unseen change the answers.
"""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvrelay.cluster.verify.rows import Case, Expect, Row, Verifier
from kvrelay.engine.step.engine import Engine
from kvrelay.engine.worker.service import WorkerService

if TYPE_CHECKING:
    from kvrelay.cluster.launch.local import LocalCluster

_PERIODS = (1, 3, 7, 20)  # tokens after which a prompt repeats itself
_LENGTH = 60  # tokens of a prompt


def repeating_prompts(cases: Sequence[Any], longest: int) -> list[Case]:
    """One for each of `_PERIODS`, of at most `longest` tokens."""
    text = max(cases, key=lambda case: len(case.token_ids)).token_ids
    length = min(longest, _LENGTH)
    return [Case(f"repeats {count}", (text[:count] * (length // count + 1))[:length]) for count in _PERIODS]


class SpeculationRows:
    """Runs the rows with a decode worker in this process, which drafts in every step.

    longest: tokens of a prompt that leaves room for `num_output`.
    """

    def __init__(self, verifier: Verifier, model_dir: Path, transport: str, longest: int, num_output: int) -> None:
        self._verifier, self._model_dir, self._transport = verifier, model_dir, transport
        self._prompts, self._num_output = repeating_prompts(verifier.cases, longest), num_output

    async def run(self, expect: Expect) -> None:
        """expect: what Hugging Face says for a model folder, prompts and a number of tokens."""
        from kvrelay.cluster.launch.local import local_cluster

        self._verifier.tell("speculation")
        expected = await asyncio.to_thread(expect, self._model_dir, self._prompts, self._num_output)
        settings = self._verifier.settings_over(self._transport, "full")
        async with local_cluster(settings, self._model_dir) as cluster:
            await self.check(cluster, cluster.inside[0], expected)
        self._verifier.tell("speculation with a draft model")
        own = {
            "speculation": "model",
            "draft_model": str(self._model_dir),
            "draft_kv_memory": settings.engine.kv_memory,
        }
        settings = settings.model_copy(update={"engine": settings.engine.model_copy(update=own)})
        async with local_cluster(settings, self._model_dir) as cluster:
            await self.check(cluster, cluster.inside[0], expected, kind="draft model")

    async def check(
        self, cluster: "LocalCluster", worker: WorkerService, expected: list[list[int]], kind: str = "speculation"
    ) -> None:
        engine = worker.thread.engine
        assert engine is not None
        with _always(engine), _last_wrong(engine):
            for force, name in (("remote", "over the hop"), ("local", "on one worker")):
                row = self._verifier.add_row(f"{kind} {name}")
                drafted, accepted = await self._serve(cluster, worker, force, expected, row)
                note = f"{accepted} of {drafted} drafted tokens were right"
                row.claim(holds=drafted > accepted > 0, note=note)
            row, answers = (
                self._verifier.add_row(f"{kind}: drafts that are believed change the answers"),
                Row("not shown"),
            )
            with _believing(engine):
                await self._serve(cluster, worker, "remote", expected, answers)
            row.claim_changed(answers)

    async def _serve(
        self, cluster: "LocalCluster", worker: WorkerService, force: str, expected: list[list[int]], row: Any
    ) -> tuple[int, int]:
        """Serve all at once; returns (drafted, accepted) tokens."""
        before = await worker.thread.call(lambda engine: engine.load())
        answers = await asyncio.gather(*(self._verifier.tokens_of(cluster, prompt, force) for prompt in self._prompts))
        for prompt, wanted, (tokens, _) in zip(self._prompts, expected, answers, strict=True):
            row.count(prompt.name, wanted, tokens)
        after = await worker.thread.call(lambda engine: engine.load())
        return after.drafted_tokens - before.drafted_tokens, after.accepted_tokens - before.accepted_tokens


@contextmanager
def _always(engine: Engine) -> Iterator[None]:
    """As many drafts as there may be in every step, whether they pay or not."""
    speculation: Any = engine.drafts.speculation
    plain = speculation.begins, speculation.lengths
    speculation.begins = lambda num_sequences: True
    speculation.lengths = lambda num_sequences, drafters: [speculation.most] * len(drafters)
    by_model: Any = engine.drafts.by_model
    if by_model is not None:
        by_model.lengths = lambda num_sequences, candidates, **_: [one.most for one in candidates]
    try:
        yield
    finally:
        speculation.begins, speculation.lengths = plain
        if by_model is not None:
            del by_model.lengths


@contextmanager
def _last_wrong(engine: Engine) -> Iterator[None]:
    """Of each draft of the draft model, which is the model itself, the last token is another one."""
    model: Any = engine.drafts.model
    if model is None:
        yield
        return
    plain, size = model.draft, engine.model.spec.vocab_size

    def draft(wanted: Any, *, chunk: int) -> Any:
        drafted = plain(wanted, chunk=chunk)
        for tokens in drafted.tokens.values():
            tokens[-1] = (tokens[-1] + 1) % size
        return drafted

    model.draft = draft
    try:
        yield
    finally:
        del model.draft


@contextmanager
def _believing(engine: Engine) -> Iterator[None]:
    """Every draft is taken to be right."""
    owner: Any = engine
    plain = owner.take_drafted

    def take(item: Any, tokens: Any, logprobs: Any, outputs: Any) -> None:
        plain(item, [*item.drafts, tokens[-1]], logprobs, outputs)

    owner.take_drafted = take
    try:
        yield
    finally:
        owner.take_drafted = plain
