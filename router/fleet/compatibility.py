"""Pairs of workers between which no KV can be transferred, and what follows from them for a choice. Pure."""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

Pair = tuple[str, str]
"""(prefill worker, decode worker), by id."""
IncompatiblePairs = Mapping[Pair, str]
"""Why these pairs are incompatible, one line each; pairs that are not listed are compatible, or not known yet."""


def unpaired_workers(
    prefills: Collection[str], decodes: Collection[str], incompatible: IncompatiblePairs
) -> frozenset[str]:
    """Workers that are compatible with none of the other role; they take no requests.

    Empty if a role is absent: then no KV is transferred.
    """
    if not incompatible or not prefills or not decodes:
        return frozenset()
    unpaired = {p for p in prefills if all((p, d) in incompatible for d in decodes)}
    unpaired |= {d for d in decodes if all((p, d) in incompatible for p in prefills)}
    return frozenset(unpaired)


def compatible_sets(
    prefills: Sequence[str], decodes: Sequence[str], incompatible: IncompatiblePairs
) -> list[tuple[list[int], list[int]]]:
    """(rows of prefill workers, rows of decode workers) within which every pair is compatible; together all compatible
    pairs.

    Each decode worker is in exactly one set, with all others that are compatible with the same prefill workers.
    """
    members: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
    for row, decode in enumerate(decodes):
        partners = tuple(index for index, prefill in enumerate(prefills) if (prefill, decode) not in incompatible)
        members[partners].append(row)
    return [(list(partners), rows) for partners, rows in members.items()]
