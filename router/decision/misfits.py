"""Pairs of workers between which no KV can travel, and what follows from them for a choice. Pure."""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

Pair = tuple[str, str]
"""A prefill worker and a decode worker, by id."""
Misfits = Mapping[Pair, str]
"""Why these cannot work together, in one line each; pairs that are not listed can, or are not known."""


def isolated(prefills: Collection[str], decodes: Collection[str], misfits: Misfits) -> frozenset[str]:
    """Workers that fit nobody of the other role. They take nothing: one of the two serves another model, or none can tell.

    Empty where a role is absent: then no KV travels.
    """
    if not misfits or not prefills or not decodes:
        return frozenset()
    lonely = {p for p in prefills if all((p, d) in misfits for d in decodes)}
    lonely |= {d for d in decodes if all((p, d) in misfits for p in prefills)}
    return frozenset(lonely)


def circles(prefills: Sequence[str], decodes: Sequence[str], misfits: Misfits) -> list[tuple[list[int], list[int]]]:
    """(rows of prefill workers, rows of decode workers) within which every pair fits; together they have all pairs that fit.

    Each decode worker is in exactly one of them, together with all others that the same prefill workers fit.
    """
    members: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
    for row, decode in enumerate(decodes):
        fits = tuple(place for place, prefill in enumerate(prefills) if (prefill, decode) not in misfits)
        members[fits].append(row)
    return [(list(fits), rows) for fits, rows in members.items()]
