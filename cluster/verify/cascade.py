"""`kvrelay verify`'s rows about cascade attention: requests that decode side by side over one prefix, which is read once.

Their tokens must be Hugging Face's, and the decode worker must say that it spared itself reads. Controls: requests with
nothing in common spare none; made to believe that they have, they get other tokens.
"""

import asyncio
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvrelay.cluster.verify.rows import Case, Expect, Row, Verifier
from kvrelay.engine.step.engine import Engine
from kvrelay.engine.worker.service import WorkerService

if TYPE_CHECKING:
    from kvrelay.cluster.launch.local import LocalCluster

_ROWS = 6  # requests side by side
_TAIL = 20  # tokens of a prompt that are its own, at most
_MOST_SHARED = 320  # tokens
_BLOCK = 16


def shared_prompts(cases: Sequence[Any], longest: int) -> list[Case]:
    """Prompts of up to `longest` tokens that begin alike for whole blocks; the first is that beginning and one token."""
    text = max(cases, key=lambda case: len(case.token_ids)).token_ids
    begin = text[: min(longest - _TAIL, _MOST_SHARED) // _BLOCK * _BLOCK]
    tails = [text[7 * index + 1 : 7 * index + 1 + _TAIL - index] for index in range(_ROWS)]
    return [Case("the beginning", [*begin, text[0]])] + [
        Case(f"shared {index}", [*begin, text[-1 - index], *tail[1:]]) for index, tail in enumerate(tails)
    ]


def unlike_prompts(cases: Sequence[Any], longest: int) -> list[Case]:
    """As many that have nothing in common, of the same tokens."""
    tokens = sorted({token for case in cases for token in case.token_ids})
    length = min(longest, _MOST_SHARED // 2)
    return [Case(f"unlike {seed}", random.Random(seed).choices(tokens, k=length)) for seed in range(4)]


class CascadeRows:
    """Runs the rows with a decode worker in this process, whose engine it can look into.

    longest: tokens of a prompt that leaves room for `num_output`.
    """

    def __init__(self, verifier: Verifier, model_dir: Path, transport: str, longest: int, num_output: int) -> None:
        self._verifier, self._model_dir, self._transport = verifier, model_dir, transport
        self._shared, self._unlike = shared_prompts(verifier.cases, longest), unlike_prompts(verifier.cases, longest)
        self._num_output = num_output

    async def run(self, expect: Expect) -> None:
        """expect: what Hugging Face says for a model folder, prompts and a number of tokens."""
        from kvrelay.cluster.launch.local import local_cluster

        self._verifier.tell("cascade attention")
        prompts = [*self._shared, *self._unlike]
        expected = await asyncio.to_thread(expect, self._model_dir, prompts, self._num_output)
        settings = self._verifier.settings_over(self._transport, "full")
        async with local_cluster(settings, self._model_dir) as cluster:
            await self.check(cluster, cluster.inside[0], expected)

    async def check(self, cluster: "LocalCluster", worker: WorkerService, expected: list[list[int]]) -> None:
        """expected: of the shared prompts, then of the unlike ones."""
        engine = worker.thread.engine
        assert engine is not None
        first, others = self._shared[0], self._shared[1:]
        alone, _ = await self._verifier.tokens_of(cluster, first, "remote")  # leaves the beginning in D's cache
        row = self._verifier.add_row("cascade: a shared prefix over the hop")
        row.count(first.name, expected[0], alone)
        spared = await self._side_by_side(cluster, worker, others, expected[1 : len(self._shared)], row)
        shares = engine.backend.shares_prefixes(engine.model.attention_shape)
        note = f"{spared} tokens of KV not read again" if shares else "this backend reads for every sequence"
        row.claim(holds=(spared > 0) is shares, note=note)
        apart = self._verifier.add_row("cascade: nothing in common, nothing shared")
        unlike = expected[len(self._shared) :]
        spared = await self._side_by_side(cluster, worker, self._unlike, unlike, apart)
        apart.claim(holds=spared == 0, note=f"{spared} tokens of KV not read again")
        if shares and engine.backend.name == "cpu":
            await self._control_row(cluster, worker, engine, unlike)

    async def _side_by_side(
        self, cluster: "LocalCluster", worker: WorkerService, prompts: Sequence[Case], expected: list[list[int]], row: Row
    ) -> int:  # fmt: skip
        """Serve them at once; returns the KV tokens that the decode worker spared."""
        before = (await worker.thread.call(lambda engine: engine.load())).cascade_saved_tokens
        answers = await asyncio.gather(*(self._verifier.tokens_of(cluster, prompt, "remote") for prompt in prompts))
        for prompt, wanted, (tokens, _) in zip(prompts, expected, answers, strict=True):
            row.count(prompt.name, wanted, tokens)
        return (await worker.thread.call(lambda engine: engine.load())).cascade_saved_tokens - before

    async def _control_row(
        self, cluster: "LocalCluster", worker: WorkerService, engine: Engine, expected: list[list[int]]
    ) -> None:
        """The oracle itself can fail: sharing what is not the same changes the answer."""
        row, answers = self._verifier.add_row("cascade: sharing unlike KV changes the answer"), Row("not shown")
        with _believing(engine):
            spared = await self._side_by_side(cluster, worker, self._unlike, expected, answers)
        row.claim_changed(answers, also=spared > 0)


@contextmanager
def _believing(engine: Engine) -> Iterator[None]:
    """Every decode row is taken to have the first one's blocks when it is decided who shares what."""
    native: Any = engine.backend.native  # type: ignore[attr-defined]
    plain = native.share

    def share(schedule: Any, batch: Any, shape: Any) -> None:
        tables = batch.block_tables[:1].expand_as(batch.block_tables).contiguous()
        plain(schedule, replace(batch, block_tables=tables), shape)

    native.share = share
    try:
        yield
    finally:
        native.share = plain
