"""How much longer a worker's steps take while other workers of the machine compute: measured beside neighbour
processes.

    python -m kvrelay.cluster.profiles.neighbours    one neighbour: its order on standard input, until that closes

Workers of one machine share memory bandwidth, caches and clock rate, and cores where there are more workers than cores.
A neighbour prefills and decodes in turn, without a pause.
"""

import json
import logging
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvrelay.cluster.profiles.fit import StepSampler
from kvrelay.config import Settings, settings_from
from kvrelay.engine.step.engine import Engine
from kvrelay.engine.worker.build import WorkerOptions, build_engine
from kvrelay.errors import ConfigError
from kvrelay.router.planning.speed_fit import DECODE, PREFILL
from kvrelay.types import Role

ROUNDS = 6  # of reference steps, with each number of neighbours
_NO_LIMIT_S = 1e9
_READY = "ready"


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
    """Run `count` processes that compute."""
    order = json.dumps({"settings": settings.model_dump(), "folder": str(folder)}) + "\n"
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "kvrelay.cluster.profiles.neighbours"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for _ in range(count)
    ]  # fmt: skip
    try:
        for process in processes:
            assert process.stdin is not None
            process.stdin.write(order)
            process.stdin.flush()
        for process in processes:
            assert process.stdout is not None
            if not any(line.strip() == _READY for line in process.stdout):
                raise ConfigError("a neighbour process ended while starting")
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                assert stream is not None
                stream.close()


def profiled_engine(settings: Settings, folder: Path) -> Engine:
    """A decode worker's engine without speculation, whose steps bring different numbers of tokens.

    Raises ModelError, BackendUnavailable.
    """
    plain = settings.model_copy(update={"engine": settings.engine.model_copy(update={"speculation": "off"})})
    options = WorkerOptions(
        settings=plain,
        model_dir=folder,
        model_name=folder.name,
        worker_id="profile",
        node_id="local",
        secret=b"",
        host="127.0.0.1",
        cores=None,
    )
    engine, _ = build_engine(options, Role.DECODE, layer_hook=None, wake=lambda: None)
    return engine


def main() -> int:
    """One neighbour's process."""
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    order = json.loads(sys.stdin.readline())
    engine = profiled_engine(settings_from(order["settings"]), Path(order["folder"]))
    sampler = StepSampler(engine, budget_s=_NO_LIMIT_S)
    sampler.reference_s(1)
    print(_READY, flush=True)
    while not select.select([sys.stdin], [], [], 0)[0]:  # closed when the measuring process has ended
        sampler.reference_s(1)
    engine.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
