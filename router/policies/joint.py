"""Ours: prefill worker, decode worker and who computes the prompt are chosen together, by predicted seconds. Pure.

Rules:
- A decode worker that lacks at most `local_prefill_tokens` of the prompt computes it itself.
- Otherwise the least sum of terms wins, over all pairs of the shortlists and the cheapest local choices.
- Equal scores (to a microsecond) go to the worker chosen longest ago, then by row.
"""

from collections.abc import Iterable
from typing import ClassVar

import numpy as np

from kvrelay.router.cost import CommonCost, CostModel
from kvrelay.router.policies.base import MAX_WAYS, Ask, Floats, Ints, Options, Side, Way
from kvrelay.router.policies.options import no_more
from kvrelay.router.policies.shortlist import cheapest, whole_units
from kvrelay.router.types import TERM_NAMES

SHORTLIST = 6
"""Workers of each role that are paired in full."""
NONE = -1
"""In a list of rows: no such worker."""


class Joint:
    """Least predicted seconds: of the request's own first token, and of harm to others."""

    name: ClassVar[str] = "joint"
    term_names: ClassVar[tuple[str, ...]] = TERM_NAMES

    def __init__(self, options: Options, model: CostModel | None = None) -> None:
        no_more(self.name, options)
        self._model = model or CostModel()

    def rank(self, ask: Ask, prefills: Side, decodes: Side) -> list[Way]:
        """See base.Policy."""
        cost = CommonCost(ask, prefills, decodes, self._model)
        may_send = len(prefills) > 0 and ask.request.force != "local"
        senders = self._shortest(cost.work[:, : len(prefills)], prefills.turn) if may_send else _NO_ROWS
        if may_send and not ask.request.needs_decode:
            return _listed(cost, _Ways(senders, np.full(len(senders), NONE), cost.prefill_only(senders)))
        if not len(decodes):
            return []
        ways = []
        if may_send:
            ways.append(self._pairs(cost, senders))
        if ask.request.force != "remote":
            ways.append(self._local(cost))
        return _listed(cost, _Ways.join(ways)) if ways else []

    def _pairs(self, cost: CommonCost, senders: Ints) -> "_Ways":
        """The cheapest of each role, each with each; not with decode workers that need nobody."""
        targets = self._shortest((*cost.decode, self._model.unhidden_share * cost.arriving_s), cost.decodes.turn)
        if cost.request.force != "remote":
            targets = targets[~cost.is_near[targets]]
        computing = np.repeat(senders, len(targets))
        decode = np.concatenate((targets,) * len(senders))
        return _Ways(computing, decode, cost.pairs(computing, decode))

    def _local(self, cost: CommonCost) -> "_Ways":
        terms = (*cost.work[:, cost.num_prefills :], *cost.decode, cost.stall)
        rows = self._shortest(terms, cost.decodes.turn)
        return _Ways(np.full(len(rows), NONE), rows, cost.local(rows))

    @staticmethod
    def _shortest(terms: Iterable[Floats], turn: Ints) -> Ints:
        """Rows of the SHORTLIST cheapest."""
        return cheapest(sum(terms, _ZERO), turn, SHORTLIST) if len(turn) > SHORTLIST else np.arange(len(turn))


class _Ways:
    """Ways as columns: rows of both sides (NONE: no such worker), and the terms [terms, ways]."""

    __slots__ = ("decode", "parts", "prefill")

    def __init__(self, prefill: Ints, decode: Ints, parts: Floats) -> None:
        self.prefill, self.decode, self.parts = prefill, decode, parts

    @classmethod
    def join(cls, several: list["_Ways"]) -> "_Ways":
        if len(several) == 1:
            return several[0]
        return cls(
            np.concatenate([ways.prefill for ways in several]),
            np.concatenate([ways.decode for ways in several]),
            np.concatenate([ways.parts for ways in several], axis=1),
        )


_NO_ROWS: Ints = np.empty(0, np.int64)
_ZERO: Floats = np.zeros(1)


def _listed(cost: CommonCost, ways: _Ways) -> list[Way]:
    """The best of them in order."""
    prefill, decode = ways.prefill, ways.decode
    scores = ways.parts.sum(axis=0)
    target_turn = np.where(decode == NONE, 0, _turn(cost.decodes, decode))
    source_turn = np.where(prefill == NONE, target_turn, _turn(cost.prefills, prefill))
    keys = (decode, prefill, target_turn, source_turn, whole_units(scores))
    order = np.lexsort(keys)[:MAX_WAYS]
    rows = zip(prefill[order].tolist(), decode[order].tolist(), scores[order].tolist(), strict=True)
    parts = map(tuple, ways.parts[:, order].T.tolist())
    return [
        Way(None if p == NONE else p, None if d == NONE else d, score, terms)
        for (p, d, score), terms in zip(rows, parts, strict=True)
    ]


def _turn(side: Side, rows: Ints) -> Ints:
    return side.turn[rows] if len(side) else np.zeros(len(rows), np.int64)
