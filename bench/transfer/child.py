"""One end of one contender of bench/transfer/transfer.py, in a process of its own: JSON lines in, JSON lines out.

    python -m bench.transfer.child KIND source|target '{"blocks": 2048, "pages": "shared", ...}'

"begin" and "end" enclose a visit, whose CPU is that between them. The event loop is uvloop's, as a Serve replica's.
"""

import asyncio
import importlib
import json
import os
import sys
import traceback
from typing import Any, TextIO

import uvloop

from bench.transfer.blocks import End, Pool, Shape, pool_bytes, shapes

MODULES = {
    "kvrelay": "bench.transfer.ours",
    "nixl": "bench.transfer.peers",
    "plain": "bench.transfer.peers",
    "mooncake": "bench.transfer.peers",
}


class Host:
    """Answers the driver on behalf of a side."""

    def __init__(self, side: End, every: dict[str, Shape]) -> None:
        self._side, self._shapes = side, every
        self._cpu_s: dict[str, float] = {}

    async def answer(self, order: dict[str, Any]) -> dict[str, Any]:
        match order:
            case {"op": "start"}:
                return await self._side.start()
            case {"op": "connect", "peer": peer}:
                await self._side.connect(peer)
            case {"op": "end"}:
                figures = await self._side.end()
                spent = {end: after - self._cpu_s[end] for end, after in self._side.cpu_s().items()}
                return {**figures, "cpu_s": spent}
            case {"op": op, "shape": name}:
                return await self._visit(op, self._shapes[name], order)
        return {}

    async def _visit(self, op: str, shape: Shape, order: dict[str, Any]) -> dict[str, Any]:
        match op:
            case "clear":
                self._side.clear(shape)
            case "digest":
                return {"digest": self._side.digest(shape, order["end"])}
            case "begin":
                self._cpu_s = self._side.cpu_s()
                return await self._side.begin(order["row"], shape)
            case "move":
                await self._side.move(order["row"], shape, order["order"])
        return {}


async def run(kind: str, role: str, config: dict[str, Any], out: TextIO) -> None:
    every, size = shapes(config["blocks"]), pool_bytes(config["blocks"])
    pools = {role: Pool(size, is_filled=role == "source", pages=config["pages"])}
    side = importlib.import_module(MODULES[kind]).make(kind, role, pools, every, config)
    host = Host(side, every)
    reader = asyncio.StreamReader(limit=1 << 24)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        try:
            answer = await host.answer(json.loads(line))
        except Exception as error:  # a process edge: the driver leaves this contender out and says so
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        out.write(json.dumps(answer) + "\n")
        out.flush()
    await side.aclose()


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries that print must not be taken for answers
    uvloop.run(run(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), answers))
