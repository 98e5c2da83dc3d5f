"""When a NIXL read is over, and what is posted until then: against a NIXL that does what the test says."""

import asyncio
import dataclasses
from collections import deque

import numpy as np
import pytest

from kvrelay.errors import TransportError
from kvrelay.kvtransfer.transports.nixl.reads import FENCE_S, NixlRead, Reads

pytestmark = pytest.mark.processes


PIECE = 100  # bytes


class nixlRemoteDisconnectError(Exception):
    pass


class nixlNotFoundError(Exception):
    pass


class nixlBackendError(Exception):
    pass


class Handle:
    """One transfer: in flight until the test lets it end."""

    def __init__(self, piece, first):
        self.piece, self.state, self.is_released = piece, first, False

    def release(self):
        assert not self.is_released
        self.is_released = True


class FakeNixl:
    def __init__(self):
        self.handles = {}  # by piece

    def transfer(self, handle):
        return self.check_xfer_state(handle)

    def check_xfer_state(self, handle):
        assert not handle.is_released, "a released handle was used: NIXL would crash"
        if isinstance(handle.state, Exception):
            raise handle.state
        return handle.state


class FakePeer:
    def __init__(self, first="PROC"):
        self.is_lost, self._first = False, first
        self.was_quiet = []

    def post(self, api, piece, *, is_quiet):
        self.was_quiet.append(is_quiet)
        api.handles[piece] = Handle(piece, self._first)
        return api.handles[piece]


class Bench:
    """Reads over a fake NIXL, what they handed over, and a clock that the test moves."""

    def __init__(self):
        self.api, self.told, self.now_s = FakeNixl(), [], 1000.0
        self.reads = Reads(self._hand_over, lambda: self.now_s)

    def _hand_over(self, read, num_landed, is_last):
        self.told.append((read, num_landed, is_last))

    def begin(self, names, peer=None):
        """A read of one piece for each letter."""
        pieces = deque((name, PIECE) for name in names)
        loop = asyncio.get_running_loop()
        read = NixlRead(peer or FakePeer(), PIECE * len(names), pieces, None, loop.create_future(), loop)
        self.reads.begin(self.api, read)
        return read

    def poll(self):
        self.reads.poll(self.api)
        self.reads.hand_over()

    def end(self, name, state="DONE"):
        self.api.handles[name].state = state
        self.poll()

    def is_over(self, read):
        return any(told is read and is_last for told, _, is_last in self.told)


@pytest.fixture
async def bench():
    return Bench()


async def test_a_read_is_over_when_every_piece_of_it_has_ended(bench):
    read = bench.begin("abc")
    bench.poll()
    for name in "ab":
        bench.end(name)
        assert not bench.is_over(read)
    bench.end("c")
    assert bench.is_over(read) and read.error is None
    assert len(bench.reads) == 0


async def test_two_pieces_of_a_read_are_in_flight_and_no_more(bench):
    bench.begin("abc")
    for _ in range(3):
        bench.poll()
    assert list(bench.api.handles) == ["a", "b"]
    bench.end("a")
    assert list(bench.api.handles) == ["a", "b", "c"]


async def test_what_has_landed_is_told_in_order_though_a_later_piece_ends_first(bench):
    read = bench.begin("ab")
    bench.poll()
    bench.end("b")
    assert bench.told == []
    bench.end("a")
    assert bench.told == [(read, 2 * PIECE, True)]


async def test_what_has_landed_is_told_while_the_rest_is_under_way(bench):
    read = bench.begin("abc")
    bench.poll()
    bench.end("a")
    assert bench.told == [(read, PIECE, False)]


async def test_a_read_of_nothing_is_over_at_once(bench):
    read = bench.begin("")
    bench.poll()
    assert bench.told == [(read, 0, True)]


async def test_reads_take_turns_piece_by_piece(bench):
    peer = FakePeer("DONE")  # as over shared memory: a piece is copied inside the call
    bench.begin("abcd", peer)
    bench.begin("xy", peer)
    while bench.reads.has_room:
        bench.poll()
    assert "".join(bench.api.handles) == "axbycd"


async def test_a_handle_is_released_when_its_piece_has_ended_and_never_used_again(bench):
    bench.begin("ab")
    bench.poll()
    bench.end("a")
    assert bench.api.handles["a"].is_released and not bench.api.handles["b"].is_released
    bench.poll()  # the fake objects to the use of a released handle
    bench.end("b")
    assert bench.api.handles["b"].is_released


@pytest.mark.parametrize("failure", [nixlRemoteDisconnectError(), nixlBackendError("broken"), "ERR"])
@pytest.mark.parametrize("when", ["posted", "in flight"])
async def test_a_failure_ends_the_read_after_a_fence_and_not_before(bench, failure, when):
    read = bench.begin("ab", FakePeer(failure if when == "posted" else "PROC"))
    bench.end("a", failure)
    assert not bench.is_over(read) and not bench.api.handles["a"].is_released
    assert bench.reads.is_fenced
    bench.now_s += FENCE_S
    bench.poll()
    assert bench.is_over(read) and isinstance(read.error, TransportError)
    assert bench.told == [(read, 0, True)]
    assert all(handle.is_released for handle in bench.api.handles.values())


async def test_a_failed_read_waits_for_its_other_piece_however_long_that_takes(bench):
    read = bench.begin("ab")
    bench.poll()
    bench.end("a", nixlBackendError())
    bench.now_s += 1000 * FENCE_S
    bench.poll()
    assert not bench.is_over(read) and not bench.api.handles["b"].is_released
    bench.end("b")
    assert bench.is_over(read)


async def test_after_a_failure_nothing_more_is_posted(bench):
    bench.begin("abc")
    bench.poll()
    bench.end("a", nixlBackendError())
    bench.now_s += FENCE_S
    bench.end("b")
    assert list(bench.api.handles) == ["a", "b"]


async def test_that_nixl_has_forgotten_the_peer_is_no_end_for_the_bytes_still_come(bench):
    read = bench.begin("a")
    bench.end("a", nixlNotFoundError())
    bench.now_s += 1000 * FENCE_S
    bench.poll()
    assert not bench.is_over(read) and not bench.api.handles["a"].is_released
    assert not bench.reads.is_awaited  # polled seldom from now on


async def test_after_a_broken_connection_a_forgotten_peer_is_the_end(bench):
    peer = FakePeer()
    first, second = bench.begin("a", peer), bench.begin("b", peer)
    bench.end("a", nixlRemoteDisconnectError())  # NIXL forgets the peer then, for all its reads
    bench.end("b", nixlNotFoundError())
    bench.now_s += FENCE_S
    bench.poll()
    assert bench.is_over(first) and bench.is_over(second)
    assert peer.is_lost


async def test_a_peer_is_quiet_when_nothing_of_it_is_in_flight(bench):
    peer, other = FakePeer(), FakePeer()
    bench.begin("x", other)
    bench.begin("a", peer)
    bench.begin("b", peer)
    bench.end("a")
    bench.end("b")
    bench.begin("c", peer)
    assert peer.was_quiet == [True, False, True]


async def test_a_piece_that_cannot_be_posted_fails_its_read_alone(bench):
    class Refusing(FakePeer):
        def post(self, api, piece, *, is_quiet):
            raise nixlBackendError("invalid")

    read, other = bench.begin("a", Refusing()), bench.begin("b")
    bench.poll()
    bench.end("b")
    assert bench.is_over(read) and isinstance(read.error, TransportError) and "invalid" in str(read.error)
    assert bench.is_over(other) and other.error is None


async def test_an_abandoned_read_posts_no_more_and_is_over_when_what_was_posted_is(bench):
    read = bench.begin("abcd")
    bench.poll()
    bench.reads.abandon(read.done)
    assert not bench.reads.is_awaited
    bench.end("a")
    assert not bench.is_over(read)
    bench.end("b")
    assert bench.is_over(read)
    assert list(bench.api.handles) == ["a", "b"]


async def test_a_read_whose_bytes_are_wrong_posts_no_more(bench):
    read = bench.begin("abcd")
    bench.poll()
    bench.end("a")
    read.error = TransportError("its checksums differ")  # found on the verifier's thread
    num_posted = len(bench.api.handles)
    for name in list(bench.api.handles)[1:]:
        bench.end(name)
    assert bench.is_over(read) and len(bench.api.handles) == num_posted


async def test_two_views_of_one_memory_in_regions_of_unlike_size_do_not_mix(kv):
    """Both pools' memory is registered once and shared; what was prepared for one region size is not used for
    another.
    """
    wide = dataclasses.replace(kv.lib.LAYOUT, num_blocks=kv.lib.LAYOUT.num_blocks // 2, block_size=32)
    memories = [kv.lib.allocate(fill=1), kv.lib.allocate()]
    for number, layout in enumerate((kv.lib.LAYOUT, wide)):
        fingerprint = dataclasses.replace(kv.lib.FINGERPRINT, block_size=layout.block_size)
        views = [dataclasses.replace(memory, layout=layout) for memory in memories]
        source = await kv.source("nixl", memory=views[0], fingerprint=fingerprint)
        target = await kv.target("nixl", memory=views[1], fingerprint=fingerprint)
        blocks, landing = [3, 9, 20], [8, 1, 30]
        kv.lib.regions(target.memory)[:] = 0
        await kv.send(source, target, f"r{number}", blocks, landing).commit(b"")
        assert np.array_equal(kv.lib.regions(target.memory)[:, landing], kv.lib.regions(source.memory)[:, blocks])
