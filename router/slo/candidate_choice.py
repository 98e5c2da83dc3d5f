"""Which of the ranked candidates a request with an SLO takes: the cheapest that is predicted to meet it.

Pure: never imports torch, Ray, sockets, a clock or a random source. Rules:
- The cheapest candidate decides which worker computes the prompt; other decode workers for it are tried, cheapest
  first, `MAX_TRIED` in all. Other prefill workers are not: they cost all requests more, and beyond capacity each
  request admitted there costs several others (goodput fell by 5 to 7 % on the conversation trace). But where a decode
  worker was to compute the prompt itself and only its batch misses the target, the next candidate is tried.
- A decode worker whose batch misses the target with one candidate is not tried again.
- A request that would be refused is served without a target if that delays no other: another prefill worker stays idle.
  The KV that it leaves in a cache lets the next prompt of its conversation meet its target.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from kvrelay.router.objectives import Prediction, RejectedCandidate, SloRequirement, SloVerdict
from kvrelay.router.slo.admission import judge

MAX_TRIED = 6
Pair = tuple[str | None, str | None]
"""(prefill worker or None: the decode worker computes the prompt, decode worker or None)."""
_ORDER = ("admitted", "degraded", "probe", "queued", "refused")


def choose_candidate(
    requirement: SloRequirement,
    candidates: Sequence[Pair],
    predict: Callable[[int], Prediction],
    clears_in_s: Callable[[int, Prediction], float | None],
    spare: int | None = None,
) -> tuple[int, SloVerdict]:
    """(index of the candidate to take, the verdict on it). A refusal is of the candidate that is free soonest.

    `candidates`: best first, at least one. `predict` and `clears_in_s` (see admission.judge) take a candidate's index.
    `spare`: one on which the request would delay no other.
    """
    tried: list[tuple[int, SloVerdict]] = []
    for index, candidate in enumerate(candidates):
        is_other = _computes(candidate) != _computes(candidates[0]) and not (
            tried and _may_go_elsewhere(candidates[0], tried[0][1])
        )
        if is_other or candidate[1] in {candidates[other][1] for other, _ in tried}:
            continue
        tried.append((index, judge(requirement, predict(index), clears_in_s=None)))
        if tried[-1][1].kind == "admitted" or len(tried) == MAX_TRIED:
            break
    if all(verdict.kind == "refused" for _, verdict in tried):
        tried = [
            (i, judge(requirement, one.prediction, clears_in_s=clears_in_s(i, one.prediction))) for i, one in tried
        ]
    chosen, verdict = min(tried, key=lambda one: _rank(requirement, one[1]))
    if verdict.kind == "refused" and spare is not None:
        untargeted = judge(replace(requirement, on_miss="queue"), predict(spare), clears_in_s=None)
        if "others" not in untargeted.missed:
            chosen, verdict = spare, untargeted
    others = tuple(_rejected(candidates[index], one) for index, one in tried if index != chosen)
    return chosen, replace(verdict, rejected_candidates=others)


def _may_go_elsewhere(candidate: Pair, verdict: SloVerdict) -> bool:
    """Whether a decode worker that would compute the prompt itself misses the target by its batch alone."""
    return candidate[0] is None and "ttft" not in verdict.missed


def _computes(candidate: Pair) -> str | None:
    return candidate[0] or candidate[1]


def _rank(requirement: SloRequirement, verdict: SloVerdict) -> tuple[int, float]:
    """Lower is better; equal candidates stay in order."""
    within = requirement.targets.index(verdict.target) if verdict.target is not None else verdict.retry_after_s
    return _ORDER.index(verdict.kind), within


def _rejected(candidate: Pair, verdict: SloVerdict) -> RejectedCandidate:
    return RejectedCandidate(*candidate, verdict.missed, verdict.prediction.ttft_s, verdict.prediction.tpot_s)
