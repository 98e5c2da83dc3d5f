"""Every class of corruption, a hundred times each, at random places: with full checks none gets through."""

import ctypes

import numpy as np
import pytest

from kvrelay.errors import ChecksumMismatch
from kvrelay.kvtransfer.transports.base import Transport
from kvrelay.kvtransfer.transports.memory import LOOPBACK, LoopbackReader

BLOCKS, LANDING = list(range(8, 16)), list(range(40, 48))
NUM_TRIALS = 100


class Corruptor:
    """Carries copies out wrongly. Each class of corruption is a method of its own."""

    def __init__(self, kind, seed):
        self.random, self.corrupt = np.random.default_rng(seed), getattr(self, kind)

    def __call__(self, source, target, copies):
        rows = [np.array(row) for row in copies.rows()]
        self.move(source, target, *rows)
        self.corrupt(source, target, *rows)

    def move(self, source, target, sources, targets, sizes):
        for start, land, size in zip(sources, targets, sizes, strict=True):
            target[land : land + size] = source[start : start + size]

    def some(self, rows, count=1):
        picked = self.random.choice(len(rows), count, replace=False)
        return rows[picked[0]] if count == 1 else rows[picked]

    def regions(self, targets, sizes, region_bytes=4096):
        return np.concatenate(
            [np.arange(land, land + size, region_bytes) for land, size in zip(targets, sizes, strict=True)]
        )

    def bit_flip(self, source, target, sources, targets, sizes):
        place = self.some(self.regions(targets, sizes)) + self.random.integers(4096)
        target[place] ^= 1 << self.random.integers(8)

    def swapped_blocks(self, source, target, sources, targets, sizes):
        one, other = self.some(self.regions(targets, sizes), 2)
        kept = target[one : one + 4096].copy()
        target[one : one + 4096] = target[other : other + 4096]
        target[other : other + 4096] = kept

    def wrong_layer(self, source, target, sources, targets, sizes):
        row = self.random.integers(len(sources))
        start = (sources[row] + 4096) % (len(source) - sizes[row])
        target[targets[row] : targets[row] + sizes[row]] = source[start : start + sizes[row]]

    def torn_write(self, source, target, sources, targets, sizes):
        """The second half is from before: what the block held earlier."""
        start = self.some(self.regions(targets, sizes))
        target[start + 2048 : start + 4096] = self.random.integers(0, 256, 2048, dtype=np.uint8)

    def short_write(self, source, target, sources, targets, sizes):
        start = self.some(self.regions(targets, sizes))
        target[start + self.random.integers(4095) : start + 4096] = 0

    def wrong_layout(self, source, target, sources, targets, sizes):
        """[2, 16 tokens, 2 heads, 64 bytes] written heads first."""
        start = self.some(self.regions(targets, sizes))
        region = target[start : start + 4096].reshape(2, 16, 2, 64)
        region[:] = region.transpose(0, 2, 1, 3).reshape(2, 16, 2, 64).copy()

    def keys_for_values(self, source, target, sources, targets, sizes):
        start = self.some(self.regions(targets, sizes))
        region = target[start : start + 4096].reshape(2, -1)
        region[:] = region[::-1].copy()

    def nothing(self, source, target, sources, targets, sizes):
        """The control: all is well."""


KINDS = [
    "bit_flip", "swapped_blocks", "wrong_layer", "torn_write", "short_write", "wrong_layout", "keys_for_values",
]  # fmt: skip


def table():
    class Corrupt(LoopbackReader):
        how = None

        def copy(self, copies, landed=None):
            source = (ctypes.c_uint8 * self._source.num_bytes).from_address(self._source.address)
            type(self).how(np.frombuffer(source, dtype=np.uint8), self._bytes, copies)
            if landed is not None:
                landed(copies.total_bytes)

    return Corrupt, {"loopback": Transport("loopback", LOOPBACK.make_exporter, Corrupt, LOOPBACK.why_not)}


async def outcomes(kv, kind, *, num_trials=NUM_TRIALS, **settings):
    """How many of these transfers were refused for their checksums, and how many delivered wrong bytes."""
    reader, transports = table()
    source, target = await kv.source(**settings), await kv.target(transports=transports, **settings)
    refused = wrong = 0
    for trial in range(num_trials):
        reader.how = Corruptor(kind, trial)
        for link in target.links:
            link.route.table["loopback"].backs_off_until_s = 0.0
        kv.lib.regions(target.memory)[:, LANDING] = 0
        try:
            await kv.send(source, target, f"r{trial}", BLOCKS, LANDING).commit(b"")
        except ChecksumMismatch:
            refused += 1
            await target.event("released", f"r{trial}")
            continue
        landed, sent = kv.lib.regions(target.memory)[:, LANDING], kv.lib.regions(source.memory)[:, BLOCKS]
        wrong += not np.array_equal(landed, sent)
    return refused, wrong


@pytest.mark.parametrize("kind", KINDS)
async def test_full_checks_let_nothing_through(kv, kind):
    assert await outcomes(kv, kind) == (NUM_TRIALS, 0)


async def test_full_checks_refuse_nothing_that_is_right(kv):
    assert await outcomes(kv, "nothing") == (0, 0)


@pytest.mark.parametrize("kind", KINDS)
async def test_without_checks_all_of_it_gets_through(kv, kind):
    """The control: these corruptions are real."""
    refused, wrong = await outcomes(kv, kind, num_trials=20, checks="off")
    assert (refused, wrong) == (0, 20)


async def test_sampled_checks_find_about_their_share_of_single_flips_and_refuse_nothing_right(kv, monkeypatch):
    monkeypatch.setattr("kvrelay.kvtransfer.mover.verification.SAMPLED_SHARE", 0.5)
    refused, wrong = await outcomes(kv, "bit_flip", checks="sampled")
    assert refused + wrong == NUM_TRIALS
    assert NUM_TRIALS // 3 < refused < NUM_TRIALS
    assert await outcomes(kv, "nothing", checks="sampled") == (0, 0)
