"""What a prefix index answers, by worker."""

from kvrelay.plane.reports import KvEvents, KvSnapshot
from kvrelay.router.index.prefix_index import PrefixIndex


def kv_events(seq, stored=(), removed=(), lowered=(), raised=()):
    """An event message."""
    return KvEvents(seq=seq, stored=stored, removed=removed, lowered=lowered, raised=raised)


def kv_snapshot(seq, hashes, lowered=(), *, part=0, is_last=True):
    """A snapshot, or a part of one."""
    return KvSnapshot(seq=seq, hashes=hashes, lowered=lowered, part=part, is_last=is_last)


def depths(index, hashes):
    """{worker: (leading hashes in its pool, in any tier)} of those that hold any."""
    table = index.table(hashes)
    rows = {name: member.row for name, member in index._members.items()}
    found = {name: (int(table[row, 1]), int(table[row, 0])) for name, row in rows.items()}
    return {name: held for name, held in found.items() if held[1]}


def match(index, hashes):
    """{worker: leading hashes that it holds in any tier}."""
    return {name: anywhere for name, (_, anywhere) in depths(index, hashes).items()}


def num_rows(index):
    """Rows of an answer; some may be free."""
    return len(index.table(()))


def holders_of(index, stride=1):
    """Which workers hold which block, of one block size."""
    return index._holders[stride]


def num_sets(index, stride=1):
    """Different sets of workers that hold a block."""
    return len(set(holders_of(index, stride).array.set_ids) - {0})


class ScheduledIndex(PrefixIndex):
    """An index whose long work is done when a test calls `work`, or at once. Counts how often it was scheduled."""

    def __init__(self, *, is_deferred=True, **options):
        self.num_scheduled, self._slice = 0, lambda: False
        super().__init__(schedule=self._scheduled if is_deferred else None, **options)

    def _scheduled(self, work):
        self.num_scheduled, self._slice = self.num_scheduled + 1, work

    def work(self):
        return self._slice()
