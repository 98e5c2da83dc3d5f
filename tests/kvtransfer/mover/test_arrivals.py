"""Arrivals: both ways of verifying a read refuse the same regions."""

import dataclasses

import numpy as np
import pytest

from kvrelay.errors import CorruptRead
from kvrelay.kvtransfer.mover.mover import Receipt, move
from kvrelay.kvtransfer.mover.verification import ArrivingRead, checksums_of
from kvrelay.kvtransfer.transports.memory import place_of
from tests.kvtransfer.copies import carry_out, plan_copies, region_offsets
from tests.kvtransfer.damage import damaged

BLOCKS = list(range(8))
LAYERS = range(2)
NUM_REGIONS = len(BLOCKS) * len(LAYERS)


class Read:
    """Blocks 0..7 of two layers on their way; `wrong`: regions that the source had otherwise when it hashed them."""

    def __init__(self, lib, wrong=(), is_checked=None, tamper=None):
        kind = ArrivingRead if tamper is None else damaged(ArrivingRead, tamper)
        self.source, self.target = lib.allocate(fill=1), lib.allocate()
        offsets = region_offsets(lib.LAYOUT, BLOCKS, LAYERS)
        self.region_bytes = lib.LAYOUT.region_bytes
        expected = checksums_of(self.source, offsets[:, None], self.region_bytes).copy()
        expected[list(wrong)] ^= 1 << 63
        self.arrival = kind(self.target, offsets[:, None], self.region_bytes, expected, is_checked)
        self.copies = plan_copies(lib.LAYOUT, lib.LAYOUT, BLOCKS, BLOCKS, LAYERS)

    def run(self, landed):
        """Copied, then verified, where `landed` has no receipt."""
        receipt = landed.receipt() if isinstance(landed, ArrivingRead) else None
        if receipt is not None:
            move(place_of(self.source.owner), place_of(self.target.owner), self.copies, receipt).run()
            landed.settle(receipt)
            return
        carry_out(self.source.owner, self.target.owner, self.copies)
        landed(self.copies.total_bytes)


@pytest.fixture(params=["as it is copied", "afterwards"])
def run(request):
    """Carries out a Read in one of the two ways."""
    if request.param == "as it is copied":
        return lambda read: read.run(read.arrival)
    return lambda read: read.run(lambda num_bytes: read.arrival(num_bytes))


def test_what_left_as_it_arrives_passes(kv, run):
    read = Read(kv.lib)
    run(read)
    assert read.arrival.num_landed == NUM_REGIONS * read.region_bytes
    assert read.arrival.check_s > 0


@pytest.mark.parametrize(("wrong", "first"), [([3], 3), ([15, 9], 9), (range(NUM_REGIONS), 0)])
def test_wrong_regions_are_counted_and_the_first_is_named(kv, run, wrong, first):
    with pytest.raises(CorruptRead) as error:
        run(Read(kv.lib, wrong))
    assert (error.value.num_regions, error.value.region) == (len(wrong), first)


def test_regions_that_are_not_checked_are_not_verified(kv, run):
    is_checked = np.arange(NUM_REGIONS) % 4 == 0
    run(Read(kv.lib, [1, 2, 3, 15], is_checked))
    with pytest.raises(CorruptRead) as error:
        run(Read(kv.lib, [1, 8, 12], is_checked))
    assert (error.value.num_regions, error.value.region) == (2, 8)


def test_without_checksums_anything_passes_and_is_counted(kv, run):
    read = Read(kv.lib)
    read.arrival = ArrivingRead(
        read.target, region_offsets(kv.lib.LAYOUT, BLOCKS, LAYERS)[:, None], read.region_bytes, None
    )
    run(read)
    assert read.arrival.num_landed == NUM_REGIONS * read.region_bytes
    assert read.arrival.check_s == 0


def test_gpu_pools_take_the_way_by_pieces(kv):
    on_gpu = dataclasses.replace(kv.lib.allocate(), view=None)
    assert ArrivingRead(on_gpu, np.array([[0]]), 64, None).receipt() is None
    assert isinstance(Read(kv.lib).arrival.receipt(), Receipt)


def test_a_tampered_region_is_refused(kv):
    def flip(memory, offset, size):
        if offset == 5 * size:  # block 1 of four layers, layer 1
            memory.view[offset] ^= 1

    read = Read(kv.lib, tamper=flip)
    with pytest.raises(CorruptRead) as error:
        read.run(read.arrival)
    assert (error.value.num_regions, error.value.region) == (1, 3)
