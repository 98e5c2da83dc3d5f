"""All sequences of one HTTP request: n samples of one or several prompts, merged as they come.

Owns the sequences of the request: closing the generator of pieces aborts every one of them.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from kvrelay.hashing import block_hashes
from kvrelay.serve.attempt import Inbox
from kvrelay.serve.choice_text import ChoiceText, Piece, TextOptions
from kvrelay.serve.dispatcher import Dispatcher
from kvrelay.serve.explain import Explain
from kvrelay.serve.replies import PromptDetails, Usage
from kvrelay.serve.sampling import seed_of_sample
from kvrelay.serve.sequence_life import SequenceLife
from kvrelay.serve.slo import SloRecord
from kvrelay.serve.tokenizer import TextCodec
from kvrelay.wire import KvHints, Sampling, SequenceRequest

GATED_BLOCKS = 4  # samples of a prompt this long wait for the first one's prefill, then find it cached
LONG_PROMPT_TOKENS = 8192  # hashed on a thread


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, ready to be computed. `text` is what `echo` repeats."""

    token_ids: list[int]
    text: str
    sampling: Sampling
    discards_output: bool = False  # max_tokens 0: only the prompt's log-probabilities are wanted


@dataclass(frozen=True, slots=True)
class Job:
    """One HTTP request, checked and tokenised. Choices are numbered prompt by prompt."""

    request_id: str
    prompts: list[Prompt]
    num_samples: int
    options: TextOptions
    echo: bool = False
    salt: str = ""
    hints: KvHints = field(default_factory=KvHints)
    force: Literal["local", "remote"] | None = None
    explain: Explain | None = None
    traceparent: str = ""
    slo: SloRecord | None = None

    def told(self) -> dict[str, Any] | None:
        """What goes into the answer under `kvrelay`: what was asked to be explained, and an SLO that is not kept to."""
        told = {} if self.explain is None else self.explain.report()
        if self.slo is not None and (self.explain is not None or self.slo.must_be_told):
            told["slo"] = self.slo.told()
        return told or None

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.num_samples


class _Choice:
    """One sequence and its text. Opened when first asked, so that siblings can wait for the first."""

    def __init__(self, owner: "Generation", index: int, hashes: list[bytes], gate: asyncio.Event) -> None:
        self._owner, self._index, self._hashes, self._gate = owner, index, hashes, gate
        job = owner.job
        self._prompt = job.prompts[index // job.num_samples]
        self._sample = index % job.num_samples
        start = len(self._prompt.text) if job.echo else 0
        self._text = ChoiceText(owner.codec, job.options, start=start)
        self._life: SequenceLife | None = None
        self._is_done = False

    async def next(self) -> Piece | None:
        """The next piece, None after the last."""
        if self._is_done:
            return None
        if self._life is None:
            await self._open()
        assert self._life is not None
        output = await self._life.next()
        self._gate.set()
        if output is None:
            self._is_done = True
            return None
        piece = self._text.add(output)
        if self._prompt.discards_output:
            piece = Piece("", 0, "length", first=output)
        self._owner.note(self._index, piece)
        if piece.finish_reason is not None:
            self._is_done = True
            self._life.close(piece.finish_reason)
        return piece

    async def _open(self) -> None:
        job, prompt, sampling = self._owner.job, self._prompt, self._prompt.sampling
        if self._sample:
            await self._gate.wait()
            sampling = msgspec.structs.replace(sampling, seed=seed_of_sample(sampling.seed, self._sample))
        request = SequenceRequest(
            request_id=f"{job.request_id}-{self._index}",
            token_ids=prompt.token_ids,
            num_prompt_tokens=len(prompt.token_ids),
            block_hashes=self._hashes,
            sampling=sampling,
            salt=job.salt,
            traceparent=job.traceparent,
            tokens_per_hash=self._owner.dispatcher.settings.tokens_per_hash,
            hints=job.hints,
        )
        explain = job.explain if self._index == 0 else None
        if explain is not None:
            explain.submitted_s = self._owner.dispatcher.clock()
        slo = job.slo if self._index == 0 else None  # the request is admitted as a whole, with its first sequence
        self._life = self._owner.dispatcher.open(request, force=job.force, explain=explain, slo=slo)

    def close(self) -> None:
        self._gate.set()
        if self._life is not None:
            self._life.close("client")


class Generation:
    """Runs a job. `pieces` yields lists of (choice index, piece), everything at hand at once."""

    def __init__(self, dispatcher: Dispatcher, codec: TextCodec, job: Job) -> None:
        self.dispatcher, self.codec, self.job = dispatcher, codec, job
        self._output_tokens = 0
        self._cached_tokens: dict[int, int] = {}  # by prompt, as its first sample found it

    def note(self, index: int, piece: Piece) -> None:
        """Count a piece for the usage."""
        self._output_tokens += piece.num_tokens
        if piece.first is not None:
            self._cached_tokens.setdefault(index // self.job.num_samples, piece.first.cached_tokens or 0)

    def usage(self) -> Usage:
        """Tokens so far. A prompt counts once, however many samples it has."""
        prompt_tokens = sum(len(prompt.token_ids) for prompt in self.job.prompts)
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=self._output_tokens,
            total_tokens=prompt_tokens + self._output_tokens,
            prompt_tokens_details=PromptDetails(cached_tokens=sum(self._cached_tokens.values())),
        )

    async def pieces(self) -> AsyncGenerator[list[tuple[int, Piece]], None]:
        """Until every choice has ended. Raises what the first failing sequence raises."""
        choices = await self._choices()
        try:
            if len(choices) == 1:
                while (piece := await choices[0].next()) is not None:
                    yield [(0, piece)]
                return
            async with contextlib.aclosing(_merge(choices)) as merged:
                async for pieces in merged:
                    yield pieces
        finally:
            for choice in choices:
                choice.close()

    async def _choices(self) -> list[_Choice]:
        tokens_per_hash = self.dispatcher.settings.tokens_per_hash
        choices: list[_Choice] = []
        for number, prompt in enumerate(self.job.prompts):
            hashes = await hashes_of(prompt.token_ids, tokens_per_hash, self.job.salt)
            gate = asyncio.Event()
            if len(hashes) < GATED_BLOCKS:
                gate.set()
            first = number * self.job.num_samples
            choices += [_Choice(self, first + sample, hashes, gate) for sample in range(self.job.num_samples)]
        return choices


async def hashes_of(token_ids: list[int], tokens_per_hash: int, salt: str) -> list[bytes]:
    """The chain over a prompt."""
    if len(token_ids) < LONG_PROMPT_TOKENS:
        return list(block_hashes(token_ids, tokens_per_hash, salt))
    return list(await asyncio.to_thread(block_hashes, token_ids, tokens_per_hash, salt))


_Item = tuple[int, Piece] | BaseException | None


async def _feed(index: int, choice: _Choice, inbox: Inbox[_Item]) -> None:
    try:
        while (piece := await choice.next()) is not None:
            inbox.put((index, piece))
        inbox.put(None)
    except Exception as error:
        inbox.put(error)


async def _merge(choices: list[_Choice]) -> AsyncGenerator[list[tuple[int, Piece]], None]:
    """Pieces of all choices, whichever comes first; a failure ends it."""
    inbox: Inbox[_Item] = Inbox()
    tasks = [asyncio.create_task(_feed(index, choice, inbox)) for index, choice in enumerate(choices)]
    running = len(tasks)
    try:
        while running:
            items = await inbox.get_all()
            pieces = [item for item in items if isinstance(item, tuple)]
            if pieces:
                yield pieces
            for item in items:
                if isinstance(item, BaseException):
                    raise item
            running -= sum(item is None for item in items)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
