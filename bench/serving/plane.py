"""What the request plane costs a token: added latency and CPU, at many concurrent streams.

    python -m bench.serving.plane [--streams 64] [--tokens 200] [--step-ms 20] [--json FILE]

A fake decode worker in its own process emits one batched Tokens message per step, as a real one does;
each token's id is the (machine-wide, monotonic) microsecond at which its step ended, so the receiver
knows its delay. Received in two ways:
  dispatcher   kvrelay.serve.requests.dispatcher: what the ingress does, routing, ordering and hand-over included
  plane        kvrelay.plane.connection alone: receive, decode, hand to per-stream queues
CPU is process time of the receiving and the sending process over the tokens, both without the streams'
start. Goals for the dispatcher: p50 <= 1 ms and <= 50 us of CPU per token at the ingress.
"""

import argparse
import asyncio
import contextlib
import multiprocessing
import statistics
import time
from collections.abc import AsyncIterator, Callable
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

import msgspec

from bench.figures import show
from kvrelay.config import Settings
from kvrelay.errors import ConnectionLost
from kvrelay.plane import messages as wire
from kvrelay.plane.connection import Server, connect
from kvrelay.plane.framing import Connection
from kvrelay.plane.reports import KvSnapshot, WorkerInfo
from kvrelay.router.decision.router import Router
from kvrelay.serve.requests.dispatcher import Dispatcher
from kvrelay.serve.workers.worker_link import Member
from kvrelay.types import Fingerprint

SECRET = b"bench"
BLOCK_SIZE = 16
FINGERPRINT = Fingerprint(1, "m", "bfloat16", BLOCK_SIZE, 2, 2, 8, "seed")
PROMPT_TOKENS = 64
GOAL_MS, GOAL_CPU_US = 1.0, 50.0

Send = Callable[[bytes], None]


def now_us() -> int:
    return time.monotonic_ns() // 1000


class FakeWorker:
    """Emits one token per stream and step once all streams are there. `report` gets its CPU seconds."""

    def __init__(self, streams: int, tokens: int, step_s: float, report: Pipe) -> None:
        self._num_streams, self._tokens, self._step_s, self._report = streams, tokens, step_s, report
        self._requests: list[str] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def welcome(self, port: int) -> wire.Welcome:
        info = WorkerInfo(
            worker_id="decode-0",
            role="decode",
            epoch="1",
            host="127.0.0.1",
            port=port,
            node_id="n",
            model="m",
            fingerprint=FINGERPRINT,
            block_size=BLOCK_SIZE,
            num_blocks=1 << 20,
            max_model_len=1 << 20,
            max_running=1024,
            kv_bytes_per_token=1,
            device="cpu",
            transports=[],
        )
        return wire.Welcome(protocol=wire.PROTOCOL_VERSION, info=info)

    def take(self, frame: bytes, send: Send) -> None:
        """One message from the ingress."""
        message = wire.decode_to_worker(frame)
        if isinstance(message, wire.Subscribe):
            send(wire.encode(KvSnapshot(seq=0, hashes=[])))
        elif isinstance(message, wire.Generate):
            self._requests.append(message.request.request_id)
            if len(self._requests) == self._num_streams:
                task = asyncio.create_task(self._run(list(self._requests), send))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                self._requests.clear()

    async def _run(self, requests: list[str], send: Send) -> None:
        cpu_s, next_s = time.process_time(), time.monotonic()
        for position in range(self._tokens):
            next_s += self._step_s
            await asyncio.sleep(max(next_s - time.monotonic(), 0))
            reason = "length" if position == self._tokens - 1 else None
            new = {"position": position, "token_ids": [now_us()], "finish_reason": reason}
            outputs = [wire.TokenOutput(request_id=request_id, **new) for request_id in requests]
            send(wire.encode(wire.Tokens(outputs=outputs)))
        self._report.send(time.process_time() - cpu_s)


def plane_worker(streams: int, tokens: int, step_s: float, report: Pipe) -> None:
    """Process: the fake worker behind kvrelay.plane.connection. Ends when its parent closes the pipe."""
    worker = FakeWorker(streams, tokens, step_s, report)

    async def serve() -> None:
        port = 0

        async def handle(connection: Connection) -> None:
            connection.send_nowait(wire.encode(worker.welcome(port)))
            with contextlib.suppress(ConnectionLost):
                while True:
                    worker.take(await connection.receive(), connection.send_nowait)

        server = Server(handle, SECRET)
        port = await server.start("127.0.0.1")
        report.send(port)
        await asyncio.to_thread(report.recv)
        await server.aclose()

    asyncio.run(serve())


def request(index: int, tokens: int) -> wire.SequenceRequest:
    """A stream's request; its prompt has no hashes, so nothing is looked up that the fake worker lacks."""
    return wire.SequenceRequest(
        request_id=f"bench-{index}",
        token_ids=list(range(index * PROMPT_TOKENS, (index + 1) * PROMPT_TOKENS)),
        num_prompt_tokens=PROMPT_TOKENS,
        block_hashes=[],
        sampling=wire.Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True),
    )


class Meter:
    """Delays of tokens and the process time from the first to the last of them."""

    def __init__(self) -> None:
        self.delays_us: list[int] = []
        self._begin_s: float | None = None
        self._end_s = 0.0

    def take(self, token_id: int) -> None:
        if self._begin_s is None:
            self._begin_s = time.process_time()
        self.delays_us.append(now_us() - token_id)

    def stop(self) -> None:
        self._end_s = time.process_time()

    def row(self, name: str, worker_cpu_s: float, step_ms: float) -> dict[str, Any]:
        ordered = sorted(self.delays_us)
        count = len(ordered)
        p50_ms = statistics.median(ordered) / 1000
        cpu_us = 1e6 * (self._end_s - (self._begin_s or 0.0)) / count
        return {
            "way": name,
            "tokens": count,
            "delay p50 ms": p50_ms,
            "p99 ms": ordered[int(0.99 * (count - 1))] / 1000,
            "max ms": ordered[-1] / 1000,
            "receiver CPU us/token": cpu_us,
            "sender CPU us/token": 1e6 * worker_cpu_s / count,
            "p50 / step": p50_ms / step_ms,
            "goals met": "yes" if p50_ms <= GOAL_MS and cpu_us <= GOAL_CPU_US else "no",
        }


async def through_dispatcher(port: int, meter: Meter, streams: int, tokens: int) -> None:
    """What the ingress does with every stream."""
    settings = Settings()
    dispatcher = Dispatcher(Router(settings.router, tokens_per_hash=BLOCK_SIZE), SECRET, settings)
    dispatcher.workers.set_members([Member("decode-0", "decode", "127.0.0.1", port)])
    await dispatcher.start()
    async with asyncio.timeout(10):
        await dispatcher.workers.wait_for(lambda known: known.is_ready())

    async def read(index: int) -> None:
        async for output in dispatcher.generate(request(index, tokens), force="local"):
            for token_id in output.token_ids:
                meter.take(token_id)

    async with asyncio.TaskGroup() as group:
        for index in range(streams):
            group.create_task(read(index))
    meter.stop()
    await dispatcher.aclose()


async def through_queues(messages: AsyncIterator[bytes], send: Send, meter: Meter, streams: int, tokens: int) -> None:
    """The least that any receiver does: decode each message and hand its tokens to their streams' queues."""
    queues: dict[str, asyncio.Queue[wire.TokenOutput]] = {
        request(index, tokens).request_id: asyncio.Queue() for index in range(streams)
    }

    async def read(queue: asyncio.Queue[wire.TokenOutput]) -> None:
        while True:
            output = await queue.get()
            for token_id in output.token_ids:
                meter.take(token_id)
            if output.finish_reason:
                return

    async def deliver() -> None:
        async for frame in messages:
            message = wire.decode_from_worker(frame)
            if isinstance(message, wire.Tokens):
                for output in message.outputs:
                    queues[output.request_id].put_nowait(output)

    delivering = asyncio.create_task(deliver())
    async with asyncio.TaskGroup() as group:
        for index, queue in enumerate(queues.values()):
            group.create_task(read(queue))
            send(wire.encode(wire.Generate(request=request(index, tokens))))
    meter.stop()
    delivering.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await delivering


async def through_plane(port: int, meter: Meter, streams: int, tokens: int) -> None:
    connection = await connect("127.0.0.1", port, SECRET)

    async def messages() -> AsyncIterator[bytes]:
        while True:
            yield await connection.receive()

    try:
        await through_queues(messages(), connection.send_nowait, meter, streams, tokens)
    finally:
        await connection.aclose()


def measure(name: str, receiver: Any, options: argparse.Namespace) -> dict[str, Any]:
    """One row: a fresh worker process, one run."""
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    arguments = (options.streams, options.tokens, options.step_ms / 1000, there)
    process = spawn.Process(target=plane_worker, args=arguments, daemon=True)
    process.start()
    try:
        if not here.poll(60):
            raise SystemExit("the fake worker did not start")
        port = here.recv()
        meter = Meter()
        asyncio.run(receiver(port, meter, options.streams, options.tokens))
        if not here.poll(10):
            raise SystemExit("the fake worker did not report")
        worker_cpu_s = here.recv()
        here.send("end")
        process.join(10)
    finally:
        process.kill()
    wanted = options.streams * options.tokens
    if len(meter.delays_us) != wanted:
        raise SystemExit(f"{name}: {len(meter.delays_us)} of {wanted} tokens came")
    return meter.row(name, worker_cpu_s, options.step_ms)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=200, help="tokens of each stream")
    parser.add_argument("--step-ms", type=float, default=20.0, help="time of one step of the fake worker")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = [measure("dispatcher", through_dispatcher, options), measure("plane", through_plane, options)]
    size = len(wire.encode(wire.Tokens(outputs=[_example(index) for index in range(options.streams)])))
    title = f"request plane, {options.streams} streams, a step of {options.step_ms:g} ms, {size} bytes per message"
    show(title, rows, options.json)


def _example(index: int) -> wire.TokenOutput:
    return msgspec.structs.replace(
        wire.TokenOutput(request_id=f"bench-{index}", position=9, token_ids=[now_us()]), finish_reason=None
    )


if __name__ == "__main__":
    main()
