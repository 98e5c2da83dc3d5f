"""The contenders of bench/transfer/transfer.py: kvrelay over every transport that it has, and the peers; processes for
both ends.
"""

import asyncio
import contextlib
import json
import os
import sys
import tempfile
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.transfer.blocks import Row
from kvrelay.kvtransfer.paths.selection import TRANSPORTS
from kvrelay.settings.choices import ChecksMode

ROOT = Path(__file__).resolve().parents[2]
ANSWER_TIMEOUT_S = 120.0
OVER_TCP = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}  # makes UCX use TCP though both ends are on one host
CHECKS = sorted(typing.get_args(ChecksMode), key=("off", "sampled", "full").index)
TCP_VARIANTS = ({"tcp_streams": 4}, {"tls": True})  # in other ways than its default


class ContenderFailed(Exception):
    """It cannot take part (any more); the text says why."""


@dataclass(frozen=True, slots=True)
class Contender:
    """`roles`: the processes it consists of. `rows`: what is measured with them. The first role acts."""

    name: str
    kind: str
    rows: tuple[Row, ...]
    roles: tuple[str, ...] = ("target", "source")
    config: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    install: str = ""

    @property
    def is_ours(self) -> bool:
        return self.kind == "kvrelay"


def row(name: str, table: dict[str, Any] | None = None, **settings: Any) -> Row:
    """`table`: how a transport differs from its default. `settings`: kvrelay's, or the peer's own."""
    return {"name": name, "settings": settings, "table": table or {}}


def _ours(transport: str) -> Contender:
    rows = [row(f"{transport}, checks {checks}", checks=checks) for checks in CHECKS]
    for table in TCP_VARIANTS if transport == "tcp" else ():
        how = ", ".join(f"{key} {value}" for key, value in table.items())
        rows += [row(f"tcp, {how}, checks {checks}", table, checks=checks) for checks in ("off", "full")]
    return Contender(transport, "kvrelay", tuple(rows), ("source", "target"), {"transport": transport})


def contenders(transports: list[str] | None, peers: list[str] | None) -> list[Contender]:
    """The named contenders; None: all."""
    ours = [_ours(name) for name in TRANSPORTS if name in (transports or TRANSPORTS) and name != "loopback"]
    if transports is None or "nixl" in transports:
        rows = (row("nixl over UCX's TCP, checks off", checks="off"),)
        ours.append(Contender("nixl-tcp", "kvrelay", rows, ("source", "target"), {"transport": "nixl"}, OVER_TCP))
    return [*ours, *(peer for peer in PEERS if peers is None or peer.kind in peers)]


_NIXL = "pip install nixl-cu13"
PEERS = (
    Contender("plain", "plain", (row("plain loop, TCP", family="tcp"), row("plain loop, Unix socket", family="unix"))),
    Contender("raw-nixl", "nixl", (row("NIXL alone"),), install=_NIXL),
    Contender(
        "raw-nixl-tcp", "nixl", (row("NIXL alone over TCP"),), config={"spins": True}, env=OVER_TCP, install=_NIXL
    ),
    Contender(
        "mooncake",
        "mooncake",
        (row("Mooncake over TCP"),),
        install="pip install mooncake-transfer-engine-non-cuda, and the system's libibverbs1",
    ),
)


class Child:
    """One process of a contender. Its errors go to a file, whose end is printed when it fails."""

    def __init__(self, contender: Contender, role: str) -> None:
        self._contender, self._role = contender, role
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed by aclose)
        self._process: asyncio.subprocess.Process | None = None

    async def start(self, num_blocks: int, pages: str) -> None:
        config = {"blocks": num_blocks, "pages": pages, **self._contender.config}
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "bench.transfer.child",
            self._contender.kind,
            self._role,
            json.dumps(config),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=self._errors,
            cwd=ROOT,
            env={**os.environ, **self._contender.env},
            limit=1 << 24,
        )

    async def query(self, op: str, **fields: Any) -> dict[str, Any]:
        """Raises ContenderFailed."""
        assert self._process is not None and self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(ConnectionError):  # it has gone: the answer will be empty
            self._process.stdin.write(json.dumps({"op": op, **fields}).encode() + b"\n")
            await self._process.stdin.drain()
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                line = await self._process.stdout.readline()
        except TimeoutError as error:
            raise ContenderFailed(f"its {self._role} did not answer within {ANSWER_TIMEOUT_S:g} s") from error
        answer: dict[str, Any] = json.loads(line) if line else {"error": self._last_words()}
        if "error" in answer:
            raise ContenderFailed(f"{self._role}: {answer['error']}")
        return answer

    def _last_words(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode("utf-8", "replace").strip().splitlines()
        return lines[-1] if lines else "it ended"

    async def aclose(self) -> None:
        """Ask it to end; kill it if it does not."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            try:
                async with asyncio.timeout(15.0):
                    await self._process.wait()
            except TimeoutError:
                self._process.kill()
                await self._process.wait()
        self._errors.close()


class Pair:
    """A contender's running processes."""

    def __init__(self, contender: Contender) -> None:
        self.contender = contender
        self._children = {role: Child(contender, role) for role in contender.roles}
        self._actor = self._children[contender.roles[0]]
        self._other = self._children[contender.roles[-1]]

    async def start(self, num_blocks: int, pages: str) -> None:
        """Raises ContenderFailed."""
        for child in self._children.values():
            await child.start(num_blocks, pages)
        given, back = await self._other.query("start"), await self._actor.query("start")
        await self._other.query("connect", peer=back)
        await self._actor.query("connect", peer=given)

    async def visit(self, measured: Row, shape: str) -> dict[str, Any]:
        """The shape's transfers once: seconds of each as "read" and (ours) "whole", CPU seconds by end as "cpu_s"."""
        order = await self._other.query("begin", row=measured, shape=shape)
        await self._actor.query("begin", row=measured, shape=shape)
        await self._actor.query("move", row=measured, shape=shape, order=order)
        figures = await self._actor.query("end")
        others = await self._other.query("end")
        return {**others, **figures, "cpu_s": figures["cpu_s"] | others["cpu_s"]}

    async def prove(self, measured: Row, shape: str) -> None:
        """Warm up, and see that the target has the source's bytes afterwards. Raises ContenderFailed."""
        ends = self._children
        await ends["target"].query("clear", shape=shape)
        await self.visit(measured, shape)
        sent, came = [(await ends[end].query("digest", shape=shape, end=end))["digest"] for end in ("source", "target")]
        if sent != came:
            raise ContenderFailed(f"{measured['name']}: the target does not have the source's bytes")

    async def aclose(self) -> None:
        await asyncio.gather(*(child.aclose() for child in self._children.values()))
