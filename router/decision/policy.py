"""From a policy's ways to a decision, or to the reason why there is none.

Never imports torch, Ray, sockets, a clock or a random source. Rules, whatever the policy:
- A worker that can never hold the request, is excluded, or whose line is full, is not shown to it.
- While some pairs misfit it is shown one circle of workers at a time within which all fit (see misfits.py); a worker that
  fits nobody is not shown at all. The least score of all circles wins.
- The terms of a decision are those of the common cost, so that decisions of different policies compare.
"""

from dataclasses import dataclass

import numpy as np

from kvrelay.router.decision.columns import LONGEST, ROOM, Columns, Held
from kvrelay.router.decision.cost import CommonCost, CostModel, sources
from kvrelay.router.decision.misfits import Misfits, circles
from kvrelay.router.decision.types import (
    TERM_NAMES,
    TTFT_TERMS,
    Decision,
    Ranking,
    Refusal,
    RefusalReason,
    Regret,
    RouteRequest,
)
from kvrelay.router.policies.base import MAX_WAYS, Ask, Floats, Ints, Policy, Side, Way, taken

MIN_RETRY_S, MAX_RETRY_S = 1.0, 30.0


@dataclass(frozen=True)
class Scene:
    """What one decision is made of: who may take the request."""

    ask: Ask
    prefills: Side
    decodes: Side
    policy: Policy
    model: CostModel
    wanted: tuple[float, float] | None = None  # seconds to the first token, and for each further one

    @property
    def request(self) -> RouteRequest:
        return self.ask.request

    def ranking(self, misfits: Misfits) -> Ranking:
        """The policy's ways, best first; none of a pair that misfits."""
        prefills, decodes = self.prefills, self.decodes
        if misfits and len(prefills) and len(decodes):
            ways = self._ranked_in_circles(misfits)
        else:
            ways = self.policy.rank(self.ask, prefills, decodes)
        return Ranking(tuple(ways), prefills.names, decodes.names, self.policy.term_names)

    def _ranked_in_circles(self, misfits: Misfits) -> list[Way]:
        found = []
        for some_prefills, some_decodes in circles(self.prefills.names, self.decodes.names, misfits):
            senders, targets = np.array(some_prefills, np.int64), np.array(some_decodes, np.int64)
            ways = self.policy.rank(self.ask, taken(self.prefills, senders), taken(self.decodes, targets))
            found += [_renumbered(way, senders, targets) for way in ways]
        return sorted(found, key=lambda way: way.score)[:MAX_WAYS]

    def decision(self, ranking: Ranking, index: int = 0) -> Decision:
        """One of the ways, told in full."""
        wanted_s, wanted_tpot_s = self.wanted or (None, None)
        way, request = ranking.ways[index], self.request
        prefill, decode = ranking.workers(way)
        common = self._common_terms(way)
        computing, row = (self.prefills, way.prefill) if way.prefill is not None else (self.decodes, way.decode)
        assert row is not None, "a way without any worker"
        cached, loaded = self._sources(computing, row)
        return Decision(
            request_id=request.request_id,
            prefill=prefill,
            decode=decode,
            path=way.path,
            predicted_ttft_s=sum(common[name] for name in TTFT_TERMS),
            cached_tokens_prefill=cached,
            loaded_tokens_prefill=loaded,
            cached_tokens_decode=int(self.decodes.held[way.decode]) if way.decode is not None else 0,
            terms=common,
            policy=self.policy.name,
            score=way.score,
            policy_terms=dict(zip(ranking.term_names, way.parts, strict=True)),
            regret=self._regret(computing, row),
            ranking=ranking,
            wanted_s=wanted_s,
            wanted_tpot_s=wanted_tpot_s,
        )

    def _sources(self, side: Side, row: int) -> tuple[int, int]:
        """Tokens of the prompt that a worker has in its pool when it computes it, and those that it loads."""
        coming, size = int(side.coming[row]), int(side.block_size[row])
        if not self.ask.stored and side.below[row] <= coming:
            return min(coming, (self.request.num_tokens - 1) // size * size), 0
        source = sources(self.ask, (taken(side, np.array([row])),), self.model)
        return int(source.cached[0]), int(source.loaded[0])

    def _common_terms(self, way: Way) -> dict[str, float]:
        if self.policy.term_names[: len(TERM_NAMES)] == TERM_NAMES:
            return dict(zip(TERM_NAMES, way.parts, strict=False))
        return dict(
            zip(TERM_NAMES, _column(CommonCost(self.ask, self.prefills, self.decodes, self.model), way), strict=True)
        )

    def _regret(self, computing: Side, row: int) -> Regret:
        """Against whoever could compute the prompt and holds, or will hold, the most of it."""
        force = self.request.force
        best, holder = int(computing.coming[row]), computing.names[row]
        chosen = best
        for side, is_open in ((self.prefills, force != "local"), (self.decodes, force != "remote")):
            if is_open and len(side):
                most = int(side.coming.argmax())
                if (tokens := int(side.coming[most])) > best:
                    best, holder = tokens, side.names[most]
        return Regret(holder, best - chosen, (best - chosen) / float(computing.prefill_tokens_per_s[row]))


def _column(cost: CommonCost, way: Way) -> list[float]:
    def rows(row: int | None) -> Ints:
        return np.array([row or 0], np.int64)

    parts: Floats
    if way.decode is None:
        parts = cost.prefill_only(rows(way.prefill))
    elif way.prefill is None:
        parts = cost.local(rows(way.decode))
    else:
        parts = cost.pairs(rows(way.prefill), rows(way.decode))
    return [float(part) for part in parts[:, 0]]


def _renumbered(way: Way, senders: Ints, targets: Ints) -> Way:
    """From rows of a circle to rows of all."""
    prefill = None if way.prefill is None else int(senders[way.prefill])
    decode = None if way.decode is None else int(targets[way.decode])
    return way._replace(prefill=prefill, decode=decode)


def refusal(scene: Scene, role: str, live: Columns, lonely: frozenset[str], held: Held, prefill_rate: float) -> Refusal:
    """Why no worker of `role` is usable. Whoever could hold it, but is busy or excluded, makes it "full"."""
    rows = np.array([row for row, name in enumerate(live.names) if name not in lonely], np.int64)
    if not len(rows):
        reason: RefusalReason = "no_prefill_worker" if role == "prefill" else "no_decode_worker"
        return Refusal(reason, f"no {role} worker is up", MIN_RETRY_S)
    request = scene.request
    able = live.fitting(request, needs_output=role == "decode")
    fitting = rows if able is None else np.intersect1d(rows, able)
    if not len(fitting):
        most = int(np.minimum(live.ints[LONGEST], live.ints[ROOM])[rows].max())
        asked = f"{request.num_tokens} tokens and up to {request.max_tokens} more"
        return Refusal("too_long", f"{asked} cannot fit on any {role} worker: the largest holds {most}", MAX_RETRY_S)
    side = live.side(fitting, held, prefill_rate, scene.ask.now_s)
    wait_s = float(CommonCost(scene.ask, side, side, scene.model).decode[2].min())
    busy = f"all {len(rows)} {role} workers are full or were tried"
    return Refusal("full", busy, min(max(wait_s, MIN_RETRY_S), MAX_RETRY_S))
