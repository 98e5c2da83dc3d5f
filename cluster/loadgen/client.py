"""The load generator: sends streamed requests to an OpenAI server and times their chunks.

Closed loop: N clients, each sends its next request when its last one has ended. Open loop: requests are sent at their
arrival times, whether or not earlier ones have been answered. Memory: a small record for each request, 8 bytes for each
token.
"""

import asyncio
import ipaddress
import socket
import time
from array import array
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

import msgspec

from kvrelay.cluster.errors import ClusterError
from kvrelay.cluster.launch.http_json import auth_headers, request_json
from kvrelay.cluster.loadgen.prompts import as_text
from kvrelay.cluster.loadgen.stats import OK, UNFINISHED, LoadRecord, Slo, Summary, token_gaps
from kvrelay.errors import ConfigError

if TYPE_CHECKING:
    import aiohttp  # imported where a session opens, so that `kvrelay bench --help` is fast

Endpoint = Literal["completions", "chat"]
_MAX_EVENT_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class LoadTarget:
    """A server and what every request to it has in common. `url` is the root, without /v1."""

    url: str
    model: str
    endpoint: Endpoint = "completions"
    api_key: str | None = None
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    temperature: float = 0.0
    timeout_s: float = 600.0


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """One request to send. Created when it is due, so that prompts do not fill memory."""

    index: int
    prompt: list[int]
    output_tokens: int
    arrival_s: float = 0.0


@dataclass(slots=True)
class LoadResult:
    """A run's records and gaps so far; may be read at any time."""

    records: list[LoadRecord] = field(default_factory=list)
    gaps_s: "array[float]" = field(default_factory=lambda: array("d"))
    cpu_share: float = 0.0
    first_failure: str = ""

    def summary(self, slo: Slo | None = None) -> Summary:
        return Summary(self.records, self.gaps_s, slo or Slo(), self.cpu_share)


# ---- chunks of a stream; unknown fields are skipped


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: msgspec.Raw = msgspec.Raw()


_decode_chunk = msgspec.json.Decoder(_Chunk).decode


class StreamFailed(Exception):
    """The stream carried an error event, could not be read, or ended early."""


def _carries_token(choice: _Choice) -> bool:
    """Whether a choice of a chunk carries output: chat text, or a completions chunk that is not only the end."""
    if choice.delta is not None:
        return bool(choice.delta.content or choice.delta.reasoning_content or choice.delta.reasoning)
    return bool(choice.text) or (choice.text is not None and choice.finish_reason is None)


@dataclass(slots=True)
class _Stream:
    """What one answer's stream has brought so far."""

    first_s: float | None = None
    last_s: float = 0.0
    gaps: list[float] = field(default_factory=list)
    num_chunks: int = 0
    is_finished: bool = False
    usage: _Usage | None = None

    def take(self, data: bytes, now_s: float) -> None:
        """One `data:` payload that arrived at `now_s`. Raises StreamFailed on an error event."""
        if data == b"[DONE]":
            self.is_finished = True
            return
        try:
            chunk = _decode_chunk(data)
        except msgspec.MsgspecError as error:
            raise StreamFailed("unreadable chunk") from error
        if bytes(chunk.error) not in (b"", b"null"):
            raise StreamFailed("error event")
        self.usage = chunk.usage or self.usage
        self.is_finished = self.is_finished or any(choice.finish_reason for choice in chunk.choices)
        if not any(_carries_token(choice) for choice in chunk.choices):
            return
        self.num_chunks += 1
        if self.first_s is None:
            self.first_s = now_s
        else:
            self.gaps.append(now_s - self.last_s)
        self.last_s = now_s


async def sse_events(parts: AsyncIterator[bytes]) -> AsyncIterator[list[bytes]]:
    """The `data:` payloads of a byte stream, one list per part that completed any. Raises StreamFailed."""
    rest = b""
    async for part in parts:
        *lines, rest = (rest + part).split(b"\n")
        if len(rest) > _MAX_EVENT_BYTES:
            raise StreamFailed("endless line")
        events = [line[5:].strip() for line in lines if line.startswith(b"data:")]
        if events:
            yield events


# ---- one request


def request_body(target: LoadTarget, job: LoadRequest) -> dict[str, Any]:
    """The JSON body of one streamed request for exactly `output_tokens` tokens, where the server can force that."""
    body: dict[str, Any] = {
        "model": target.model,
        "max_tokens": job.output_tokens,
        "temperature": target.temperature,
        "stream": True,
    }
    if target.endpoint == "chat":
        body["messages"] = [{"role": "user", "content": as_text(job.prompt)}]
    else:
        body["prompt"] = job.prompt
    fixed_length = {"ignore_eos": True, "min_tokens": job.output_tokens, "stream_options": {"include_usage": True}}
    return {**body, **fixed_length, **target.extra_body}


def open_session(target: LoadTarget) -> "aiohttp.ClientSession":
    """A session without a connection limit: the load decides how many are open."""
    import aiohttp

    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=600),
        headers={"Content-Type": "application/json", **auth_headers(target.api_key)},
        timeout=aiohttp.ClientTimeout(total=target.timeout_s, sock_connect=10),
        read_bufsize=1 << 18,
    )


async def send(
    session: "aiohttp.ClientSession",
    target: LoadTarget,
    job: LoadRequest,
    result: LoadResult,
    *,
    run_start_s: float,
    due_s: float | None = None,
) -> LoadRecord:
    """Send one request, read its whole stream, add its record to `result` and return it.

    Faults of the server or the network are outcomes, not exceptions. A cancelled request is recorded as unfinished.

    Args:
        due_s: when it should have been sent, since the run began; default: its arrival time.
    """
    import aiohttp

    payload = msgspec.json.encode(request_body(target, job))
    url = f"{target.url.rstrip('/')}/v1/{'chat/' if target.endpoint == 'chat' else ''}completions"
    stream = _Stream()
    started_s = time.perf_counter()
    outcome = UNFINISHED
    try:
        outcome = await _exchange(session, url, payload, stream, result)
    except StreamFailed as error:
        outcome = str(error)
    except TimeoutError:
        outcome = "timeout"
    except aiohttp.ClientPayloadError:
        outcome = "cut off"
    except (aiohttp.ClientError, OSError) as error:
        outcome = f"connection: {type(error).__name__}"
    finally:
        usage = stream.usage or _Usage()
        details = usage.prompt_tokens_details
        record = LoadRecord(
            index=job.index,
            scheduled_s=job.arrival_s if due_s is None else due_s,
            started_s=started_s - run_start_s,
            outcome=outcome,
            ttft_s=None if stream.first_s is None else stream.first_s - started_s,
            e2e_s=time.perf_counter() - started_s,
            num_prompt_tokens=usage.prompt_tokens or len(job.prompt),
            num_output_tokens=usage.completion_tokens or stream.num_chunks,
            num_cached_tokens=(details.cached_tokens or 0) if details else 0,
            num_chunks=stream.num_chunks,
            wanted_tokens=job.output_tokens,
            is_estimated=stream.usage is None,
        )
        result.records.append(record)
        if outcome == OK:
            result.gaps_s.extend(token_gaps(stream.gaps, record.num_output_tokens))
    return record


async def _exchange(
    session: "aiohttp.ClientSession", url: str, payload: bytes, stream: _Stream, result: LoadResult
) -> str:
    async with session.post(url, data=payload) as response:
        if response.status != 200:
            text = (await response.content.read(2000)).decode("utf-8", "replace")
            result.first_failure = result.first_failure or f"HTTP {response.status}: {text.strip()[:500]}"
            return f"http {response.status}"
        async for events in sse_events(response.content.iter_any()):
            now_s = time.perf_counter()
            for event in events:
                try:
                    stream.take(event, now_s)
                except StreamFailed:
                    result.first_failure = result.first_failure or event.decode("utf-8", "replace")[:500]
                    raise
    if not stream.is_finished:
        raise StreamFailed("cut off")
    if stream.first_s is None and not (stream.usage and stream.usage.completion_tokens):
        raise StreamFailed("empty answer")  # tokens of no text, such as part of a character, are an answer
    return OK


# ---- many requests


async def run_load(
    target: LoadTarget,
    jobs: Iterator[LoadRequest],
    *,
    concurrency: int | None = None,
    duration_s: float | None = None,
    result: LoadResult | None = None,
    on_record: Callable[[LoadRecord], None] | None = None,
) -> LoadResult:
    """Send `jobs` and return their records.

    Closed loop with `concurrency` clients, or open loop at the jobs' arrival times when it is None.
    No request starts after `duration_s`; those in flight are finished. When cancelled, the requests in flight are
    recorded as unfinished, and a `result` that the caller passed holds everything so far.
    """
    result = result or LoadResult()
    run_start_s, cpu_start_s = time.perf_counter(), time.process_time()

    def now_s() -> float:
        return time.perf_counter() - run_start_s

    def is_over() -> bool:
        return duration_s is not None and now_s() >= duration_s

    async def send_one(job: LoadRequest, due_s: float | None = None) -> None:
        record = await send(session, target, job, result, run_start_s=run_start_s, due_s=due_s)
        if on_record is not None:
            on_record(record)

    async def client() -> None:
        due_s = now_s()
        while not is_over() and (job := next(jobs, None)) is not None:
            await send_one(job, due_s)
            due_s = now_s()

    try:
        async with open_session(target) as session, asyncio.TaskGroup() as group:
            for _ in range(concurrency or 0):
                group.create_task(client())
            for job in () if concurrency else jobs:
                await asyncio.sleep(max(job.arrival_s - now_s(), 0.0))
                if is_over():
                    break
                group.create_task(send_one(job))
    finally:
        result.cpu_share = (time.process_time() - cpu_start_s) / max(now_s(), 1e-9)
    return result


# ---- before a run


def require_loopback(url: str, *, allow_remote: bool) -> None:
    """Refuse to load a server on another machine by mistake. Raises ConfigError."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{url!r} is not a server URL; example: http://127.0.0.1:8000")
    if allow_remote:
        return
    try:
        found = {entry[4][0] for entry in socket.getaddrinfo(parts.hostname, parts.port or 80)}
    except OSError as error:
        raise ConfigError(f"{parts.hostname}: {error}") from error
    if not all(ipaddress.ip_address(str(address).partition("%")[0]).is_loopback for address in found):
        raise ConfigError(f"{parts.hostname} is another machine; pass --allow-remote to load it on purpose")


def served_model(url: str, *, api_key: str | None = None) -> str:
    """The first model that a server lists. Raises ConfigError: it lists none, or does not answer."""
    try:
        models = request_json("GET", f"{url.rstrip('/')}/v1/models", headers=auth_headers(api_key), timeout_s=10.0)
        return str(models["data"][0]["id"])
    except (ClusterError, LookupError, TypeError) as error:
        raise ConfigError(f"{url} does not list a model ({str(error) or repr(error)}); name it with --model") from error
