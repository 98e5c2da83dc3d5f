"""Pairs of workers between which no KV can travel, and what follows from them for a choice. Pure."""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

Pair = tuple[str, str]
"""A prefill worker and a decode worker, by id."""
IncompatiblePairs = Mapping[Pair, str]
"""Why these cannot work together, in one line each; pairs that are not listed can, or are not known."""


def unpaired_workers(
    prefills: Collection[str], decodes: Collection[str], incompatible: IncompatiblePairs
) -> frozenset[str]:
    """Workers that fit nobody of the other role. They take nothing: one of the two serves another model, or none can tell.

    Empty where a role is absent: then no KV travels.
    """
    if not incompatible or not prefills or not decodes:
        return frozenset()
    unpaired = {p for p in prefills if all((p, d) in incompatible for d in decodes)}
    unpaired |= {d for d in decodes if all((p, d) in incompatible for p in prefills)}
    return frozenset(unpaired)


def compatible_sets(
    prefills: Sequence[str], decodes: Sequence[str], incompatible: IncompatiblePairs
) -> list[tuple[list[int], list[int]]]:
    """(rows of prefill workers, rows of decode workers) within which every pair fits; together they have all pairs that fit.

    Each decode worker is in exactly one of them, together with all others that the same prefill workers fit.
    """
    members: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
    for row, decode in enumerate(decodes):
        fits = tuple(place for place, prefill in enumerate(prefills) if (prefill, decode) not in incompatible)
        members[fits].append(row)
    return [(list(fits), rows) for fits, rows in members.items()]
