"""What a response reports beside OpenAI's fields: the verdict on its SLO, and under `x-kvrelay-explain: 1` the router's
decision and how the time to first token was spent.

The parts are whole microseconds and add up to the measured TTFT exactly; `ingress` is the remainder.
"""

from dataclasses import dataclass, field
from typing import Any

from kvrelay.plane.messages import TokenOutput, Transferred
from kvrelay.router.decision.snapshot import candidate_scores
from kvrelay.router.slo.admission import verdict_fields
from kvrelay.router.types import CandidateScore, Decision, RoutingRefusal, SloRequirement, SloVerdict

MAX_CANDIDATES = 16


def _us(seconds: float) -> int:
    return round(seconds * 1e6)


@dataclass(slots=True)
class Explain:
    """Filled while a sequence runs; 14 attributes. Times are of the ingress's clock, summed over attempts."""

    received_s: float
    submitted_s: float = 0.0
    route_s: float = 0.0
    deferred_s: float = 0.0  # at the router: see router/decision/deferral.py
    reserve_s: float = 0.0
    dispatched_s: float = 0.0
    network_s: float = 0.0
    queue_s: float = 0.0
    compute_s: float = 0.0
    first_token_s: float | None = None
    cached_tokens: int = 0
    held_tokens: int = 0
    decisions: list[Decision] = field(default_factory=list)
    transfer: Transferred | None = None

    def on_first_token(self, output: TokenOutput, now_s: float) -> None:
        """The first token has arrived, with the worker's share of the time."""
        if self.first_token_s is not None:
            return
        self.first_token_s = now_s
        self.cached_tokens = output.cached_tokens or 0
        if output.timings is not None:
            self.queue_s, self.compute_s = output.timings.queue_s, output.timings.compute_s
        self.network_s = now_s - self.dispatched_s - self.queue_s - self.compute_s

    def ttft_us(self) -> int:
        """Time from the request's arrival to its first token; 0 before that."""
        return 0 if self.first_token_s is None else _us(self.first_token_s - self.received_s)

    def parts_us(self) -> dict[str, int]:
        """The TTFT's parts; their sum is `ttft_us()` exactly."""
        parts = {
            "validate_tokenize": _us(self.submitted_s - self.received_s),
            "route": _us(self.route_s),
            "deferred": _us(self.deferred_s),
            "reserve": _us(self.reserve_s),
            "prefill_queue": _us(self.queue_s),
            "prefill_compute": _us(self.compute_s),
            "network": _us(self.network_s),
        }
        parts["ingress"] = self.ttft_us() - sum(parts.values())
        return parts

    def report(self) -> dict[str, Any]:
        """The response's field `kvrelay`."""
        answer: dict[str, Any] = {"attempts": len(self.decisions)}
        if self.decisions:
            answer |= _decision_fields(self.decisions[-1])
        answer |= {"cached_tokens": self.cached_tokens, "held_tokens": self.held_tokens}
        if self.first_token_s is not None:
            answer |= {"ttft_us": self.ttft_us(), "parts_us": self.parts_us()}
        if self.transfer is not None:
            answer["transfer"] = {
                "transport": self.transfer.transport,
                "blocks": self.transfer.blocks,
                "bytes": self.transfer.num_bytes,
                "us": _us(self.transfer.seconds),
                "exposed_us": _us(self.transfer.exposed_s),
            }
        return answer


def _workers(choice: Decision | CandidateScore) -> dict[str, Any]:
    """The workers of a placement; a role that it has none of is left out."""
    return {name: value for name in ("prefill", "decode") if (value := getattr(choice, name)) is not None}


def _us_or_null(seconds: float | None) -> int | None:
    return None if seconds is None else _us(seconds)


def _decision_fields(decision: Decision) -> dict[str, Any]:
    regret = decision.regret  # prompt tokens that the best holder has cached and the chosen worker has not
    fields: dict[str, Any] = {
        "path": decision.path,
        **_workers(decision),
        "predicted_ttft_us": _us(decision.predicted_ttft_s),
        "terms": decision.terms,
        "policy": decision.policy,
        "score": decision.score,
        "policy_terms": decision.policy_terms,
        "regret": {"worker": regret.worker, "tokens": regret.tokens, "us": _us(regret.seconds)},
    }
    if (forecast := decision.forecast) is not None:  # null: not known yet
        fields["forecast"] = {
            "ttft_us": _us_or_null(forecast.ttft_s),
            "tpot_us": _us_or_null(forecast.tpot_s),
            "ttft_margin": forecast.ttft_factor,  # on a predicted time before it is compared with an SLO
            "tpot_margin": forecast.tpot_factor,
            "queue_us": _us(forecast.queue_s),
            "batch": forecast.batch,
        }
    fields["candidates"] = [
        {"path": one.path, "score": one.score, "terms": one.terms, **_workers(one)}
        for one in candidate_scores(decision, MAX_CANDIDATES)
    ]
    if decision.verdict is not None and decision.verdict.rejected_candidates:
        fields["rejected_candidates"] = [_rejected_fields(*one) for one in decision.verdict.rejected_candidates]
    if decision.incompatible_pairs:
        pairs = decision.incompatible_pairs.items()
        fields["incompatible_pairs"] = [{"prefill": p, "decode": d, "reason": reason} for (p, d), reason in pairs]
    return fields


def _rejected_fields(pair: tuple[str | None, str | None], verdict: SloVerdict) -> dict[str, Any]:
    """A candidate whose prediction missed the SLO, or was no better than the chosen one; times without the margin."""
    workers = {role: name for role, name in zip(("prefill", "decode"), pair, strict=True) if name is not None}
    times = {"ttft_us": _us_or_null(verdict.prediction.ttft_s), "tpot_us": _us_or_null(verdict.prediction.tpot_s)}
    return {**workers, "missed": list(verdict.missed), **times}


def span_attributes(decision: Decision | RoutingRefusal, previous_failure: str) -> dict[str, Any]:
    """A routing decision as a span's attributes, with the failure that made this attempt necessary, if any."""
    attributes = {"previous_failure": previous_failure} if previous_failure else {}
    if isinstance(decision, RoutingRefusal):
        return {**attributes, "error": f"{decision.reason}: {decision.message}"}
    return {
        **attributes,
        "route": decision.path,
        "predicted_ttft_s": decision.predicted_ttft_s,
        "cached_tokens": decision.cached_tokens_prefill,
        **_workers(decision),
    }


@dataclass(slots=True)
class SloRecord:
    """One HTTP request's SLO: judged once, with its first sequence; `verdict` is filled then."""

    requirement: SloRequirement
    num_sequences: int = 1  # of the whole request
    verdict: SloVerdict | None = None

    @property
    def must_be_reported(self) -> bool:
        """Whether the promise differs from the request."""
        return self.verdict is not None and self.verdict.target is not self.verdict.wanted

    @property
    def priority(self) -> int | None:
        """The queue priority of the promised class, or of the requested one before the verdict; None: it has none."""
        target = self.verdict.target if self.verdict is not None else None
        return (target or self.requirement.targets[0]).priority

    def report(self) -> dict[str, object] | None:
        """For the response, under `kvrelay.slo`; None before the verdict."""
        return None if self.verdict is None else verdict_fields(self.verdict)
