"""Which of the ways that the router ranked a request with an SLO takes: the cheapest that is predicted to keep to it.

Pure: never imports torch, Ray, sockets, a clock or a random source. Looks at `MAX_TRIED` ways at most, cheapest first, and
passes over those that would miss for the same reason as one before: the same queue, or the same batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from kvrelay.router.promises import PassedOver, Prediction, SloAsk, SloVerdict
from kvrelay.router.slo import judge

MAX_TRIED = 6
Pair = tuple[
    str | None, str | None
]  # (prefill worker or None: the decode worker computes the prompt, decode worker or None)
_ORDER = ("admitted", "degraded", "probe", "queued", "refused")


def choose_way(
    ask: SloAsk,
    ways: Sequence[Pair],
    predict: Callable[[int], Prediction],
    clears_in_s: Callable[[int, Prediction], float | None],
) -> tuple[int, SloVerdict]:
    """(the way to take, the verdict on it). A refusal tells of the way that is free the soonest.

    `ways`: best first, at least one. `predict` and `clears_in_s` (see slo.judge) are of a way by its index.
    """
    tried: list[tuple[int, SloVerdict]] = []
    for index, way in enumerate(ways):
        if any(_is_in_vain(way, ways[other], verdict.missed) for other, verdict in tried):
            continue
        tried.append((index, judge(ask, predict(index), clears_in_s=None)))
        if tried[-1][1].kind == "admitted" or len(tried) == MAX_TRIED:
            break
    if all(verdict.kind == "refused" for _, verdict in tried):
        tried = [(i, judge(ask, one.prediction, clears_in_s=clears_in_s(i, one.prediction))) for i, one in tried]
    chosen, verdict = min(tried, key=lambda one: _rank(ask, one[1]))
    others = tuple(_passed_over(ways[index], one) for index, one in tried if index != chosen)
    return chosen, replace(verdict, passed_over=others)


def _is_in_vain(way: Pair, other: Pair, missed: tuple[str, ...]) -> bool:
    """Whether `way` has the queue, or the batch, for which `other` misses."""
    computes, other_computes = way[0] or way[1], other[0] or other[1]
    has_queue = "ttft" in missed and computes == other_computes
    return has_queue or (("tpot" in missed or "others" in missed) and way[1] == other[1])


def _rank(ask: SloAsk, verdict: SloVerdict) -> tuple[int, float]:
    """The least is best; ways that are alike stay in their order."""
    within = ask.targets.index(verdict.target) if verdict.target is not None else verdict.retry_after_s
    return _ORDER.index(verdict.kind), within


def _passed_over(way: Pair, verdict: SloVerdict) -> PassedOver:
    return PassedOver(*way, verdict.missed, verdict.prediction.ttft_s, verdict.prediction.tpot_s)
