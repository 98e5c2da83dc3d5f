"""Admission by service-level objectives: whether a request is admitted, under which target, or refused before it costs
anything; and which of the ranked candidates it takes. Rules: docs/design/slo.md. Predictions: forecast.py. Pure.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from kvrelay.router.types import Prediction, SloRequirement, SloTarget, SloVerdict, VerdictKind

MIN_RETRY_S, MAX_RETRY_S = 1.0, 60.0
YIELD = 15.0
"""Times that a long prompt's excess counts in a queue as long as the TTFT target; in half of it, a quarter of that."""


def judge(requirement: SloRequirement, prediction: Prediction, *, clears_in_s: float | None) -> SloVerdict:
    """The verdict on one request.

    `clears_in_s`: seconds until the decode worker's batch has shrunk enough for the last target; None: not soon.
    """
    wanted = requirement.targets[0]
    if requirement.on_miss == "queue":
        prediction = replace(prediction, excess_s=0.0)  # long prompts yield only where a miss is refused
    missed = _missed(wanted, prediction)
    for target in requirement.targets:
        if not _missed(target, prediction):
            kind: VerdictKind = "admitted" if target is wanted else "degraded"
            return SloVerdict(kind, wanted, target, prediction, missed)
    is_stale = {"ttft": prediction.is_ttft_stale, "tpot": prediction.is_tpot_stale}
    if all(is_stale.get(what) for what in _missed(requirement.targets[-1], prediction)):
        return SloVerdict("probe", wanted, None, prediction, missed)
    if requirement.on_miss == "queue":
        return SloVerdict("queued", wanted, None, prediction, missed)
    retry_after_s, is_hopeless = _retry_after_s(requirement.targets[-1], prediction, clears_in_s)
    return SloVerdict("refused", wanted, None, prediction, missed, retry_after_s, is_hopeless)


def _missed(target: SloTarget, prediction: Prediction) -> tuple[str, ...]:
    missed = []
    if target.ttft_s is not None:
        crowding = min(prediction.queue_s / target.ttft_s, 1.0) ** 2
        if prediction.safe_ttft_s > target.ttft_s:
            missed.append("ttft")
        elif prediction.safe_ttft_s + YIELD * prediction.excess_s * crowding > target.ttft_s:
            missed.append("length")
    if target.tpot_s is not None and prediction.safe_tpot_s(target.tpot_s) > target.tpot_s:
        missed.append("tpot")
    if prediction.crowded_tpot_s is not None and (target.tpot_s is None or target.tpot_s > prediction.crowded_tpot_s):
        missed.append("others")
    return tuple(missed)


def _retry_after_s(target: SloTarget, prediction: Prediction, clears_in_s: float | None) -> tuple[float, bool]:
    """(seconds until the prediction would meet the target without further arrivals, whether it never would)."""
    missed = _missed(target, prediction)
    waits, is_hopeless = [MIN_RETRY_S], False
    if "ttft" in missed and target.ttft_s is not None:
        is_hopeless |= prediction.idle_ttft_s > target.ttft_s
        waits.append(prediction.safe_ttft_s - target.ttft_s)  # a queue shortens by one second per second
    if "length" in missed and target.ttft_s is not None:
        half_s = (target.ttft_s - prediction.idle_ttft_s) / 2  # for the queue; the other half for the excess
        share = math.sqrt(half_s / (YIELD * prediction.excess_s))
        waits.append(prediction.queue_s - min(half_s, share * target.ttft_s))
    if "tpot" in missed or "others" in missed:
        is_hopeless |= prediction.batch <= prediction.own_sequences and "tpot" in missed
        waits.append(MAX_RETRY_S if clears_in_s is None else clears_in_s)
    return (MAX_RETRY_S if is_hopeless else min(max(waits), MAX_RETRY_S)), is_hopeless


def verdict_fields(verdict: SloVerdict) -> dict[str, object]:
    """A verdict as clients see it: in a refusal's body, in `x-kvrelay-explain`, and in answers without a target."""
    prediction = verdict.prediction
    fields: dict[str, object] = {
        "class": verdict.wanted.name,
        "verdict": verdict.kind,
        "wanted": {"ttft_s": verdict.wanted.ttft_s, "tpot_s": verdict.wanted.tpot_s},
        "predicted": {"ttft_s": prediction.ttft_s, "tpot_s": prediction.tpot_s},
        "margin": {"ttft": prediction.ttft_factor, "tpot": prediction.tpot_factor},
        "queue_s": prediction.queue_s,
        "batch": prediction.batch,
        "missed": list(verdict.missed),
    }
    if verdict.rejected_candidates:
        fields["others_tried"] = len(verdict.rejected_candidates)
    if verdict.target is not None and verdict.target is not verdict.wanted:
        fields["degraded_to"] = verdict.target.name
    return fields


def refusal_message(verdict: SloVerdict) -> str:
    """One sentence for the client."""
    prediction, wanted, reasons = verdict.prediction, verdict.wanted, []
    if "ttft" in verdict.missed:
        reasons.append(
            f"the first token is predicted after {prediction.safe_ttft_s:.3g} s, wanted within {wanted.ttft_s:g} s"
        )
    if "length" in verdict.missed:
        reasons.append(
            f"prompts of {prediction.queue_s:.3g} s are queued, and one as long as this would make several others late"
        )
    if "tpot" in verdict.missed:
        predicted_s = prediction.safe_tpot_s(wanted.tpot_s or 0.0)
        reasons.append(f"{predicted_s:.3g} s are predicted per token, wanted at most {wanted.tpot_s:g} s")
    if "others" in verdict.missed:
        reasons.append(
            f"it would break {prediction.crowded_tpot_s:g} s per token that another request there has as its target"
        )
    remedy = (
        "even idle workers would not meet it: ask for less, or of another class" if verdict.is_hopeless else "try later"
    )
    return f"SLO class {wanted.name}: {'; '.join(reasons)}; {remedy}"


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
    only = candidates[0][0]  # the cheapest prefill worker; None: decode workers compute prompts, and each has a queue
    for index, candidate in enumerate(candidates):
        if only not in (None, candidate[0]) or candidate[1] in {candidates[other][1] for other, _ in tried}:
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
    others = tuple((candidates[index], one) for index, one in tried if index != chosen)
    return chosen, replace(verdict, rejected_candidates=others)


def _rank(requirement: SloRequirement, verdict: SloVerdict) -> tuple[int, float]:
    within = requirement.targets.index(verdict.target) if verdict.target is not None else verdict.retry_after_s
    return _ORDER.index(verdict.kind), within
