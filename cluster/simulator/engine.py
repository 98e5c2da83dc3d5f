"""One worker's engine without a model: production's scheduler, pool, output processor and events over a speed curve.

Follows engine/step/engine.py: grant reservations, plan a step, compute, advance, append tokens. Sequences that only get
a token are not looked at, and stretches of such steps are computed at once (fast_forward.py). Left out: speculation,
groups, swapping.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from kvrelay import types
from kvrelay.cluster.profiles.profile import SimulatorProfile, work_of
from kvrelay.cluster.simulator.clock import Clock
from kvrelay.cluster.simulator.fast_forward import FairShareWithParked, FastForward, ParkedSequences, RefreshedHeadroom
from kvrelay.cluster.simulator.requests import END_TOKEN, WORD_TOKEN, SimulatedSequenceRequest
from kvrelay.cluster.simulator.tiers import SimulatedTiers
from kvrelay.config import Settings
from kvrelay.engine.execution.sampler import OutputProcessor
from kvrelay.engine.scheduling.blocks import HEADROOM_SHARE
from kvrelay.engine.scheduling.fair_share import queue_rules
from kvrelay.engine.scheduling.plan import StepPlan
from kvrelay.engine.scheduling.preempt import MeasuredSpeeds
from kvrelay.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from kvrelay.engine.scheduling.sequence import Sequence, State
from kvrelay.engine.step.reports import StepTiming, load_report
from kvrelay.kvcache.eviction.policies import make_policy
from kvrelay.kvcache.index.changes import EventLog
from kvrelay.kvcache.pool.block_pool import BlockPool
from kvrelay.plane.messages import TokenOutput
from kvrelay.plane.reports import KvEvents, KvSnapshot, LoadReport
from kvrelay.router.planning.types import SpeedCurve
from kvrelay.types import FinishReason, Role


@dataclass(slots=True)
class Stride:
    """What is being computed: one planned step, or `count` steps that only bring each sequence a token.

    plan: of the one step; with parked sequences (fast_forward.py), of the active ones. None: `count` steps, whose last
    may be planned when it is over.
    """

    began_s: float
    plan: StepPlan | None
    count: int
    first_s: float  # time of its first step
    more_s: float = 0.0  # by how much each step takes longer than the one before
    num_parked: int = 0
    waking: int = 0  # the number of the step for which a parked sequence wakes; 0: none

    def seconds(self, count: int) -> float:
        """Time of its first `count` steps."""
        return count * self.first_s + self.more_s * (count * (count - 1) / 2)

    def drop(self, count: int) -> None:
        """Remove its first `count` steps, which are not all."""
        self.began_s += self.seconds(count)
        self.first_s += count * self.more_s
        self.count -= count
        self.waking = max(0, self.waking - count)

    def steps_until(self, now_s: float) -> int:
        """The least number of its steps that end at `now_s` or later; at least one, at most all."""
        passed_s, first_s, more_s = now_s - self.began_s, self.first_s, self.more_s
        if more_s > 0:
            half = first_s - more_s / 2
            guess = (math.sqrt(half * half + 2 * more_s * max(passed_s, 0.0)) - half) / more_s
        else:
            guess = passed_s / first_s
        steps = min(max(1, math.ceil(guess)), self.count)
        while steps < self.count and self.seconds(steps) < passed_s:
            steps += 1
        while steps > 1 and self.seconds(steps - 1) >= passed_s:
            steps -= 1
        return steps


@dataclass(slots=True)
class StepEvents:
    """What steps brought: outputs that ingresses need (first tokens, ends), and requests that left without an end."""

    outputs: list[TokenOutput] = field(default_factory=list)
    refused: list[tuple[str, str]] = field(default_factory=list)  # request, reason
    returned_to_prefill: list[tuple[str, int]] = field(default_factory=list)  # request, its tokens of output


class SimulatedEngine:
    """Called between steps by its worker, which knows when they end.

    Its 17 attributes are the parts of production's engine that exist here too, and its totals.
    """

    def __init__(
        self,
        profile: SimulatorProfile,
        settings: Settings,
        role: Role,
        clock: Clock,
        make_tiers: Callable[[BlockPool], SimulatedTiers | None],
    ) -> None:
        """make_tiers: makes the lower tiers of a pool, if the settings give it any."""
        own = settings.for_role(role).engine
        self.curve: SpeedCurve = profile.prefill if role is Role.PREFILL else profile.decode
        self.pool = BlockPool(
            profile.num_blocks,
            block_size=profile.block_size,
            prefix_caching=own.prefix_caching,
            policy=make_policy(settings.cache.eviction_policy, profile.num_blocks),
            keeps_tokens=False,
        )
        self.max_running = min(profile.max_running, profile.token_budget)
        self.max_model_len = min(profile.max_model_len, profile.num_blocks * profile.block_size)
        self.tiers = make_tiers(self.pool)
        config = SchedulerConfig(
            profile.token_budget,
            self.max_running,
            types.MAX_WAITING,
            HEADROOM_SHARE,
            preemption=own.preemption,
            token_bytes=float(profile.kv_bytes_per_token),
        )
        parked = self._parked = ParkedSequences(WORD_TOKEN)
        fair_share = FairShareWithParked(queue_rules(settings.router.max_queue_s))
        headroom = RefreshedHeadroom(HEADROOM_SHARE, profile.block_size, parked)
        self._speeds = MeasuredSpeeds()
        tiers = None if self.tiers is None else self.tiers.lower
        self.scheduler = Scheduler(
            self.pool, config, fair_share=fair_share, headroom=headroom, speeds=self._speeds, tiers=tiers
        )
        self._output_processor = OutputProcessor(
            self.scheduler.finish, clock.time, eos_ids=(END_TOKEN,), max_model_len=self.max_model_len
        )
        self._fast_forward = FastForward(self.scheduler, parked, fair_share)
        self._events, self.speed = EventLog(), StepTiming()
        self._load_seq = 0
        self.num_steps = 0
        self.busy_s = 0.0

    # ---- requests

    def refusal(self, request: SimulatedSequenceRequest) -> str | None:
        """The reason for which a request is refused, as a word; None: it is not."""
        if len(request.token_ids) >= self.max_model_len + (request.sampling.max_tokens <= 1):
            return "too_long"
        refusal = self.scheduler.refusal(request)
        return None if refusal is None else refusal[0]

    def abort(self, request_id: str) -> None:
        seq = self.scheduler.sequences.get(request_id)
        if seq is not None:
            if seq.state is State.RUNNING:
                self._parked.wake_all()
            self.scheduler.finish(seq, FinishReason.ABORT)

    def activate(self, request_id: str) -> TokenOutput | None:
        """The prompt's KV has arrived. Returns the end, if the sequence has come with its last token."""
        seq = self.scheduler.activate(request_id, [WORD_TOKEN])
        return None if seq is None else self._output_processor.end_if_too_long(seq)

    # ---- steps

    def grants(self, now_s: float) -> list[Sequence]:
        """Do what is due before a step is planned; returns the sequences whose reservation is granted."""
        self.pool.tick(now_s)
        if self.tiers is not None:
            self.tiers.lower.controller.poll()
        scheduler = self.scheduler
        if scheduler.waiting or scheduler.reserving:
            scheduler.reject_overdue(now_s)
        return scheduler.grant_reservations() if scheduler.reserving else []

    def begin(self, now_s: float, factor: float) -> Stride | None:
        """Begin to compute what can be computed, if anything. factor: on the curve's times."""
        fast_forward = self._fast_forward
        count, wakes = fast_forward.look()
        if count:
            return self._quiet(now_s, count, factor, waking=count if wakes else 0)
        num_parked = len(self._parked)
        plan = fast_forward.plan()
        if not plan.work and not num_parked:
            self.scheduler.blocks.copied()
            return None
        for item in plan.work:
            if not item.seq.plain_until:
                item.seq.num_chunks += 1
                if item.seq.scheduled_s is None:
                    item.seq.scheduled_s = now_s
        seconds = factor * self.curve.step_s(work_of(plan, num_parked, self._parked.context_tokens))
        return Stride(now_s, plan, 1, max(seconds, self._loading_s(plan, now_s)), num_parked=num_parked)

    def _loading_s(self, plan: StepPlan, now_s: float) -> float:
        """Seconds until all that the step needs of lower tiers is loaded, which happens beside its computing."""
        if self.tiers is None or not any(item.seq.load for item in plan.work):
            return 0.0
        for item in plan.work:
            if item.seq.load is not None:
                item.seq.end_load()
        return self.tiers.copies.loaded_s - now_s

    def _quiet(self, now_s: float, count: int, factor: float, *, waking: int) -> Stride:
        size, context = len(self._parked), self._parked.context_tokens
        first_s = self.curve.decode_step_s(size, context)
        more_s = self.curve.decode_step_s(size, context + size) - first_s
        return Stride(now_s, None, count, factor * first_s, factor * more_s, size, waking)

    def end(self, stride: Stride, count: int, events: StepEvents) -> None:
        """The stride's first `count` steps have been computed; the others are not begun."""
        size, plan = stride.num_parked, stride.plan
        self.num_steps += count
        self.busy_s += stride.seconds(count)
        if plan is None:
            if count == stride.waking:
                self._fast_forward.passed(count - 1)
                plan = self._fast_forward.plan()
                self._fast_forward.advance(plan)
                self._sample(plan, events)
            else:
                self._fast_forward.passed(count)
            self._note(size, size, size, stride.seconds(count) / count, count)
            return
        self._fast_forward.advance(plan)
        self._sample(plan, events)
        self._note(size + len(plan.work), size + plan.num_tokens, size + plan.num_decode, stride.first_s)

    def take_left(self) -> StepEvents | None:
        """Take what left without an end: rejected from the queue, or returned to prefill."""
        rejected, returned = self.scheduler.take_rejected(), self.scheduler.preemption.take_returned()
        if not rejected and not returned:
            return None
        events = StepEvents()
        events.refused += [(seq.request_id, reason) for seq, reason in rejected]
        events.returned_to_prefill += [(seq.request_id, seq.num_output) for seq in returned]
        return events

    def _sample(self, plan: StepPlan, events: StepEvents) -> None:
        """Append a token to each sequence of the plan that is due one; the last of an output ends it."""
        seqs = [item.seq for item in plan.work if item.samples]
        fresh = [seq for seq in seqs if not seq.plain_until]
        tokens = [
            WORD_TOKEN if len(seq.token_ids) < seq.plain_until or seq.num_output + 1 < target(seq) else END_TOKEN
            for seq in seqs
        ]
        outputs: list[TokenOutput] = []
        self._output_processor.append_all(seqs, tokens, [None] * len(seqs), outputs)
        events.outputs += [one for one in outputs if one.timings is not None or one.finish_reason is not None]
        for seq in fresh:
            if seq.plain_until:  # its end, which the output processor does not know, is looked at as well
                seq.plain_until = min(seq.plain_until, seq.request.num_prompt_tokens + target(seq) - 1)

    def _note(self, num_sequences: int, num_tokens: int, num_decode: int, seconds: float, num_steps: int = 1) -> None:
        self.speed.note_batch(num_sequences, num_tokens, num_steps)
        self.speed.observe(num_tokens, num_decode, seconds, num_steps)
        self.speed.copy_to(self._speeds)
        if self.tiers is not None:
            self.tiers.lower.end_step(self.pool, self.speed.prefill_tokens_per_s)

    # ---- reports

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def drain_events(self) -> KvEvents | None:
        if self.tiers is None and not self.pool.has_changes:
            return None
        host_changes = self.tiers.lower.controller.drain_changes() if self.tiers is not None else ()
        return self._events.number(self.pool.drain_changes(), host_changes)

    def snapshot(self) -> KvSnapshot:
        return self._events.snapshot()

    def next_deadline_s(self) -> float | None:
        """When the first queued request stops waiting for a store, if any waits."""
        return None if self.tiers is None else self.tiers.lower.fetches.next_deadline_s()

    def load(self, own: Mapping[str, Any]) -> LoadReport:
        self._load_seq += 1
        return load_report(self._load_seq, self.scheduler, self.speed, own)

    def tier_tokens(self, request_id: str) -> int:
        """Tokens of a request's prompt that were loaded from a lower tier."""
        seq = self.scheduler.sequences.get(request_id) if self.tiers is not None else None
        return 0 if seq is None else seq.num_loaded_blocks * seq.block_size

    def num_output(self, request_id: str) -> int:
        self._parked.refresh()
        seq = self.scheduler.sequences.get(request_id)
        return 0 if seq is None else seq.num_output

    def check(self) -> None:
        """Raise AssertionError unless every block is accounted for."""
        self._parked.refresh()
        self.scheduler.check()
        if self.tiers is not None:
            self.tiers.lower.controller.check()


def target(seq: Sequence) -> int:
    """Tokens of output after which the model ends it."""
    return cast(SimulatedSequenceRequest, seq.request).output_tokens
