"""All sequences of one HTTP request: n samples of one or several prompts, merged as they come.

Owns the sequences of the request: closing the generator of pieces aborts every one of them.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from kvrelay.errors import InvalidRequest
from kvrelay.hashing import block_hashes
from kvrelay.plane.messages import Beams, Group, KvHints, Sampling, SequenceRequest, TokenOutput
from kvrelay.serve.api.replies import PromptDetails, Usage
from kvrelay.serve.requests.attempt import Inbox
from kvrelay.serve.requests.queue_rank import Standing
from kvrelay.serve.requests.request_driver import SequenceLife
from kvrelay.serve.requests.sampling import seed_of_sample
from kvrelay.serve.requests.slo import SloRecord
from kvrelay.serve.telemetry.explain import Explain
from kvrelay.serve.telemetry.request_log import Arrival
from kvrelay.serve.text.choice_text import ChoiceText, Piece, TextOptions
from kvrelay.serve.text.tokenizer import TextCodec
from kvrelay.serve.workers.dispatcher import Dispatcher

GATED_BLOCKS = (
    4  # where a prompt this long has more samples than one group may, the other groups wait for the first's prefill
)
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
    """One HTTP request, checked and tokenised. Choices are numbered prompt by prompt.

    `num_samples` are computed for each prompt, `best_of` of OpenAI's; the caller keeps those that it wants.
    """

    request_id: str
    prompts: list[Prompt]
    num_samples: int
    options: TextOptions
    echo: bool = False
    salt: str = ""
    hints: KvHints = field(default_factory=KvHints)
    standing: Standing = field(default_factory=Standing)
    force: Literal["local", "remote"] | None = None
    explain: Explain | None = None
    traceparent: str = ""
    beams: Beams | None = None  # then the samples are the results of one beam search
    arrival: Arrival | None = None
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


class _Stream:
    """One request to the workers: a sequence, or a group of choices of one prompt. Opened when first asked."""

    def __init__(self, owner: "Generation", first: int, count: int, hashes: list[bytes], gate: asyncio.Event) -> None:
        self._owner, self._first, self._count, self._hashes, self._gate = owner, first, count, hashes, gate
        job = owner.job
        self._prompt = job.prompts[first // job.num_samples]
        self._sample = first % job.num_samples
        start = len(self._prompt.text) if job.echo else 0
        self._texts = [ChoiceText(owner.codec, job.options, start=start) for _ in range(count)]
        self._running = set(range(count))
        self._life: SequenceLife | None = None

    async def next(self) -> tuple[int, Piece] | None:
        """The next piece with its choice's index; None after the last."""
        if self._life is None:
            await self._open()
        assert self._life is not None
        while self._running:
            output = await self._life.next()
            self._gate.set()
            if output is None:
                break
            if output.choice in self._running:
                return self._first + output.choice, self._piece(self._life, output)
        return None

    def _piece(self, life: SequenceLife, output: TokenOutput) -> Piece:
        piece = self._texts[output.choice].add(output)
        if self._prompt.discards_output:
            piece = Piece("", 0, "length", first=output)
        self._owner.note(self._first + output.choice, piece)
        if piece.finish_reason is not None:
            self._running.discard(output.choice)
            if not self._running:
                life.close(piece.finish_reason)
            else:
                life.end_choice(output.choice)
        return piece

    async def _open(self) -> None:
        job, prompt = self._owner.job, self._prompt
        if self._sample:
            await self._gate.wait()
        seeds = [seed_of_sample(prompt.sampling.seed, self._sample + index) for index in range(self._count)]
        request = SequenceRequest(
            request_id=f"{job.request_id}-{self._first}",
            token_ids=prompt.token_ids,
            num_prompt_tokens=len(prompt.token_ids),
            block_hashes=self._hashes,
            sampling=msgspec.structs.replace(prompt.sampling, seed=seeds[0]),
            salt=job.salt,
            traceparent=job.traceparent,
            tokens_per_hash=self._owner.dispatcher.settings.tokens_per_hash,
            hints=job.hints,
            priority=job.standing.priority,
            deadline_s=job.standing.deadline_s,
            tenant=job.standing.tenant,
            group=self._group(seeds),
        )
        explain = job.explain if self._first == 0 else None
        if explain is not None:
            explain.submitted_s = self._owner.dispatcher.clock()
        slo = job.slo if self._first == 0 else None  # the request is admitted as a whole, with its first sequence
        self._life = self._owner.dispatcher.open(
            request, force=job.force, explain=explain, arrival=job.arrival, slo=slo
        )

    def _group(self, seeds: list[int]) -> Group | None:
        if self._owner.job.beams is not None:
            return Group(beams=self._owner.job.beams)
        return Group(seeds=tuple(seeds)) if self._count > 1 else None

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
        streams = await self._streams()
        try:
            if len(streams) == 1:
                while (piece := await streams[0].next()) is not None:
                    yield [piece]
                return
            async with contextlib.aclosing(_merge(streams)) as merged:
                async for pieces in merged:
                    yield pieces
        finally:
            for stream in streams:
                stream.close()

    async def _streams(self) -> list[_Stream]:
        tokens_per_hash, count = self.dispatcher.settings.tokens_per_hash, self.job.num_samples
        most = count if self.job.beams is not None else max(1, self.dispatcher.max_group())
        if self.job.beams is not None and self.job.beams.width > (limit := self.dispatcher.max_group()):
            raise InvalidRequest(
                f"best_of: {self.job.beams.width} beams, but a worker runs {limit} sequences", "best_of"
            )
        streams: list[_Stream] = []
        for number, prompt in enumerate(self.job.prompts):
            hashes = await hashes_of(prompt.token_ids, tokens_per_hash, self.job.salt)
            gate = asyncio.Event()
            if len(hashes) < GATED_BLOCKS:
                gate.set()
            streams += [
                _Stream(self, number * count + sample, min(most, count - sample), hashes, gate)
                for sample in range(0, count, most)
            ]
        return streams


async def hashes_of(token_ids: list[int], tokens_per_hash: int, salt: str) -> list[bytes]:
    """The chain over a prompt."""
    if len(token_ids) < LONG_PROMPT_TOKENS:
        return list(block_hashes(token_ids, tokens_per_hash, salt))
    return list(await asyncio.to_thread(block_hashes, token_ids, tokens_per_hash, salt))


_Item = tuple[int, Piece] | BaseException | None


async def _feed(stream: _Stream, inbox: Inbox[_Item]) -> None:
    try:
        while (piece := await stream.next()) is not None:
            inbox.put(piece)
        inbox.put(None)
    except Exception as error:
        inbox.put(error)


async def _merge(streams: list[_Stream]) -> AsyncGenerator[list[tuple[int, Piece]], None]:
    """Pieces of all streams, whichever comes first; a failure ends it."""
    inbox: Inbox[_Item] = Inbox()
    tasks = [asyncio.create_task(_feed(stream, inbox)) for stream in streams]
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
