"""Several paths between two workers: a read that fails over one goes on over the next (fake and real transports)."""

import asyncio
import dataclasses

import msgspec
import numpy as np
import pytest

from kvrelay.errors import ChecksumMismatch, PeerLost, TransferTimeout, TransportError
from kvrelay.kvtransfer.paths.selection import TRANSPORTS, Route, offered
from kvrelay.kvtransfer.protocol.messages import Offer
from kvrelay.kvtransfer.transports.base import Transport
from kvrelay.kvtransfer.transports.memory import LOOPBACK, LoopbackReader
from kvrelay.kvtransfer.transports.topology import this_machine

BLOCKS = [5, 2, 9, 63, 0, 31, 30, 29]


class Fickle(LoopbackReader):
    """Fails or hangs as `mood` says: "well", "fails", "stuck" (until abandoned), "hopeless" (for ever), "lies"."""

    mood, num_reads = "well", 0

    def read(self, copies, landed=None):
        kind = type(self)
        kind.num_reads += 1
        if kind.mood == "well":
            return super().read(copies, landed)
        self.pending = asyncio.get_running_loop().create_future()
        if kind.mood == "fails":
            self.pending.set_exception(TransportError("the cable is out"))
        elif kind.mood == "lies":
            self.copy(copies)
            self._bytes[copies.target_offset[0]] ^= 1
            try:
                landed(copies.total_bytes)
            except TransportError as error:
                self.pending.set_exception(error)
        return self.pending

    def abandon(self, read):
        if type(self).mood == "stuck" and not read.done():
            read.set_exception(TransportError("abandoned"))


@pytest.fixture
async def two(kv):
    """(source, target, reader class of the better path, of the other)."""
    first, second = (type(name, (Fickle,), {}) for name in ("First", "Second"))
    table = {
        name: Transport(name, LOOPBACK.make_exporter, kind, LOOPBACK.why_not)
        for name, kind in (("first", first), ("second", second))
    }
    source = await kv.source(transports=table)
    target = await kv.target(transports=table, stall_s=0.1)
    yield source, target, first, second
    for kind in (first, second):
        kind.mood = "well"


def arrived(kv, source, target, target_blocks=BLOCKS):
    return np.array_equal(kv.lib.regions(target.memory)[:, target_blocks], kv.lib.regions(source.memory)[:, BLOCKS])


@pytest.mark.parametrize("mood", ["fails", "stuck"])
async def test_the_rest_of_a_transfer_goes_on_over_the_next_path(kv, two, mood):
    source, target, first, second = two
    layers = [range(i, i + 1) for i in kv.lib.ALL_LAYERS]
    transfer = kv.send(source, target, "r1", BLOCKS, BLOCKS, layer_groups=layers[:2])
    while first.num_reads < 2:
        await asyncio.sleep(0)
    first.mood = mood
    for group in layers[2:]:
        transfer.announce(0, BLOCKS, group)
    await transfer.commit(b"")
    assert arrived(kv, source, target)
    stats = target.stats()
    assert (
        stats.retries == stats.paths["first"].retries == first.num_reads - 2
    )  # both that were under way, then it rests
    assert 1 <= stats.retries <= first.max_in_flight
    assert second.num_reads == 2
    assert stats.paths["first"].num_bytes == stats.paths["second"].num_bytes == stats.num_bytes // 2


async def test_a_path_that_failed_rests_and_is_taken_again_afterwards(kv, two):
    source, target, first, _second = two
    first.mood = "fails"
    assert (await kv.send(source, target, "r1", BLOCKS, BLOCKS).commit(b"")).transport == "second"
    first.mood = "well"
    assert (await kv.send(source, target, "r2", BLOCKS, BLOCKS).commit(b"")).transport == "second"
    assert first.num_reads == 1
    (link,) = target.links
    link.route.table["first"].backs_off_until_s = 0.0  # its rest is over
    assert (await kv.send(source, target, "r3", BLOCKS, BLOCKS).commit(b"")).transport == "first"
    assert link.route.table["first"].problem == ""


async def test_a_read_that_cannot_be_stopped_is_not_repeated_over_another_path(kv, two):
    """Its bytes may land at any time: the blocks stay in quarantine, and the request is tried anew elsewhere."""
    source, target, first, second = two
    first.mood = "hopeless"
    transfer = kv.send(source, target, "r1", BLOCKS, BLOCKS)
    assert isinstance(await target.event("failed", "r1"), TransferTimeout)
    assert target.stats().quarantined_blocks == len(BLOCKS)
    assert second.num_reads == 0
    with pytest.raises(TransferTimeout):
        await transfer.commit(b"")
    await kv.send(source, target, "r2", BLOCKS, [40, 41, 42, 43, 44, 45, 46, 47]).commit(b"")
    assert second.num_reads == 1  # the next transfer does not wait for the stuck path
    assert target.kinds("r1") == ["failed"]


async def test_where_no_path_is_left_the_error_tells_what_each_one_said(kv, two):
    source, target, first, second = two
    first.mood = second.mood = "fails"
    with pytest.raises(PeerLost, match="first: the cable is out; second: the cable is out"):
        await kv.send(source, target, "r1", BLOCKS, BLOCKS).commit(b"")
    await target.event("released", "r1")
    assert (first.num_reads, second.num_reads) == (2, 2)  # a broken connection is opened once more


async def test_a_path_that_corrupts_is_left_for_the_next_transfer(kv, two):
    source, target, first, _second = two
    first.mood = "lies"
    with pytest.raises(ChecksumMismatch, match="first: 1 regions"):
        await kv.send(source, target, "r1", BLOCKS, BLOCKS).commit(b"")
    assert (await kv.send(source, target, "r2", BLOCKS, BLOCKS).commit(b"")).transport == "second"
    assert arrived(kv, source, target)


async def test_shared_memory_that_breaks_is_replaced_by_a_socket_in_mid_transfer(kv, monkeypatch):
    peer = await kv.process("source", transport="auto")
    target = await kv.target("auto")
    ticket = target.grant("r1", 0, BLOCKS, len(BLOCKS))
    seen = asyncio.Event()
    kv.tamper(lambda *_: seen.set())
    peer.tell("open", request_id="r1", ticket=ticket.hex())
    peer.tell("announce", request_id="r1", blocks=BLOCKS, layers=(0, 2))
    await seen.wait()

    def broken(*_):
        raise OSError("bus error")

    monkeypatch.setattr("kvrelay.kvtransfer.transports.memory.move", broken)
    peer.tell("announce", request_id="r1", blocks=BLOCKS, layers=(2, 4))
    peer.tell("commit", request_id="r1")
    await target.event("commit", "r1")
    peer.tell("digest", blocks=BLOCKS)
    assert (await peer.hear("digest"))["value"] == kv.lib.digest(target.memory, BLOCKS)
    moved = {name: sums.num_bytes for name, sums in target.stats().paths.items() if sums.num_bytes}
    assert len(moved) == 2 and moved["shm"] == sum(moved.values()) // 2


# ---- between GPUs of one host


class Opens:
    async def connect(self, descriptor):
        pass

    async def aclose(self):
        pass


class Refuses(Opens):
    async def connect(self, descriptor):
        raise TransportError("cuIpcOpenMemHandle_v2: CUDA_ERROR_INVALID_CONTEXT")


@pytest.mark.parametrize(("ipc", "taken"), [(Opens, "cuda_ipc"), (Refuses, "nixl")])
async def test_gpus_of_one_host_take_cuda_ipc_and_nixl_where_it_cannot_be_opened(kv, ipc, taken):
    readers = {"nixl": Opens, "cuda_ipc": ipc}
    table = {name: Transport(name, None, kind, lambda memory: None) for name, kind in readers.items()}
    pool = dataclasses.replace(kv.lib.allocate(), device="cuda:0", memfd=None, view=None)
    usable = offered("auto", pool, TRANSPORTS | table)
    assert usable == ["cuda_ipc", "nixl"]
    there = msgspec.structs.replace(this_machine(), process="another")
    offers = [Offer(name, b"") for name in readers]
    route = Route.between(there, "cuda:1", offers, "cuda:0", usable, lambda name: readers[name]())
    assert (await route.open()).name == taken
    assert ("CUDA_ERROR_INVALID_CONTEXT" in route.problems()) == (taken == "nixl")
    await route.aclose()
