"""Messages, checksums and the choice of a transport."""

import dataclasses

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.errors import BackendUnavailable
from kvrelay.kvtransfer.mover.mover import xxh3_regions
from kvrelay.kvtransfer.mover.verification import unpack
from kvrelay.kvtransfer.paths.selection import offered
from kvrelay.kvtransfer.protocol.messages import Announce, Commit, decode_to_source, decode_to_target, encode
from kvrelay.kvtransfer.transports.base import Transport
from kvrelay.kvtransfer.transports.topology import Topology, rank_paths
from kvrelay.types import KvLayout, KvMemory

pytestmark = pytest.mark.pure


@given(st.binary(max_size=200))
def test_any_bytes_decode_or_raise_decode_error(frame):
    for decode in (decode_to_target, decode_to_source):
        try:
            message = decode(frame)
        except msgspec.DecodeError:
            continue
        assert isinstance(message, msgspec.Struct)


@pytest.mark.parametrize("missing", ["nonce", "first_chunk", "chunks", "first_layer", "num_layers"])
def test_an_incomplete_message_is_a_decode_error(missing):
    whole = Announce(nonce=b"n", first_chunk=0, chunks=[1], first_layer=0, num_layers=1)
    fields = msgspec.msgpack.decode(encode(whole))
    del fields[missing]
    with pytest.raises(msgspec.DecodeError):
        decode_to_target(msgspec.msgpack.encode(fields))


def test_a_message_for_the_other_side_is_a_decode_error():
    with pytest.raises(msgspec.DecodeError):
        decode_to_source(encode(Commit(nonce=b"n", payload=b"", seal=b"")))


@given(position=st.integers(0, 255), bit=st.integers(0, 7))
def test_a_flipped_bit_changes_the_checksum_of_its_region_only(position, bit):
    data = bytearray(range(256))
    offsets = np.arange(0, 256, 64)
    before = xxh3_regions(memoryview(data), offsets, 64)
    data[position] ^= 1 << bit
    changed = xxh3_regions(memoryview(data), offsets, 64) != before
    assert np.flatnonzero(changed).tolist() == [position // 64]


def test_checksums_survive_their_packing():
    values = xxh3_regions(memoryview(bytes(range(256))), np.arange(0, 256, 16), 16)
    assert np.array_equal(unpack(values.astype("<u8").tobytes()), values)
    with pytest.raises(ValueError, match="multiple"):
        unpack(b"123")


LAYOUT = KvLayout(1, 1, 1, 1, 1, "float32")
HOST = KvMemory(LAYOUT, 0, "cpu", 3, memoryview(bytearray(8)), None)
CUDA = KvMemory(LAYOUT, 0, "cuda:0", None, None, None)


def table():
    """Transports by name, of which shm needs a memfd, tcp and loopback host memory."""

    def no(memory):
        raise AssertionError("nothing is made here")

    needs = {
        "loopback": lambda memory: None if memory.view is not None else "no host memory",
        "shm": lambda memory: None if memory.memfd is not None else "no memfd",
        "nixl": lambda memory: None,
        "tcp": lambda memory: None if memory.view is not None else "no host memory",
    }
    return {name: Transport(name, no, no, why) for name, why in needs.items()}


def test_host_pools_offer_memory_then_sockets_and_cuda_pools_nixl():
    assert offered("auto", HOST, table()) == ["loopback", "shm", "tcp"]
    assert offered("auto", dataclasses.replace(HOST, memfd=None), table()) == ["loopback", "tcp"]
    assert offered("auto", CUDA, table()) == ["nixl"]


def test_a_forced_transport_is_the_only_offer_or_an_error():
    assert offered("nixl", HOST, table()) == ["nixl"]
    with pytest.raises(BackendUnavailable, match="no host memory"):
        offered("tcp", CUDA, table())
    with pytest.raises(BackendUnavailable, match="no such transport"):
        offered("pigeon", HOST, table())


@pytest.mark.parametrize(
    ("source", "target", "is_same_host", "expected"),
    [
        (["shm", "tcp"], ["loopback", "shm", "tcp"], True, ["shm", "tcp"]),
        (["loopback", "shm", "tcp"], ["loopback", "shm", "tcp"], False, ["tcp"]),
        (["tcp"], ["loopback", "shm", "tcp"], True, ["tcp"]),
        (["shm"], ["shm"], False, []),
        (["nixl"], ["shm", "tcp"], True, []),
    ],
)
def test_the_best_common_transport_comes_first(source, target, is_same_host, expected):
    here, there = Topology(host="a", process="1"), Topology(host="a" if is_same_host else "b", process="2")
    ranked = rank_paths(here, there, "cpu", "cpu", [name for name in target if name in source])
    assert [name for name, _ in ranked] == expected
    assert all(why for _, why in ranked)
