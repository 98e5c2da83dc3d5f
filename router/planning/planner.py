"""How many prefill and decode workers to run: both roles together, from observed load, with reasons. Pure.

Each interval: the demand is learned and forecast (demand.py), the workers' speed curves are corrected by measured step
times, the capacity model returns what the load needs (capacity.py), and each role's count is damped (damping.py). What
the model does not know is learned from the share of requests that keep their targets: while it is too small the load is
planned for with a growing factor (`strain`), which falls again only as far as no count changes by it. So a constant
load leads to constant counts.
"""

import math
from dataclasses import dataclass, replace

from kvrelay.router.planning import split
from kvrelay.router.planning.capacity import allowed_share, context_of, prompts_of
from kvrelay.router.planning.damping import Damper
from kvrelay.router.planning.demand import Demand, SeasonalPattern
from kvrelay.router.planning.types import CountLimits, Interval, PlanningTarget, WorkerCounts, WorkerModel, Workload

CORRECTION_GAIN = 0.2
MOST_CORRECTION = 4.0
MOST_STRAIN = 2.0
STRAIN_GAIN = 0.007  # of a request, on the logarithm
STRAIN_S = 300.0  # an interval's gain is at most its seconds over these: workers that start need minutes
BOTH_SHARE = 0.02  # by so much more requests are to keep each target, because a request is to keep both
BARE_STEPS = 1.1  # a TPOT target below so many steps of one sequence is unreachable
# of a worker's start time: the need must last so long before workers are started; where late requests are refused, none
# pile up meanwhile, and a rush that is over before the workers are there has lost no more
RISE_SHARE, REFUSING_RISE_SHARE = 0.25, 0.5


@dataclass(frozen=True, slots=True)
class PlannerRules:
    """Parameters of the planner. Seconds."""

    horizon_s: float = 60.0  # until a worker started now serves
    hold_s: float = 300.0  # fewer workers must have sufficed for so long
    margin: float = 0.15  # share of extra load that fewer workers must still serve; no setting: the delay is the knob
    catch_up_s: float = 30.0  # in which overdue prompts are to be computed
    period_s: float = 86400.0  # of a repeating pattern; 0: none
    switch_roles: bool = True  # a role takes what the other has to spare before workers are started


@dataclass(frozen=True, slots=True)
class ScalingPlan:
    """Counts from now on, and their reasons."""

    counts: WorkerCounts
    load: Workload | None  # the load planned for; None: no request has been seen
    needs: split.Needs | None  # of that load, before limits and damping
    reasons: tuple[str, ...]


@dataclass(slots=True)
class PlannerState:
    """What a planner has learned, as plain data that outlives the process that runs it.

    Counts are read from the cluster instead.
    """

    demand: Demand
    dampers: dict[str, Damper]  # by role, as the others
    slowness: dict[str, float]  # logarithm of observed step time over the curve's, averaged
    strain: dict[str, float]  # factor on the forecast load


class Planner:
    """Call `observe` once per interval, with times that do not decrease."""

    def __init__(
        self,
        model: WorkerModel,
        target: PlanningTarget,
        limits: CountLimits,
        rules: PlannerRules,
        counts: WorkerCounts,
        learned: PlannerState | None = None,
        season: SeasonalPattern | None = None,
    ) -> None:
        """learned: of an earlier planner, whose counts, limits and rules may have been others; else `season`: of past
        days.
        """
        self.model, self.target, self.limits, self.rules = model, target, limits, rules
        self.prefills_on_decode = False
        start = limits.clipped(counts, within_total=True)._asdict()
        dampers = {role: Damper(count, rules.hold_s, RISE_SHARE * rules.horizon_s) for role, count in start.items()}
        if learned is None:
            demand = Demand(rules.horizon_s, rules.period_s, season=season or SeasonalPattern())
            self.state = PlannerState(demand, dampers, dict.fromkeys(start, 0.0), dict.fromkeys(start, 1.0))
        else:
            resumed = {role: damper.resumed(learned.dampers[role]) for role, damper in dampers.items()}
            demand = replace(learned.demand, horizon_s=rules.horizon_s, period_s=rules.period_s)
            self.state = replace(learned, demand=demand, dampers=resumed)

    @property
    def counts(self) -> WorkerCounts:
        return WorkerCounts(**{role: damper.count for role, damper in self.state.dampers.items()})

    @property
    def corrected(self) -> WorkerModel:
        """The worker model, corrected by measured step times."""
        return self.model.slowed(**{role: math.exp(log) for role, log in self.state.slowness.items()})

    def observe(self, seen: Interval) -> ScalingPlan:
        """Learn from an interval; returns the counts from now on."""
        self.state.demand.observe(seen)
        self.target = replace(self.target, refuses_late=seen.refuses_late)
        for damper in self.state.dampers.values():
            damper.rise_s = (REFUSING_RISE_SHARE if seen.refuses_late else RISE_SHARE) * self.rules.horizon_s
        # without refusals a short cluster is late with all, so no time of a decode worker is planned as spare
        self.prefills_on_decode = seen.prefills_on_decode and seen.refuses_late
        self._correct("prefill", seen.prefill_slowness)
        self._correct("decode", seen.decode_slowness)
        load = self.state.demand.shape.workload(self.state.demand.expected(self.target.share))
        if load is None:
            return ScalingPlan(self._hold(seen.end_s), None, None, ("no request has been seen yet",))
        waiting = self._overdue_rate(seen, load)
        self._learn_strain(seen, load, waiting)
        need, low = self._needs(load, waiting)
        before = self.counts
        taken = self._step(need, low, load, seen.end_s)
        return ScalingPlan(self.counts, load, need, tuple(self._reasons(before, load, waiting, need, low, taken)))

    def _correct(self, role: str, ratio: float | None) -> None:
        """Observed step time over the curve's; averaged over logarithms."""
        if ratio is not None and 0.0 < ratio < math.inf:
            limit = math.log(MOST_CORRECTION)
            log = max(-limit, min(limit, math.log(ratio)))
            self.state.slowness[role] += CORRECTION_GAIN * (log - self.state.slowness[role])

    # ---- what the load needs

    def _overdue_rate(self, seen: Interval, load: Workload) -> float:
        """Requests per s to add: queued prompts that cannot be computed within the target."""
        punctual = load.rate * self.target.ttft_s
        return max(0.0, seen.queued - punctual) / self.rules.catch_up_s

    def _needs(self, load: Workload, waiting: float) -> tuple[split.Needs, split.Needs]:
        """(what the load needs, below which no count falls): the second with the margin."""
        return self._needs_at(load.rate + waiting, load), self._needs_at(load.rate * (1.0 + self.rules.margin), load)

    def _needs_at(self, rate: float, load: Workload) -> split.Needs:
        prompts, sequences = (load.at(rate * self.state.strain[role]) for role in ("prefill", "decode"))
        sizes = self.corrected, self._reachable(load), self.limits
        return split.needs(prompts, sequences, *sizes, prefills_on_decode=self.prefills_on_decode)

    def _reachable(self, load: Workload) -> PlanningTarget:
        """The target, with a TPOT not below that of a few sequences: no number of workers makes a step shorter."""
        worker = self.corrected.crowded(self.model.most_crowded)
        least_s = BARE_STEPS * worker.decode.decode_step_s(1, round(context_of(load)))
        return replace(self.target, tpot_s=max(self.target.tpot_s, least_s))

    def _learn_strain(self, seen: Interval, load: Workload, waiting: float) -> None:
        """From the requests that kept and missed each target, unless there may be no more workers. Prompts that would
        be late on an idle worker, too, are no reason for more; nor are, while workers start, those behind a queue that
        these will shorten.
        """
        if seen.is_changing and not seen.refuses_late:
            return
        target = replace(self.target, share=self.target.share + BOTH_SHARE)
        curve = self.corrected.decode if self.limits.is_aggregated else self.corrected.prefill
        ttft_share = 1.0 - allowed_share(prompts_of(load, curve, self.model.token_budget), target)
        gain = min(STRAIN_GAIN * seen.judged, seen.seconds / STRAIN_S)
        for role, wanted, kept in (("prefill", ttft_share, seen.ttft_kept), ("decode", target.share, seen.tpot_kept)):
            counted = "decode" if self.limits.is_aggregated else role
            is_most = getattr(self.counts, counted) >= getattr(self.limits, f"max_{counted}")
            if kept is None or (kept < wanted and (is_most or self.counts.total >= self.limits.total)):
                continue
            old = self.state.strain[role]
            before = self._needs(load, waiting) if kept > wanted and old > 1.0 else None
            self.state.strain[role] = min(max(old * math.exp(gain * (wanted - kept)), 1.0), MOST_STRAIN)
            if before is not None and self._needs(load, waiting) != before:
                self.state.strain[role] = old

    # ---- counts

    def _hold(self, now_s: float) -> WorkerCounts:
        for damper in self.state.dampers.values():
            damper.step(damper.count, damper.count, now_s, most=damper.count)
        return self.counts

    def _step(self, need: split.Needs, low: split.Needs, load: Workload, now_s: float) -> dict[str, int]:
        """Change the counts; returns how many workers a role takes from the other."""
        limits, taken = self.limits, dict[str, int]()
        wanted = split.within_total(need.counts(limits), load, self.corrected, self._reachable(load), limits)
        floor = split.within_total(low.counts(limits), load, self.corrected, self._reachable(load), limits)
        # first the decreases: the other role may use what one role releases
        for role in sorted(self.state.dampers, key=lambda role: getattr(wanted, role) - getattr(self.counts, role)):
            name = "decode" if role == "prefill" else "prefill"
            damper, other = self.state.dampers[role], self.state.dampers[name]
            before, need_now = damper.count, getattr(wanted, role)
            kept = max(getattr(wanted, name), getattr(floor, name))
            # a switch takes seconds and a start minutes: what the other role may give within `rise_s` is waited for
            spare = other.spare(kept, now_s, other.rise_s) if self.rules.switch_roles else 0
            soon = other.spare(kept, now_s, 0.0) if self.rules.switch_roles else 0
            own_most = before + spare + max(0, need_now - before - soon)
            most = min(getattr(limits, f"max_{role}"), limits.total - other.count + spare, own_most)
            is_awaited = self.rules.switch_roles and getattr(wanted, name) > other.count
            damper.step(need_now, getattr(floor, role), now_s, most=most, may_fall=not is_awaited)
            rise = damper.count - before
            if (num := min(rise, spare)) > 0:
                other.give(num, now_s)
                taken[role] = num
        return taken

    # ---- why

    def _reasons(
        self,
        before: WorkerCounts,
        load: Workload,
        waiting: float,
        need: split.Needs,
        low: split.Needs,
        taken: dict[str, int],
    ) -> list[str]:
        reasons = [
            f"{load.rate:.3g} requests/s expected of {load.input_tokens:.0f} + {load.output_tokens:.0f} tokens, "
            f"{load.cached_share:.0%} of the prompts cached, burstiness {load.burstiness:.2g}"
        ]
        if waiting > 0:
            reasons.append(f"and {waiting:.3g}/s of overdue prompts")
        for role, log in self.state.slowness.items():
            if abs((slow := math.exp(log)) - 1.0) > 0.05:
                reasons.append(f"{role} takes {slow:.2f} of its curve's time")
        for name, strain in zip(("TTFT", "TPOT"), self.state.strain.values(), strict=True):
            if strain > 1.0:
                reasons.append(f"too few requests keep the {name} target: planned for {strain:.2f} x load")
        if (least_s := self._reachable(load).tpot_s) > self.target.tpot_s:
            reasons.append(f"TPOT {self.target.tpot_s:.3g} s is out of reach: {least_s:.3g} s is planned for")
        for role in ("decode",) if self.limits.is_aggregated else ("prefill", "decode"):
            given = sum(taken.values()) - taken.get(role, 0)
            reasons.append(self._reason(role, getattr(before, role), getattr(need, role), getattr(low, role), given))
        if self.counts.total >= self.limits.total and need.counts(self.limits).total > self.limits.total:
            reasons.append(f"both roles together may have {self.limits.total}")
        return reasons

    def _reason(self, role: str, before: int, need: int | None, low: int | None, given: int) -> str:
        count, most = getattr(self.counts, role), getattr(self.limits, f"max_{role}")
        if need is None:
            return f"{role} {count}: not even {most} carry it"
        wanted = f"needs {need}, {low if low is not None else f'more than {most}'} with the margin"
        if count > before:
            return f"{role} {before} -> {count}: {wanted}"
        if given:
            return f"{role} {before} -> {count}: {wanted}; {given} take the other role"
        if count < before:
            return f"{role} {before} -> {count}: {wanted}, for {self.rules.hold_s:.0f} s or more"
        return f"{role} {count}: {wanted}"
