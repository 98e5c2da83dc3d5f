"""What a worker's steps cost beside the steps themselves: the time between two (messages encoded and written to a
socket that another thread reads), and how much longer steps take while other workers of the machine prefill and decode.
"""

import asyncio
import multiprocessing
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from multiprocessing.synchronize import Semaphore
from pathlib import Path

from kvrelay.cluster.profiles.fit import StepSampler, add_prompt
from kvrelay.config import Settings
from kvrelay.engine.step.config import StepResult
from kvrelay.engine.step.engine import Engine, OnReserved
from kvrelay.engine.worker.build import WorkerOptions, build_engine
from kvrelay.engine.worker.thread import EngineThread
from kvrelay.errors import ConfigError
from kvrelay.plane.messages import Tokens, encode
from kvrelay.router.planning.speed_fit import DECODE, PREFILL
from kvrelay.types import Role

ROUNDS = 6  # of reference steps, with each number of neighbours
_NO_LIMIT_S = 1e9
_POLL_S = 0.5
NUM_SEQUENCES, PROMPT_TOKENS, NUM_STEPS = 4, 64, 120
_FIRST_NUMBER = 1 << 20  # of prompts: unlike those of an earlier sampler
_LIMIT_S = 60.0


def slowdowns(engine: Engine, settings: Settings, folder: Path, most: int) -> dict[str, tuple[float, ...]]:
    """By kind of step: the factor on its time while 1, 2, ... `most` workers compute, itself included.

    Raises ConfigError: a neighbour did not start.
    """
    sampler = StepSampler(engine, budget_s=_NO_LIMIT_S)
    sampler.reference_s(1)
    alone = sampler.reference_s(ROUNDS)
    found = {kind: [1.0] for kind in (PREFILL, DECODE)}
    for count in range(2, most + 1):
        with _neighbours(settings, folder, count - 1):
            beside = sampler.reference_s(ROUNDS)
        for kind, ratios in found.items():
            ratios.append(max(1.0, beside[kind] / alone[kind]))
    return {kind: tuple(ratios) for kind, ratios in found.items()}


@contextmanager
def _neighbours(settings: Settings, folder: Path, count: int) -> Iterator[None]:
    """Run `count` processes that compute. Raises ConfigError: one did not start."""
    context = multiprocessing.get_context("spawn")
    ready = context.Semaphore(0)
    processes = [context.Process(target=_compute, args=(settings, folder, ready), daemon=True) for _ in range(count)]
    for process in processes:
        process.start()
    try:
        for _ in processes:
            while not ready.acquire(timeout=_POLL_S):
                if not all(process.is_alive() for process in processes):
                    raise ConfigError("a neighbour process ended while starting")
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def _compute(settings: Settings, folder: Path, ready: Semaphore) -> None:
    """One neighbour's process: it prefills and decodes until it is killed, or the measuring process has ended."""
    sampler = StepSampler(profiled_engine(settings, folder), budget_s=_NO_LIMIT_S)
    sampler.reference_s(1)
    ready.release()
    parent = multiprocessing.parent_process()
    while parent is not None and parent.is_alive():
        sampler.reference_s(1)


def profiled_engine(settings: Settings, folder: Path) -> Engine:
    """A decode worker's engine without speculation, whose steps bring different numbers of tokens.

    Raises ModelError, BackendUnavailable.
    """
    plain = settings.model_copy(update={"engine": settings.engine.model_copy(update={"speculation": "off"})})
    options = WorkerOptions(settings=plain, model_dir=folder, model_name=folder.name, worker_id="profile")
    engine, _ = build_engine(options, Role.DECODE, layer_hook=None, wake=lambda: None)
    return engine


def between_steps_s(engine: Engine) -> float:
    """Seconds between steps that decode a few sequences: the lower quartile, since other load only makes it longer.

    The engine must be idle, and is so afterwards.
    """
    spans: list[tuple[float, float]] = []
    step, close = engine.step, engine.close

    def timed(on_reserved: OnReserved | None = None) -> StepResult:
        begin_s = time.perf_counter()
        result = step(on_reserved)
        spans.append((begin_s, time.perf_counter()))
        return result

    engine.step, engine.close = timed, lambda: None  # type: ignore[method-assign]  # the thread closes its engine
    try:
        asyncio.run(_decode_on_a_thread(engine))
    finally:
        engine.step, engine.close = step, close  # type: ignore[method-assign]
    gaps = [begin_s - end_s for (_, end_s), (begin_s, _) in pairwise(spans)]
    return max(0.0, statistics.quantiles(gaps, n=4)[0]) if len(gaps) > 1 else 0.0


async def _decode_on_a_thread(engine: Engine) -> None:
    ours, theirs = socket.socketpair()
    reader = threading.Thread(target=_read_all, args=(theirs,), daemon=True)
    reader.start()

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


def _read_all(end: socket.socket) -> None:
    while end.recv(1 << 16):
        pass


def _add_sequences(engine: Engine) -> None:
    count, longest = min(NUM_SEQUENCES, engine.config.max_running), engine.max_model_len
    tokens = min(PROMPT_TOKENS, longest // 4)
    for number in range(count):
        add_prompt(engine, _FIRST_NUMBER + number, tokens, max_tokens=min(NUM_STEPS, longest - tokens - 1))
