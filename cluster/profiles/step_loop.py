"""The time between two steps of a worker: measured on its engine thread, with the messages that follow a step.

Messages are encoded and written to a socket that another thread reads, as in a worker. Left out: the interpreter time
that a worker's event loop takes for new requests and KV reads.
"""

import asyncio
import socket
import statistics
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise

from kvrelay.engine.profiling.step_profile import add_prompt
from kvrelay.engine.step.config import StepResult
from kvrelay.engine.step.engine import Engine, OnReserved
from kvrelay.engine.worker.thread import EngineThread
from kvrelay.plane.messages import Tokens, encode

NUM_SEQUENCES, PROMPT_TOKENS, NUM_STEPS = 4, 64, 120
_FIRST_NUMBER = 1 << 20  # of prompts: unlike those of an earlier sampler
_LIMIT_S = 60.0


def between_steps_s(engine: Engine) -> float:
    """Seconds between steps that decode a few sequences: the lower quartile, since other load only makes it longer.

    The engine must be idle, and is so afterwards.
    """
    step, close = engine.step, engine.close
    try:
        engine.close = lambda: None  # type: ignore[method-assign]  # the thread closes its engine at its end
        return asyncio.run(_between_steps_s(engine))
    finally:
        engine.step, engine.close = step, close  # type: ignore[method-assign]


async def _between_steps_s(engine: Engine) -> float:
    ours, theirs = socket.socketpair()
    reader = threading.Thread(target=_read_all, args=(theirs,), daemon=True)
    reader.start()
    spans = _timed(engine)

    def send(result: StepResult) -> None:
        ours.sendall(encode(Tokens(outputs=result.outputs)))
        result.outputs = []

    def on_step(result: StepResult) -> None:
        for message in (result.events, result.load):
            if message is not None:
                ours.sendall(encode(message))

    thread = EngineThread(lambda: engine, on_step=on_step, on_failure=lambda error: None, send=send)
    await thread.start()
    try:
        await thread.call(_add_sequences)
        with suppress(TimeoutError):
            async with asyncio.timeout(_LIMIT_S):
                while await thread.call(lambda e: e.scheduler.has_work):
                    await asyncio.sleep(0.25)  # rarely: every call runs between two steps
    finally:
        await thread.aclose()
        ours.close()
        reader.join()
        theirs.close()
    gaps = [begin_s - end_s for (_, end_s), (begin_s, _) in pairwise(spans)]
    return max(0.0, statistics.quantiles(gaps, n=4)[0]) if len(gaps) > 1 else 0.0


def _add_sequences(engine: Engine) -> None:
    count, longest = min(NUM_SEQUENCES, engine.config.max_running), engine.max_model_len
    tokens = min(PROMPT_TOKENS, longest // 4)
    for number in range(count):
        add_prompt(engine, _FIRST_NUMBER + number, tokens, max_tokens=min(NUM_STEPS, longest - tokens - 1))


def _timed(engine: Engine) -> list[tuple[float, float]]:
    """Record the beginnings and ends of its steps from now on."""
    spans: list[tuple[float, float]] = []
    step: Callable[..., StepResult] = engine.step

    def timed(on_reserved: OnReserved | None = None) -> StepResult:
        begin_s = time.perf_counter()
        result = step(on_reserved)
        spans.append((begin_s, time.perf_counter()))
        return result

    engine.step = timed  # type: ignore[method-assign]
    return spans


def _read_all(end: socket.socket) -> None:
    while end.recv(1 << 16):
        pass
