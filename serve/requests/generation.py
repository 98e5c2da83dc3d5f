"""One HTTP request, checked and tokenised, and all its sequences: n samples of one or several prompts, merged as they
come.

Owns the sequences of the request: closing the generator of pieces aborts every one of them.
"""

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncGenerator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvrelay.errors import InvalidRequest
from kvrelay.hashing import block_hashes
from kvrelay.plane.messages import Beams, Group, KvHints, Sampling, SequenceRequest, TokenOutput
from kvrelay.serve.chat.output import OutputFormat
from kvrelay.serve.requests.dispatcher import Dispatcher, Force, RequestDriver
from kvrelay.serve.telemetry.explain import Explain, SloRecord
from kvrelay.serve.telemetry.observer import Arrival
from kvrelay.serve.tenants.quotas import Meter
from kvrelay.serve.text.tokenizer import ChoiceText, TextOptions, TextPiece, Tokenizer
from kvrelay.serve.workers.worker_link import Mailbox

LONG_PROMPT_TOKENS = 8192  # hashed on a thread
SEED_MASK = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, ready to be computed. `text` is what `echo` repeats."""

    token_ids: list[int]
    text: str
    sampling: Sampling
    discards_output: bool = False  # max_tokens 0: only the prompt's log-probabilities are wanted
    output: OutputFormat | None = None  # of a chat; None: its text is the content


@dataclass(frozen=True, slots=True)
class GenerationJob:
    """One HTTP request, checked and tokenised. Choices are numbered prompt by prompt.

    `num_samples` are computed for each prompt (OpenAI's `best_of`); the endpoint keeps those that it answers.
    """

    request_id: str
    prompts: list[Prompt]
    num_samples: int
    options: TextOptions
    echo: bool = False
    salt: str = ""
    hints: KvHints = field(default_factory=KvHints)
    priority: int = 0  # in the workers' queues, as in wire.SequenceRequest
    deadline_s: float | None = None  # from the submission on
    tenant: str = ""
    weight: float = 1.0  # of the tenant, in fair shares
    force: Force = None
    explain: Explain | None = None
    traceparent: str = ""
    beams: Beams | None = None  # then the samples are the results of one beam search
    arrival: Arrival | None = None
    slo: SloRecord | None = None
    meter: Meter | None = None  # of its tenant's quotas

    def report(self) -> dict[str, Any] | None:
        """The response's field `kvrelay`: the explanation if requested, and the SLO verdict if it differs from the
        request.
        """
        report = {} if self.explain is None else self.explain.report()
        if self.slo is not None and (self.explain is not None or self.slo.must_be_reported):
            report["slo"] = self.slo.report()
        return report or None

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.num_samples


class _Stream:
    """One request to the workers: a sequence, or a group of choices of one prompt. Opened when first asked."""

    def __init__(self, owner: "Generation", first: int, count: int, hashes: list[bytes]) -> None:
        self._owner, self._first, self._count, self._hashes = owner, first, count, hashes
        job = owner.job
        self._prompt = job.prompts[first // job.num_samples]
        self._sample = first % job.num_samples
        start = len(self._prompt.text) if job.echo else 0
        self._texts = [ChoiceText(owner.codec, job.options, start=start) for _ in range(count)]
        self._running = set(range(count))
        self._driver: RequestDriver | None = None
        self._outputs: AsyncGenerator[TokenOutput, None] | None = None

    async def next(self) -> tuple[int, TextPiece] | None:
        """The next piece with its choice's index; None after the last."""
        if self._driver is None or self._outputs is None:
            self._driver = self._open()
            self._outputs = self._driver.tokens()
        while self._running:
            output = await anext(self._outputs, None)
            if output is None:
                break
            if output.choice in self._running:
                return self._first + output.choice, self._piece(self._driver, output)
        return None

    def _piece(self, driver: RequestDriver, output: TokenOutput) -> TextPiece:
        piece = self._texts[output.choice].add(output)
        if self._prompt.discards_output:
            piece = TextPiece("", 0, "length", first=output)
        self._owner.note(self._first + output.choice, piece)
        if piece.finish_reason is not None:
            self._running.discard(output.choice)
            if not self._running:
                driver.finish(piece.finish_reason)
            else:
                driver.end_choice(output.choice)
        return piece

    def _open(self) -> RequestDriver:
        job, prompt = self._owner.job, self._prompt
        seeds = [seed_of_sample(prompt.sampling.seed, self._sample + index) for index in range(self._count)]
        request = SequenceRequest(
            request_id=f"{job.request_id}-{self._first}",
            token_ids=prompt.token_ids,
            num_prompt_tokens=len(prompt.token_ids),
            block_hashes=self._hashes,
            sampling=msgspec.structs.replace(prompt.sampling, seed=seeds[0]),
            salt=job.salt,
            traceparent=job.traceparent,
            tokens_per_hash=self._owner.dispatcher.tokens_per_hash,
            hints=job.hints,
            priority=job.priority,
            deadline_s=job.deadline_s,
            tenant=job.tenant,
            weight=job.weight,
            group=self._group(seeds),
        )
        explain = job.explain if self._first == 0 else None
        if explain is not None:
            explain.submitted_s = self._owner.dispatcher.clock()
        slo = job.slo if self._first == 0 else None  # the request is admitted as a whole, with its first sequence
        return self._owner.dispatcher.open(request, force=job.force, explain=explain, arrival=job.arrival, slo=slo)

    def _group(self, seeds: list[int]) -> Group | None:
        if self._owner.job.beams is not None:
            return Group(beams=self._owner.job.beams)
        return Group(seeds=tuple(seeds)) if self._count > 1 else None

    async def aclose(self) -> None:
        """Abort what still runs."""
        if self._driver is not None and self._outputs is not None:
            self._driver.finish("client")
            await self._outputs.aclose()


class Generation:
    """Runs a job. `pieces` yields lists of (choice index, piece), everything at hand at once."""

    def __init__(self, dispatcher: Dispatcher, codec: Tokenizer, job: GenerationJob) -> None:
        self.dispatcher, self.codec, self.job = dispatcher, codec, job
        self.num_output_tokens = 0
        self._cached_tokens: dict[int, int] = {}  # by prompt, as its first sample found it

    def note(self, index: int, piece: TextPiece) -> None:
        """Count a piece for the usage."""
        self.num_output_tokens += piece.num_tokens
        if self.job.meter is not None:
            self.job.meter.charge(piece.num_tokens)
        if piece.first is not None:
            self._cached_tokens.setdefault(index // self.job.num_samples, piece.first.cached_tokens or 0)

    @property
    def num_prompt_tokens(self) -> int:
        """Of all prompts; a prompt counts once, however many samples it has."""
        return sum(len(prompt.token_ids) for prompt in self.job.prompts)

    @property
    def num_cached_tokens(self) -> int:
        """Of the prompts' tokens, those that were found in a cache."""
        return sum(self._cached_tokens.values())

    async def pieces(self) -> AsyncGenerator[list[tuple[int, TextPiece]], None]:
        """Pieces until every choice has ended. Raises what the first failing sequence raises, and QuotaExceeded."""
        with self._counted():
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
                    await stream.aclose()

    def _counted(self) -> AbstractContextManager[None]:
        """Around all work: it counts against the tenant's quotas."""
        job = self.job
        if job.meter is None:
            return contextlib.nullcontext()
        width = job.num_samples if job.beams is None else job.beams.width
        return job.meter.running(width * len(job.prompts), self.num_prompt_tokens)

    async def _streams(self) -> list[_Stream]:
        tokens_per_hash, count = self.dispatcher.tokens_per_hash, self.job.num_samples
        most = count if self.job.beams is not None else max(1, self.dispatcher.workers.max_group())
        if self.job.beams is not None and self.job.beams.width > (limit := self.dispatcher.workers.max_group()):
            raise InvalidRequest(
                f"best_of: {self.job.beams.width} beams, but a worker runs {limit} sequences", "best_of"
            )
        streams: list[_Stream] = []
        for number, prompt in enumerate(self.job.prompts):
            hashes = await hashes_of(prompt.token_ids, tokens_per_hash, self.job.salt)
            streams += [
                _Stream(self, number * count + sample, min(most, count - sample), hashes)
                for sample in range(0, count, most)
            ]
        return streams


async def hashes_of(token_ids: list[int], tokens_per_hash: int, salt: str) -> list[bytes]:
    """The prompt's chain of block hashes; a long prompt is hashed on a thread."""
    if len(token_ids) < LONG_PROMPT_TOKENS:
        return list(block_hashes(token_ids, tokens_per_hash, salt))
    return list(await asyncio.to_thread(block_hashes, token_ids, tokens_per_hash, salt))


def seed_of_sample(seed: int, index: int) -> int:
    """The seed of sample `index` of `n`: samples differ, and can be repeated.

    The first keeps the request's seed; the others' are hashed, or a request with the next seed would repeat them.
    """
    if index == 0:
        return seed
    digest = hashlib.blake2b(f"{seed} {index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & SEED_MASK


_Item = tuple[int, TextPiece] | BaseException | None


async def _feed(stream: _Stream, inbox: Mailbox[_Item]) -> None:
    try:
        while (piece := await stream.next()) is not None:
            inbox.put(piece)
        inbox.put(None)
    except Exception as error:
        inbox.put(error)


async def _merge(streams: list[_Stream]) -> AsyncGenerator[list[tuple[int, TextPiece]], None]:
    """Pieces of all streams, whichever comes first; a failure ends it."""
    inbox: Mailbox[_Item] = Mailbox()
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
