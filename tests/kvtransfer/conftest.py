"""Fixtures of the KV plane's tests: sides that are closed at the end, and peers in other processes."""

import asyncio
import importlib.util
import json
import os
import signal
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from kvrelay.kvtransfer.mover.verification import ArrivingRead
from tests.kvtransfer.damage import damaged
from tests.stopping import stop

_PATH = Path(__file__).with_name("peer_process.py")


def _load(name):
    spec = importlib.util.spec_from_file_location(f"kvrelay_kvtransfer_{name}", _PATH.with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


peers, proxies = _load("peer_process"), _load("link_proxy")


class Peer:
    """A source or target in a process of its own."""

    def __init__(self, process):
        self._process = process
        self.pid = process.pid

    @classmethod
    async def spawn(cls, role, env=None, **config):
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(_PATH),
            role,
            json.dumps(config),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, **(env or {})},
        )
        peer = cls(process)
        await peer.hear("ready")
        return peer

    def tell(self, op, **fields):
        self._process.stdin.write(json.dumps({"op": op, **fields}).encode() + b"\n")

    async def hear(self, op):
        """The next answer of this kind; others (a library's output) are skipped."""
        async with asyncio.timeout(60):
            while line := await self._process.stdout.readline():
                if line.startswith(b"{"):
                    answer = json.loads(line)
                    if answer["op"] == op:
                        return answer
                    if answer["op"] == "failed":
                        raise AssertionError(f"the peer failed instead of {op}: {answer}")
        raise AssertionError(f"the peer ended before it said {op}")

    def signal(self, number):
        if number == signal.SIGSTOP:
            stop(self.pid)
        else:
            self._process.send_signal(number)

    async def aclose(self):
        if self._process.returncode is None:
            self._process.send_signal(signal.SIGKILL)
        await self._process.communicate()


@pytest.fixture
async def kv(monkeypatch):
    """Starts sides and closes them in reverse order: `await kv.source("tcp")`, `kv.target`, `kv.process`."""

    class Sides:
        lib = peers

        async def source(self, transport="loopback", **options):
            return await self._start(peers.SourceSide(transport, **options))

        async def target(self, transport="loopback", **options):
            return await self._start(peers.TargetSide(transport, **options))

        async def _start(self, side):
            await side.start()
            stack.push_async_callback(side.aclose)
            return side

        async def proxy(self, port, **options):
            return await self._start(proxies.LinkProxy(port, **options))

        async def process(self, role, **options):
            peer = await Peer.spawn(role, **options)
            stack.push_async_callback(peer.aclose)
            return peer

        async def pair(self, transport="loopback", deadline_s=30.0, **options):
            return (
                await self.source(transport, deadline_s=deadline_s, **options),
                await self.target(transport, **options),
            )

        @staticmethod
        def tamper(change):
            """Reads from now on call `change(memory, offset, num_bytes)` for what has landed; None: nothing."""
            kind = ArrivingRead if change is None else damaged(ArrivingRead, change)
            monkeypatch.setattr("kvrelay.decode.read_queue.ArrivingRead", kind)

        @staticmethod
        def send(source, target, request_id, source_blocks, target_blocks, *, first_block=0, layer_groups=None):
            """Grant, open and announce a whole transfer; returns it uncommitted."""
            ticket = target.grant(request_id, first_block, target_blocks, first_block + len(target_blocks))
            transfer = source.open(request_id, ticket)
            for layers in layer_groups or [peers.ALL_LAYERS]:
                transfer.announce(0, source_blocks, layers)
            return transfer

    async with AsyncExitStack() as stack, asyncio.timeout(120):
        yield Sides()
