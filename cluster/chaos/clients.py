"""Clients that send greedy requests to the cluster and record what comes, and the requests that they send."""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Self

import aiohttp

from kvrelay.cluster.chaos.history import CUT, ClientStream, StreamHistory
from kvrelay.cluster.errors import ClusterError
from kvrelay.cluster.loadgen.client import StreamFailed, sse_events

BLOCK_TOKENS, SHARED_TOKENS = 16, 64
NUM_SALTS = 64  # more KV than the workers' pools and host tiers hold, so that the disk is read
PAUSE_S = 0.1
REQUEST_S = 90.0
LEAVE_S = 0.5  # at most, of a client that goes before the first token


@dataclass(frozen=True, slots=True)
class ChaosRequest:
    """A prompt of token ids, and how many greedy tokens to ask for."""

    prompt: tuple[int, ...]
    num_tokens: int


def catalogue(max_model_len: int, *, seed: int) -> list[ChaosRequest]:
    """Requests of every shape: one token in or out, exactly a block, prefixes in common, as long as the context."""
    draw = random.Random(f"{seed}:prompts")

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(draw.randrange(3, 250) for _ in range(count))  # ids that every vocabulary has

    shared, longest = tokens(SHARED_TOKENS), max_model_len - 64
    shapes = [(1, 40), (BLOCK_TOKENS, 1), (BLOCK_TOKENS, 48), (BLOCK_TOKENS + 1, 16), (100, 1), (100, 64), (300, 120)]
    shapes += [(longest, 1), (longest, 64), (BLOCK_TOKENS, min(400, longest)), (100, min(400, longest - 100))]
    found = [ChaosRequest(tokens(length), count) for length, count in shapes]
    found += [ChaosRequest(shared + tokens(length), count) for length, count in ((1, 32), (32, 64), (200, 200))]
    return [one for one in found if one.prompt and 0 < one.num_tokens <= max_model_len - len(one.prompt)]


class ChaosClients:
    """Sends requests to `url`, compares with what the unharmed cluster answered, and records in `history`.

    They keep no connection: one that a dead ingress held would count as its fault.
    """

    def __init__(
        self,
        url: str,
        model: str,
        requests: Sequence[ChaosRequest],
        history: StreamHistory,
        clock: Callable[[], float],
        seed: int,
    ) -> None:
        self._url, self._model, self._requests, self._history = f"{url}/v1/completions", model, requests, history
        self._clock, self._draw = clock, random.Random(f"{seed}:clients")
        self._right: dict[ChaosRequest, list[int]] = {}
        self.is_over = False

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(force_close=True, limit=0), timeout=aiohttp.ClientTimeout(total=REQUEST_S)
        )
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._session.close()

    async def learn(self) -> None:
        """Ask the unharmed cluster, twice, for the tokens of each request. Raises ClusterError: it errs or differs."""
        for request in self._requests:
            answers = [ClientStream(0, (), self._clock(), is_streamed=is_streamed) for is_streamed in (True, False)]
            for answer in answers:
                await self._receive(request, answer, "")
            one, other = answers
            if one.error or other.error or one.tokens != other.tokens or len(one.tokens) != request.num_tokens:
                raise ClusterError(f"the unharmed cluster fails or contradicts itself: {one.error or other.error}")
            self._right[request] = one.tokens

    async def run(self, num_clients: int) -> None:
        """So many clients, each with one request after the other, until `is_over`."""
        async with asyncio.TaskGroup() as group:
            for _ in range(num_clients):
                group.create_task(self._client())

    async def _client(self) -> None:
        while not self.is_over:
            await self.send(self._draw.choice(self._requests), is_streamed=self._draw.random() < 0.5)
            await asyncio.sleep(PAUSE_S)

    async def send(self, request: ChaosRequest, *, is_streamed: bool = True) -> None:
        """One request, recorded."""
        await self._exchange(request, self._begin(request, is_streamed=is_streamed))

    def _begin(self, request: ChaosRequest, *, is_streamed: bool = True) -> ClientStream:
        return self._history.begin(self._right[request], self._clock(), is_streamed=is_streamed)

    async def _exchange(self, request: ChaosRequest, stream: ClientStream) -> None:
        """When cancelled, the client has left on purpose."""
        salt = f"s{self._draw.randrange(NUM_SALTS)}" if self._draw.random() < 0.5 else ""
        try:
            await self._receive(request, stream, salt)
        except asyncio.CancelledError:
            stream.has_left = True
            raise
        finally:
            self._history.end(stream, self._clock())

    async def _receive(self, request: ChaosRequest, stream: ClientStream, salt: str) -> None:
        """Send it and record what comes; whatever goes wrong is the record's error."""
        body = {
            "model": self._model,
            "prompt": request.prompt,
            "max_tokens": request.num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": stream.is_streamed,
            **({"cache_salt": salt} if salt else {}),
        }
        try:
            payload = json.dumps(body).encode()
            head = {"Content-Type": "application/json", "Content-Length": str(len(payload))}
            async with self._session.post(self._url, data=_in_two(payload), headers=head) as answer:
                if answer.status != 200:
                    stream.error = f"http {answer.status}: {(await answer.text())[:200]}"
                    return
                stream.ingress = answer.headers["x-request-id"].partition("-")[2][:4]  # as serve/api/endpoint.py
                if stream.is_streamed:
                    await self._read(answer.content.iter_any(), stream)
                else:
                    stream.take((await answer.json())["choices"][0]["token_ids"], self._clock())
        except TimeoutError:
            stream.error = f"no end within {REQUEST_S:.0f} s"
        except (aiohttp.ClientError, OSError) as error:
            stream.error = f"{CUT}: {type(error).__name__} {error}"[:200]
        except (StreamFailed, ValueError, LookupError) as error:
            stream.error = f"unreadable: {type(error).__name__} {error}"[:200]

    async def _read(self, parts: AsyncIterator[bytes], stream: ClientStream) -> None:
        async for events in sse_events(parts):
            for event in events:
                if event == b"[DONE]":
                    return
                chunk = json.loads(event)
                if "error" in chunk:
                    stream.error = f"error event: {chunk['error'].get('message', '')}"[:200]
                    return
                for choice in chunk["choices"]:
                    if tokens := choice.get("token_ids"):
                        stream.take(tokens, self._clock())
        stream.error = f"{CUT}: no end of the stream"

    # ---- clients that leave

    async def leave_before_first_token(self, choice: float, *, num_requests: int = 1) -> None:
        """Send requests at once, and close their connections soon. With many of them most are queued then."""
        request = max(self._requests, key=lambda one: len(one.prompt))
        tasks = [asyncio.create_task(self.send(request)) for _ in range(num_requests)]
        await asyncio.sleep(choice * LEAVE_S)
        await _leave(tasks)

    async def leave_midway(self, choice: float) -> None:
        """Close a connection once this share of its tokens has come."""
        request = max(self._requests, key=lambda one: one.num_tokens)
        stream = self._begin(request)
        task = asyncio.create_task(self._exchange(request, stream))
        while not task.done() and len(stream.tokens) < choice * request.num_tokens:
            await asyncio.sleep(0.01)
        await _leave([task])


async def _in_two(body: bytes) -> AsyncIterator[bytes]:
    """The body in packets of its own, not in the head's: HAProxy then has a choice what it passes on first."""
    yield body[:1]
    await asyncio.sleep(0)
    yield body[1:]


async def _leave(tasks: Sequence["asyncio.Task[None]"]) -> None:
    for task in tasks:
        task.cancel()
    for task in tasks:
        with suppress(asyncio.CancelledError):
            await task
