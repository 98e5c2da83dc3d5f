"""Which fault of a part strikes when. Pure, seeded.

Every part has a sequence of its own, so at most one of its processes is harmed at a time and, of two, one lives. The
next fault comes a gap after the part has recovered, or after the last one where they overlap: how long that takes does
not change the order.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

SHORTEST_S, LONGEST_S = 1.0, 10.0  # of a fault that is undone


@dataclass(frozen=True, slots=True)
class PlannedFault:
    """One fault: so long after the last one, and for so long, in seconds where it is undone. `choice`, in [0, 1):
    which of several processes, requests or places.
    """

    kind: str
    gap_s: float
    hold_s: float
    choice: float


def planned_faults(part: str, kinds: Sequence[str], *, mean_gap_s: float, seed: int) -> Iterator[PlannedFault]:
    """Without end. Each round has every kind once, in another order."""
    draw = random.Random(f"{seed}:{part}")
    while True:
        for kind in draw.sample(kinds, len(kinds)):
            gap_s, hold_s = mean_gap_s * draw.uniform(0.5, 1.5), draw.uniform(SHORTEST_S, LONGEST_S)
            yield PlannedFault(kind, gap_s, hold_s, draw.random())
