"""What bench/simulator/check.py compares: requests of a real and of a simulated run, their figures side by side, the
errors. Pure.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

QUANTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Answer:
    """One request that was made. Seconds, tokens, bytes; ttft_s is nan where no token came."""

    index: int
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    outcome: str  # done, or why not
    ttft_s: float = math.nan
    tpot_s: float = math.nan  # of outputs of more than one token
    cached_tokens: int = 0
    path: str = ""  # local: the decode worker computed the prompt, too
    workers: tuple[str, ...] = ()  # that it went to: prefill, decode


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run: its answers in order of arrival, and what is only known of the whole."""

    answers: tuple[Answer, ...]
    moved_bytes: float
    busy: dict[str, float]  # by role, the share of its workers' time that steps took
    ingress_busy: float = 0.0  # of a core; nothing in a simulation
    tiers: dict[str, int] = field(
        default_factory=dict
    )  # blocks by what became of them below the pools; see Simulation.summary

    def done(self) -> list[Answer]:
        return [one for one in self.answers if one.outcome == "done"]


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of both runs. `kind`: how its error is stated."""

    name: str
    unit: str  # ms, /s, MB, "" (a count), % (a share, stated in points)
    real: float
    simulated: float

    @property
    def error(self) -> float:
        """Of a share the difference; of anything else the ratio less 1. nan where there is nothing to compare with."""
        if self.unit == "%":
            return self.simulated - self.real
        return self.simulated / self.real - 1 if self.real else math.nan

    def row(self) -> dict[str, Any]:
        scale = {"ms": 1e3, "MB": 1e-6, "%": 100.0}.get(self.unit, 1.0)
        sign = "points" if self.unit == "%" else "%"
        return {
            "figure": ", ".join(filter(None, (self.name, self.unit))), "real": _short(scale * self.real),
            "simulated": _short(scale * self.simulated),
            "error": "-" if math.isnan(self.error) else f"{100 * self.error:+.1f} {sign}",
        }  # fmt: skip


def compare(real: Outcome, simulated: Outcome, *, ttft_s: float, tpot_s: float) -> list[Figure]:
    """All figures; goodput counts answers within both limits."""
    sides = [_figures(one, ttft_s, tpot_s) for one in (real, simulated)]
    return [Figure(name, unit, sides[0][name, unit], sides[1][name, unit]) for name, unit in sides[0]]


def _figures(run: Outcome, ttft_s: float, tpot_s: float) -> dict[tuple[str, str], float]:
    done = run.done()
    ttfts, tpots = [one.ttft_s for one in done], [one.tpot_s for one in done if not math.isnan(one.tpot_s)]
    kept = [one for one in done if one.ttft_s <= ttft_s and not one.tpot_s > tpot_s]
    span_s = max(one.arrival_s for one in run.answers) - min(one.arrival_s for one in run.answers)
    prompt = max(1, sum(one.prompt_tokens for one in done))
    return {
        **{(f"TTFT p{cut}", "ms"): _percentile(ttfts, cut) for cut in QUANTILES},
        **{(f"TPOT p{cut}", "ms"): _percentile(tpots, cut) for cut in QUANTILES},
        ("answered", "%"): len(done) / len(run.answers),
        ("goodput", "/s"): len(kept) / max(span_s, 1e-9),
        ("within the SLO", "%"): len(kept) / len(run.answers),
        ("hits", "%"): sum(one.cached_tokens for one in done) / prompt,
        ("prompts computed by decode workers", "%"): sum(one.path == "local" for one in done) / max(1, len(done)),
        ("KV moved", "MB"): run.moved_bytes,
        **{(name.replace("_", " "), ""): count for name, count in run.tiers.items()},
        **{(f"{role} workers busy", "%"): share for role, share in run.busy.items()},
    }


def _percentile(values: Sequence[float], cut: float) -> float:
    return float(np.percentile(values, cut)) if values else math.nan


@dataclass(frozen=True, slots=True)
class PerRequest:
    """How far single requests are off: |simulated / real - 1| of those that both runs answered."""

    ttft_median: float
    ttft_p90: float
    tpot_median: float
    tpot_p90: float
    same_workers: float  # share of them that went the same way


def per_request(real: Outcome, simulated: Outcome) -> PerRequest:
    others = {one.index: one for one in simulated.done()}
    pairs = [(one, others[one.index]) for one in real.done() if one.index in others]
    ttft = [abs(other.ttft_s / one.ttft_s - 1) for one, other in pairs]
    tpot = [abs(other.tpot_s / one.tpot_s - 1) for one, other in pairs if one.tpot_s > 0 and other.tpot_s > 0]
    same = sum(one.workers == other.workers for one, other in pairs) / max(1, len(pairs))
    return PerRequest(_percentile(ttft, 50), _percentile(ttft, 90), _percentile(tpot, 50), _percentile(tpot, 90), same)


def worst(figures: Sequence[Figure], names: Sequence[str]) -> float:
    """The largest |error| among figures of these names."""
    return max(abs(one.error) for one in figures if one.name in names and not math.isnan(one.error))


def as_markdown(title: str, figures: Sequence[Figure], notes: str) -> str:
    """A section with one table."""
    lines = [f"### {title}", "", "| figure | real | simulated | error |", "|---|---|---|---|"]
    for figure in figures:
        row = figure.row()
        lines.append(f"| {row['figure']} | {row['real']} | {row['simulated']} | {row['error']} |")
    return "\n".join([*lines, "", notes, ""])


def stated(single: PerRequest) -> str:
    return (
        f"Single requests: TTFT is off by {single.ttft_median:.0%} at the median and {single.ttft_p90:.0%} at p90, "
        f"TPOT by {single.tpot_median:.0%} and {single.tpot_p90:.0%}; "
        f"{single.same_workers:.0%} went to the same workers."
    )


def _short(value: float) -> str:
    """Three digits."""
    if math.isnan(value):
        return "-"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
