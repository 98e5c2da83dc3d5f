"""The load over HTTP: a wave of requests that start together, a lone prompt. Returns arrival times; figures are
cpu_goals.py's.
"""

import asyncio
import time
from dataclasses import dataclass, field

import aiohttp
import msgspec

from kvrelay.cluster.loadgen.client import LoadRequest, LoadTarget, open_session, request_body, sse_events
from kvrelay.cluster.loadgen.prompts import PromptSpec, synthetic_prompt

LOW, HIGH = 1000, 30_000  # token ids of prompts: words in every vocabulary here


@dataclass(slots=True)
class Arrivals:
    """One request: when it was sent and when its chunks came, seconds of one clock. `num_tokens`: as the server
    counts.
    """

    sent_s: float
    chunks_s: list[float] = field(default_factory=list)
    num_tokens: int = 0

    @property
    def tokens_per_chunk(self) -> float:
        return self.num_tokens / len(self.chunks_s) if self.chunks_s else 0.0


@dataclass(frozen=True, slots=True)
class Wave:
    """Requests that were sent together. `is_cut`: stopped at the time limit, tokens counted as chunks."""

    requests: tuple[Arrivals, ...]
    is_cut: bool


class LoadFailed(Exception):
    """A request was refused or broke off; the message says how."""


class _Choice(msgspec.Struct):
    text: str | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int = 0


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: msgspec.Raw = msgspec.Raw()


_decode = msgspec.json.Decoder(_Chunk).decode


def _is_token(choice: _Choice) -> bool:
    """Whether a chunk is output, and not only the end of it."""
    return bool(choice.text) or choice.finish_reason is None


async def _stream(session: aiohttp.ClientSession, target: LoadTarget, job: LoadRequest, seen: Arrivals) -> None:
    body = msgspec.json.encode(request_body(target, job))
    async with session.post(f"{target.url}/v1/completions", data=body) as response:
        if response.status != 200:
            raise LoadFailed(f"HTTP {response.status}: {(await response.text())[:300]}")
        async for events in sse_events(response.content.iter_any()):
            now_s = time.perf_counter()
            for event in events:
                if event == b"[DONE]":
                    continue
                chunk = _decode(event)
                if bytes(chunk.error) not in (b"", b"null"):
                    raise LoadFailed(event.decode("utf-8", "replace")[:300])
                if chunk.usage is not None:
                    seen.num_tokens = max(seen.num_tokens, chunk.usage.completion_tokens)
                if chunk.choices and (_is_token(chunk.choices[0]) or not seen.chunks_s):
                    seen.chunks_s.append(now_s)
    if seen.num_tokens != job.output_tokens:
        raise LoadFailed(f"{seen.num_tokens} of {job.output_tokens} tokens came")


async def wave(url: str, seed: int, *, clients: int, prompt: int, output: int, limit_s: float) -> Wave:
    """`clients` requests of fresh prompts at once, cut off after `limit_s`. The same seed gives the same prompts.

    Raises LoadFailed; aiohttp.ClientError when the server is gone.
    """
    target = LoadTarget(url, "model", timeout_s=limit_s + 60)
    spec = PromptSpec(prompt, 0, LOW, HIGH, seed)
    jobs = [LoadRequest(index, synthetic_prompt(spec, index), output) for index in range(clients)]
    seen = [Arrivals(0.0) for _ in jobs]
    async with open_session(target) as session:
        try:
            is_cut = await _send_all(session, target, jobs, seen, limit_s)
        except* (LoadFailed, aiohttp.ClientError) as errors:
            raise LoadFailed(str(errors.exceptions[0])) from errors
    return Wave(tuple(seen), is_cut)


async def _send_all(
    session: aiohttp.ClientSession, target: LoadTarget, jobs: list[LoadRequest], seen: list[Arrivals], limit_s: float
) -> bool:
    """Whether the time limit cut them off."""
    start_s = time.perf_counter()
    try:
        async with asyncio.timeout(limit_s), asyncio.TaskGroup() as group:
            for job, arrivals in zip(jobs, seen, strict=True):
                arrivals.sent_s = start_s
                group.create_task(_stream(session, target, job, arrivals))
    except TimeoutError:
        for arrivals in seen:
            arrivals.num_tokens = arrivals.num_tokens or len(arrivals.chunks_s)
        return True
    return False
