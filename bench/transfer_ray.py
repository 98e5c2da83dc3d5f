"""Ray's object store for bench/transfer.py: a source actor puts the blocks, a target actor gets and scatters them."""

import os
import time
from pathlib import Path
from typing import Any

from transfer_pool import ENDS, Pool, Shape, pool_bytes, region_lists, shapes
from transfer_side import Row, Side

_HERE = Path(__file__).resolve().parent
PATHS = os.pathsep.join(map(str, (_HERE, _HERE.parent)))  # where actors find this file and kvrelay


class StoreEnd:
    """Either actor."""

    def __init__(self, num_blocks: int, end: str) -> None:
        self._pool = Pool(pool_bytes(num_blocks), is_filled=end == "source")
        self._shapes = shapes(num_blocks)

    def put(self, shape_name: str, index: int) -> list[Any]:
        """A reference to one array of the transfer's blocks."""
        import ray

        shape = self._shapes[shape_name]
        sources, _ = region_lists(shape, self._pool.num_bytes)[index]
        return [ray.put(self._pool.regions(shape)[sources])]

    def get(self, shape_name: str, index: int, reference: list[Any]) -> None:
        """Copy what the reference names to where it belongs."""
        import ray

        shape = self._shapes[shape_name]
        _, targets = region_lists(shape, self._pool.num_bytes)[index]
        self._pool.regions(shape)[targets] = ray.get(reference[0])

    def clear(self, shape_name: str) -> None:
        self._pool.clear(self._shapes[shape_name])

    def digest(self, shape_name: str, end: str) -> str:
        return self._pool.digest(self._shapes[shape_name], end)

    def cpu_s(self) -> float:
        return time.process_time()


class RayStore(Side):
    """Drives both actors, on a Ray of this bench's own. What Ray's other processes take is not in its CPU figures."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__({})
        self._num_blocks = config["blocks"]
        self._ends: dict[str, Any] = {}
        self._read: list[float] = []

    async def start(self) -> dict[str, Any]:
        import ray

        ray.init(
            address="local", num_cpus=2, include_dashboard=False, log_to_driver=False,
            object_store_memory=8 * pool_bytes(self._num_blocks), runtime_env={"env_vars": {"PYTHONPATH": PATHS}},
        )  # fmt: skip
        actor = ray.remote(num_cpus=0)(StoreEnd)
        self._ends = {end: actor.remote(self._num_blocks, end) for end in ENDS}
        self.cpu_s()
        return {}

    async def begin(self, row: Row, shape: Shape) -> dict[str, Any]:
        self._read = []
        return {}

    async def move(self, row: Row, shape: Shape, order: dict[str, Any]) -> None:
        for index in range(shape.repeat):
            began = time.perf_counter()
            self._ask("target", "get", shape.name, index, self._ask("source", "put", shape.name, index))
            self._read.append(time.perf_counter() - began)

    def _ask(self, end: str, method: str, *args: Any) -> Any:
        import ray

        return ray.get(getattr(self._ends[end], method).remote(*args))

    async def end(self) -> dict[str, list[float]]:
        return {"read": self._read}

    async def aclose(self) -> None:
        import ray

        ray.shutdown()

    def cpu_s(self) -> dict[str, float]:
        return {end: self._ask(end, "cpu_s") for end in self._ends}

    def clear(self, shape: Shape) -> None:
        self._ask("target", "clear", shape.name)

    def digest(self, shape: Shape, end: str) -> str:
        digest: str = self._ask(end, "digest", shape.name, end)
        return digest


def make(kind: str, role: str, pools: dict[str, Pool], every: dict[str, Shape], config: dict[str, Any]) -> Side:
    return RayStore(config)
