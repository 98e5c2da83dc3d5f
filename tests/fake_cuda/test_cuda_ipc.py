"""CUDA IPC between two real processes over the fake runtime: what a read costs, and what happens when one of them dies.

Bytes move where the kernels run in Triton's interpreter, in processes of their own: the last tests.
"""

import asyncio
import ctypes
import dataclasses
import json
import os
import signal
import sys
import threading
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from kvrelay.errors import BackendUnavailable, TransportError
from kvrelay.kvtransfer.mover.copy_plan import CopyList
from kvrelay.kvtransfer.transports import cuda_ipc
from kvrelay.kvtransfer.transports.cuda_ipc import CUDA_IPC
from tests.fake_cuda import ipc_peer
from tests.fake_cuda.counters import counted, is_loaded, read
from tests.kvtransfer.peer_process import LAYOUT, SECRET, allocate, digest

SCRIPT = Path(ipc_peer.__file__)
COPIES = CopyList(np.array([4096, 0]), np.array([0, 65536]), np.array([4096, 8192]))
STALLS = {"device_waits", "stream_waits", "sync_copies", "pageable_to_device", "pageable_to_host", "kernels"}
TWO = 2  # reads


@pytest.fixture(autouse=True)
def kernels_do_nothing(monkeypatch):
    if is_loaded():
        from kvrelay.kvtransfer.transports import cuda_ipc_triton

        monkeypatch.setattr(cuda_ipc_triton, "problem", lambda device: None)


class Peer:
    def __init__(self, process, ready):
        self.process, self.ready = process, ready

    def tell(self, **command):
        self.process.stdin.write(json.dumps(command).encode() + b"\n")

    async def hear(self):
        async with asyncio.timeout(60):
            while line := await self.process.stdout.readline():
                if line.startswith(b"{"):
                    return json.loads(line)
        raise AssertionError("the peer ended")

    async def kill(self):
        self.process.send_signal(signal.SIGKILL)
        await self.process.wait()


@asynccontextmanager
async def peer(role, environment=None, **config):
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(SCRIPT),
        role,
        json.dumps(config),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, **(environment or {})},
    )
    one = Peer(process, None)
    try:
        one.ready = await one.hear()
        yield one
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@asynccontextmanager
async def mapped(device="cuda:0", target_device="cuda:0"):
    """(the exporting process, a reader that has mapped its pool)."""
    async with peer("export", device=device) as source:
        reader = CUDA_IPC.make_reader(ipc_peer.allocate(device=target_device), SECRET, "")
        try:
            await reader.connect(bytes.fromhex(source.ready["descriptor"]))
            yield source, reader
        finally:
            await reader.aclose()


def maps():
    return Path("/proc/self/maps").read_text().count("fake-device-memory")


async def test_the_map_is_the_sources_pool_and_closing_takes_it_away():
    with counted() as counts:
        async with mapped() as (_, reader):
            assert ctypes.string_at(reader._source, LAYOUT.num_bytes) == ipc_peer.random_bytes(LAYOUT, 1).tobytes()
            assert reader._source > reader._base and maps() == 1
    assert (counts["ipc_opens"], counts["ipc_closes"], maps()) == (1, 1, 0)


async def test_a_read_is_one_kernel_beside_the_engines_stream():
    async with mapped() as (_, reader):
        await reader.read(COPIES)  # builds the kernel
        landed = []
        with counted() as counts:
            await asyncio.gather(*(reader.read(COPIES, landed.append) for _ in range(TWO)))
        assert not STALLS & counts.keys()
        wanted = {"side_kernels", "pinned_to_device", "event_waits"}
        assert {name: counts[name] for name in wanted} == dict.fromkeys(wanted, TWO)
        assert landed == [COPIES.total_bytes] * TWO
        with counted() as counts:
            nothing = np.empty(0, np.int64)
            await reader.read(CopyList(nothing, nothing, nothing), landed.append)
        assert landed[TWO:] == [0] and not counts


async def test_the_counters_see_a_read_on_the_engines_stream(monkeypatch):
    """The control."""
    from kvrelay.kvtransfer.transports import cuda_ipc_triton

    monkeypatch.setattr(cuda_ipc_triton, "_stream", torch.cuda.default_stream)
    async with mapped() as (_, reader):
        with counted() as counts:
            await reader.read(COPIES)
    assert counts["kernels"] == 1


@pytest.mark.parametrize(("source", "target"), [(LAYOUT.num_bytes - 1, 0), (0, LAYOUT.num_bytes - 1), (-1, 0), (0, -1)])
async def test_a_copy_outside_either_pool_is_refused_and_nothing_runs(source, target):
    async with mapped() as (_, reader):
        with counted() as counts, pytest.raises(TransportError, match="outside the pool"):
            await reader.read(CopyList(np.array([source]), np.array([target]), np.array([2])))
        assert "side_kernels" not in counts


async def test_a_pool_that_is_larger_than_its_allocation_is_not_mapped():
    async with peer("export") as source:
        told = msgspec.msgpack.decode(bytes.fromhex(source.ready["descriptor"])[cuda_ipc._MAC_BYTES :])
        body = msgspec.msgpack.encode(told | {"num_bytes": 1 << 30})
        reader = CUDA_IPC.make_reader(ipc_peer.allocate(), SECRET, "")
        with pytest.raises(TransportError, match="something else"):
            await reader.connect(cuda_ipc._mac(SECRET, body) + body)
        await reader.aclose()
    assert maps() == 0


async def test_closing_waits_for_the_read_in_flight_and_drops_those_behind_it():
    has_begun, may_end = threading.Event(), threading.Event()

    def verify(num_bytes):
        has_begun.set()
        may_end.wait(30)

    async with mapped() as (_, reader):
        first = reader.read(COPIES, verify)
        await asyncio.to_thread(has_begun.wait, 30)
        second = reader.read(COPIES)
        with counted() as counts:
            await reader.aclose()  # gives up waiting, not the read
            assert maps() == 1 and not (first.done() or second.done())
            may_end.set()
            await asyncio.wait({first, second})
            await asyncio.to_thread(reader._thread.shutdown)
        assert first.result() is None and str(second.exception()) == "abandoned"
        assert "side_kernels" not in counts and maps() == 0
        with pytest.raises(TransportError, match="closed"):
            await reader.read(COPIES)


async def test_an_abandoned_read_is_never_taken_for_a_verified_one():
    landed, has_begun, may_go = [], threading.Event(), threading.Event()

    def verify(num_bytes):
        has_begun.set()
        may_go.wait(30)

    async with mapped() as (_, reader):
        first = reader.read(COPIES, verify)
        await asyncio.to_thread(has_begun.wait, 30)
        second = reader.read(COPIES, landed.append)
        reader.abandon(second)
        may_go.set()
        await asyncio.wait({first, second})
        assert str(second.exception()) == "abandoned" and not landed


async def test_a_source_killed_while_mapped_leaves_a_map_that_ends_with_the_reader():
    async with mapped() as (source, reader):
        await source.kill()
        before = ctypes.string_at(reader._memory.address, LAYOUT.num_bytes)
        async with asyncio.timeout(10):
            await reader.read(COPIES)
        assert ctypes.string_at(reader._memory.address, LAYOUT.num_bytes) == before  # no kernel moves bytes here
        assert ctypes.string_at(reader._source, LAYOUT.num_bytes) == ipc_peer.random_bytes(LAYOUT, 1).tobytes()
        again = CUDA_IPC.make_reader(reader._memory, SECRET, "")
        with pytest.raises(TransportError, match=r"CUDA_ERROR_MAP_FAILED; CUDA IPC needs"):
            await again.connect(bytes.fromhex(source.ready["descriptor"]))
        await again.aclose()
        assert maps() == 1
    assert maps() == 0


async def test_another_gpus_pool_is_read_where_the_two_reach_each_other():
    async with mapped("cuda:1", "cuda:0") as (_, reader):
        with counted(0) as here, counted(1) as there:
            await reader.read(COPIES)
        assert here["side_kernels"] == 1 and not there
        with counted(0) as here:
            await reader.aclose()
        assert here["ipc_closes"] == 1
    peers = ctypes.c_int.in_dll(ctypes.CDLL(None), "fake_peers")
    peers.value = 0
    try:
        with pytest.raises(TransportError, match="PEER_ACCESS_UNSUPPORTED"):
            async with mapped("cuda:1", "cuda:0"):
                pass
    finally:
        peers.value = 1
    assert maps() == 0


async def test_a_process_does_not_open_its_own_handle():
    memory = ipc_peer.allocate()
    exporter, reader = CUDA_IPC.make_exporter(memory, SECRET, ""), CUDA_IPC.make_reader(memory, SECRET, "")
    await exporter.start()
    with pytest.raises(TransportError, match="CUDA_ERROR_INVALID_CONTEXT"):
        await reader.connect(exporter.describe())
    await reader.aclose()


async def test_memory_that_cuda_cannot_share_is_named():
    pinned = torch.empty(LAYOUT.num_bytes, dtype=torch.uint8).pin_memory()  # no more shareable than an expandable one
    memory = dataclasses.replace(ipc_peer.allocate(), address=pinned.data_ptr())
    exports = read()["ipc_exports"]
    with pytest.raises(BackendUnavailable, match="expandable_segments"):
        await CUDA_IPC.make_exporter(memory, SECRET, "").start()
    assert read()["ipc_exports"] == exports


@pytest.mark.parametrize(
    ("config", "outcome"),
    [({}, "commit"), ({"flips": True}, "failed"), ({"flips": True, "checks": "off"}, "commit")],
    ids=["as it is", "a bit flipped", "a bit flipped and checks off"],
)
async def test_kv_crosses_with_its_checksums(config, outcome):
    """The whole KV plane of two workers; both kernels run, in the interpreter. A flipped bit is refused."""
    kernels = {"TRITON_INTERPRET": "1"}
    both = {"transport": "cuda_ipc"} | ({"checks": "off"} if "checks" in config else {})
    blocks = [5, 2, 9, 63, 0, 31, 30, 29]
    async with peer("source", kernels, fill=3, **both) as source, peer("target", kernels, **both | config) as target:
        target.tell(op="grant", request_id="r1", blocks=blocks)
        source.tell(op="open", request_id="r1", ticket=(await target.hear())["ticket"])
        source.tell(op="announce", request_id="r1", blocks=blocks, layers=(0, 2))
        source.tell(op="announce", request_id="r1", blocks=blocks, layers=(2, 4))
        source.tell(op="commit", request_id="r1")
        told = await source.hear()
        if outcome == "failed":
            assert (told["op"], told["error"]) == ("failed", "ChecksumMismatch"), told
            return
        assert (told["op"], told["transport"]) == ("committed", "cuda_ipc"), told
        assert told["num_bytes"] == len(blocks) * LAYOUT.block_bytes
        target.tell(op="await", kind="commit", request_id="r1", blocks=blocks)
        source.tell(op="digest", blocks=blocks)
        is_equal = (await target.hear())["digest"] == (await source.hear())["value"]
        assert is_equal == (not config)


async def test_a_source_killed_in_the_middle_of_a_transfer_fails_it_and_touches_no_other_block():
    kernels, blocks = {"TRITON_INTERPRET": "1"}, [5, 2, 9]
    others = [block for block in range(LAYOUT.num_blocks) if block not in blocks]
    config = {"transport": "cuda_ipc"}
    async with peer("source", kernels, fill=3, **config) as source, peer("target", kernels, **config) as target:
        target.tell(op="grant", request_id="r1", blocks=blocks)
        source.tell(op="open", request_id="r1", ticket=(await target.hear())["ticket"])
        source.tell(op="announce", request_id="r1", blocks=blocks, layers=(0, 2))
        await asyncio.sleep(1)  # it may be connecting, reading, or done with what was announced
        await source.kill()
        for kind in ("failed", "released"):
            target.tell(op="await", kind=kind, request_id="r1", blocks=others)
            untouched = (await target.hear())["digest"]
        assert untouched == digest(allocate(), others)
