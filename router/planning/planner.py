"""How many prefill and decode workers there are to be: both together, from what was seen, and why. Pure.

One look after the other: the demand is learnt and foreseen (planning/demand.py), the workers' curves are corrected by what their
steps take, the capacity model says what the load needs (planning/capacity.py), and each role's count is damped
(planning/damping.py: how often it turns is bounded, whatever comes in). A worker never changes its role: the counts differ in
what is started and what is drained.

The planner trusts its model until requests miss their target although nothing starts or drains: then it plans for more load
than it foresees (`strain`), and lets go of that only as far as no count changes by it. So a constant load leads to constant counts.

For comparison: Dynamo's SLA planner (ai-dynamo, components/planner, v1.2) divides the foreseen tokens by a profiled throughput
and corrects by observed over expected TTFT and ITL, each role for itself, without a queue in its model or a bound on its turns.
"""

import math
from dataclasses import dataclass, replace

from kvrelay.router.planning import split
from kvrelay.router.planning.capacity import context_of
from kvrelay.router.planning.damping import Damper, DamperState
from kvrelay.router.planning.demand import Demand, DemandState
from kvrelay.router.planning.types import Counts, Interval, Limits, Target, WorkerModel, Workload

CORRECTION_GAIN = 0.2
MOST_CORRECTION = 4.0
STRAIN_STEP = 1.1
STRAIN_LEFT = 0.97
MOST_STRAIN = 2.0
BARE_STEPS = 1.1  # a TPOT below so many steps of one sequence is not planned for
FEWEST_SEEN = 10  # first tokens that a share is believed of
RISE_SHARE = 0.25  # of what a start takes: for so long more must have been needed before more are started


@dataclass(frozen=True, slots=True)
class Rules:
    """How the planner behaves. Seconds."""

    horizon_s: float = 60.0  # until a worker that is started now serves
    hold_s: float = 300.0  # fewer must have been enough for so long
    margin: float = 0.15  # of the load, that the fewer must still carry
    catch_up_s: float = 30.0  # in which prompts that wait too long are to be computed
    period_s: float = 86400.0  # of a pattern that is looked for; 0: none


@dataclass(frozen=True, slots=True)
class Plan:
    """Counts from now on, and what they come from."""

    counts: Counts
    load: Workload | None  # that was planned for; None: no request has been seen
    needs: split.Needs | None  # of that load, before limits and damping
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PlannerState:
    """What a planner has learnt, as plain data: to be kept where it outlives whoever runs the planner.

    Times in it are seconds before the moment it was taken. Counts are not in it: they are what there is.
    """

    demand: DemandState
    prefill: DamperState
    decode: DamperState
    slowness: tuple[float, float]  # logarithms, of prefill and decode
    strain: tuple[float, float]


class Planner:
    """Keeps what it learns. `observe` is called once for each interval, with times that do not go back."""

    def __init__(self, model: WorkerModel, target: Target, limits: Limits, rules: Rules, counts: Counts) -> None:
        self.model, self.target, self.limits, self.rules = model, target, limits, rules
        self._demand = Demand(horizon_s=rules.horizon_s, period_s=rules.period_s)
        start = limits.clipped(counts, within_total=True)
        self._prefill, self._decode = (
            Damper(count, rules.hold_s, RISE_SHARE * rules.horizon_s) for count in (start.prefill, start.decode)
        )
        self._prefill_slow, self._decode_slow = _Slowness(), _Slowness()
        self._prefill_strain, self._decode_strain = _Strain(), _Strain()

    @property
    def counts(self) -> Counts:
        return Counts(self._prefill.count, self._decode.count)

    @property
    def corrected(self) -> WorkerModel:
        """The workers as they turn out to be."""
        return self.model.slowed(self._prefill_slow.factor, self._decode_slow.factor)

    def observe(self, seen: Interval) -> Plan:
        """What was seen since the last time; the counts from now on."""
        self._demand.observe(seen)
        self._prefill_slow.observe(seen.prefill_slowness)
        self._decode_slow.observe(seen.decode_slowness)
        load = self._demand.workload(self._demand.expected(self.target.share))
        if load is None:
            return Plan(self._hold(seen.end_s), None, None, ("no request has been seen yet",))
        waiting = self._late(seen, load)
        least = load.at(load.rate * (1.0 + self.rules.margin))
        need, low = self._strained(seen, load, least, waiting)
        before = self.counts
        self._step(need, low, load, seen.end_s)
        return Plan(self.counts, load, need, tuple(self._reasons(before, load, waiting, need, low)))

    def state(self, now_s: float) -> PlannerState:
        """What it has learnt, for `resume`."""
        return PlannerState(
            self._demand.state(now_s), self._prefill.state(now_s), self._decode.state(now_s),
            (self._prefill_slow.log, self._decode_slow.log),
            (self._prefill_strain.factor, self._decode_strain.factor),
        )  # fmt: skip

    def resume(self, state: PlannerState, now_s: float) -> None:
        """Go on from there, with this planner's own counts, limits and rules."""
        self._demand.resume(state.demand, now_s)
        self._prefill.resume(state.prefill, now_s)
        self._decode.resume(state.decode, now_s)
        self._prefill_slow.log, self._decode_slow.log = state.slowness
        self._prefill_strain.factor, self._decode_strain.factor = state.strain

    def comparison(self, workers: int | None = None) -> split.Comparison | None:
        """The split against aggregated workers, for the load of now; None before any was seen."""
        load = self._demand.workload(self._demand.expected())
        if load is None:
            return None
        return split.compared(load, self.corrected, self._reachable(load), max(workers or self.counts.total, 2))

    # ---- what the load needs

    def _late(self, seen: Interval, load: Workload) -> float:
        """Requests per s on top of those that come: of prompts in line, what could not be computed within the target."""
        punctual = load.rate * self.target.ttft_s
        return max(0.0, seen.queued - punctual) / self.rules.catch_up_s

    def _needs(self, load: Workload, waiting: float) -> split.Needs:
        prompts = load.at((load.rate + waiting) * self._prefill_strain.factor)
        sequences = load.at((load.rate + waiting) * self._decode_strain.factor)
        return split.needs(prompts, sequences, self.corrected, self._reachable(load), self.limits)

    def _reachable(self, load: Workload) -> Target:
        """The target, its TPOT not below what a few sequences take: no number of workers makes a step shorter than that."""
        worker = self.corrected.crowded(self.model.most_crowded)
        least_s = BARE_STEPS * worker.decode.decode_step_s(1, round(context_of(load)))
        return replace(self.target, tpot_s=max(self.target.tpot_s, least_s))

    def _strained(
        self, seen: Interval, load: Workload, least: Workload, waiting: float
    ) -> tuple[split.Needs, split.Needs]:
        """What the load needs, now and with the margin; first learns from targets missed although the model says that
        there are enough workers."""
        wanted = self._needs(load, waiting), self._needs(least, 0.0)
        if seen.is_changing or seen.first_tokens < FEWEST_SEEN:
            return wanted
        strains = (self._prefill_strain, seen.ttft_kept, "prefill"), (self._decode_strain, seen.tpot_kept, "decode")
        for strain, kept, role in strains:
            need, old = getattr(wanted[0], role), strain.factor
            if kept is None:
                continue
            if kept < self.target.share:
                if need is not None and need <= getattr(self.counts, role):
                    strain.factor = min(old * STRAIN_STEP, MOST_STRAIN)
                    wanted = self._needs(load, waiting), self._needs(least, 0.0)
            elif old > 1.0:
                strain.factor = max(1.0, old * STRAIN_LEFT)
                if (self._needs(load, waiting), self._needs(least, 0.0)) != wanted:
                    strain.factor = old
        return wanted

    # ---- counts

    def _hold(self, now_s: float) -> Counts:
        """Nothing is known of requests: what there is stays."""
        for damper in (self._prefill, self._decode):
            damper.step(damper.count, damper.count, now_s, most=damper.count)
        return self.counts

    def _step(self, need: split.Needs, low: split.Needs, load: Workload, now_s: float) -> None:
        limits = self.limits
        wanted = split.within_total(need.counts(limits), load, self.corrected, self._reachable(load), limits)
        floor = split.within_total(low.counts(limits), load, self.corrected, self._reachable(load), limits)
        # first the falls: what one role gives up the other may take
        order = sorted(("prefill", "decode"), key=lambda role: getattr(wanted, role) - getattr(self.counts, role))
        dampers = {"prefill": self._prefill, "decode": self._decode}
        for role in order:
            damper, other = dampers[role], dampers["decode" if role == "prefill" else "prefill"]
            most = min(getattr(limits, f"max_{role}"), limits.total - other.count)
            damper.step(getattr(wanted, role), getattr(floor, role), now_s, most=most)

    # ---- why

    def _reasons(
        self, before: Counts, load: Workload, waiting: float, need: split.Needs, low: split.Needs
    ) -> list[str]:
        told = [
            f"{load.rate:.3g} requests/s expected of {load.input_tokens:.0f} + {load.output_tokens:.0f} tokens, "
            f"{load.cached_share:.0%} of the prompts cached, burstiness {load.burstiness:.2g}"
        ]
        if waiting > 0:
            told.append(f"and {waiting:.3g}/s that wait already")
        for name, slow in (("prefill", self._prefill_slow), ("decode", self._decode_slow)):
            if abs(slow.factor - 1.0) > 0.05:
                told.append(f"{name} takes {slow.factor:.2f} of the time that its curve says")
        for name, strain in (("TTFT", self._prefill_strain), ("TPOT", self._decode_strain)):
            if strain.factor > 1.0:
                told.append(
                    f"{name} was missed with enough workers by the model: planned for {strain.factor:.2f} of it"
                )
        if (least_s := self._reachable(load).tpot_s) > self.target.tpot_s:
            told.append(f"TPOT {self.target.tpot_s:.3g} s is out of reach: {least_s:.3g} s is planned for")
        for role in ("prefill", "decode"):
            told.append(self._reason(role, getattr(before, role), getattr(need, role), getattr(low, role)))
        if self.counts.total >= self.limits.total and need.counts(self.limits).total > self.limits.total:
            told.append(f"both roles together may have {self.limits.total}")
        return told

    def _reason(self, role: str, before: int, need: int | None, low: int | None) -> str:
        count, most = getattr(self.counts, role), getattr(self.limits, f"max_{role}")
        if need is None:
            return f"{role} {count}: not even {most} carry it"
        wanted = f"needs {need}, {low if low is not None else f'more than {most}'} with the margin"
        if count > before:
            return f"{role} {before} -> {count}: {wanted}"
        if count < before:
            return f"{role} {before} -> {count}: {wanted}, for {self.rules.hold_s:.0f} s or more"
        return f"{role} {count}: {wanted}"


class _Strain:
    """How much more load than foreseen is planned for."""

    __slots__ = ("factor",)

    def __init__(self) -> None:
        self.factor = 1.0


class _Slowness:
    """How the observed time of steps compares with the curve's, averaged over logarithms."""

    __slots__ = ("log",)

    def __init__(self) -> None:
        self.log = 0.0

    @property
    def factor(self) -> float:
        return math.exp(self.log)

    def observe(self, ratio: float | None) -> None:
        if ratio is None or not 0.0 < ratio < math.inf:
            return
        limit = math.log(MOST_CORRECTION)
        self.log += CORRECTION_GAIN * (max(-limit, min(limit, math.log(ratio))) - self.log)
