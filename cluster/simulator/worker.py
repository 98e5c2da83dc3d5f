"""A worker in virtual time: requests that arrive between two steps, what its steps bring, and its end.

Follows prefill/worker.py, decode/worker.py and engine/worker/thread.py, without sockets: actions wait for the step in
progress; cache events are sent after a step, load reports at most every `report_s`.
"""

import math
import random
from collections.abc import Callable
from typing import Any

import msgspec

from kvrelay.cluster.profiles.profile import SimulatorProfile
from kvrelay.cluster.simulator.clock import Event
from kvrelay.cluster.simulator.engine import SimulatedEngine, StepEvents, Stride
from kvrelay.cluster.simulator.requests import SimulatedAttempt
from kvrelay.cluster.simulator.scenario import World
from kvrelay.cluster.simulator.steps import Machine, WorkerSteps
from kvrelay.cluster.simulator.tiers import make_tiers
from kvrelay.cluster.simulator.worker_reports import LoadSubscriber, WorkerReports
from kvrelay.engine.scheduling.sequence import Sequence
from kvrelay.plane.messages import DRAINED, PREEMPTED, TokenOutput
from kvrelay.plane.reports import KvSnapshot, LoadReport, WorkerInfo
from kvrelay.serve.requests.retries import RESERVE_TIMEOUT_S
from kvrelay.types import Fingerprint, Role, sides

LAYER_GROUPS = 4  # in which a prompt's KV is announced, as engine/execution/launch.py does


class SimulatedWorker:
    """One incarnation of one worker.

    32 methods: one for each message of an ingress, each transition of an attempt and each fault; steps and reports are
    objects of their own. More than 12 attributes: state, times and totals are plain fields that faults, the fleet and
    the summary read.
    """

    def __init__(
        self,
        world: World,
        worker_id: str,
        role: Role,
        node_id: str,
        *,
        epoch: int,
        machine: Machine,
        paid_from_s: float | None = None,
    ) -> None:
        """paid_from_s: when its start began, which costs already; default: now."""
        scenario, settings, clock = world.scenario, world.settings, world.clock
        profile = scenario.profile_of(role, world.profile)
        self.worker_id, self.role, self.node_id = worker_id, role, node_id
        self._curves = {Role.PREFILL: profile.prefill, Role.DECODE: profile.decode}
        self._clock, self._sources = clock, world.sources
        self.engine = SimulatedEngine(
            profile,
            settings,
            role,
            clock,
            lambda pool: make_tiers(
                pool,
                profile,
                settings,
                world.sources,
                world.network,
                clock,
                worker_id=worker_id,
                node_id=node_id,
                wake=lambda: self.post(_nothing),
                message_s=scenario.message_s,
            ),
        )
        self.steps = WorkerSteps(
            self.engine,
            clock,
            machine,
            profile.slowdown_of(role),
            noise=scenario.noise,
            draw=random.Random(f"{scenario.seed}:{worker_id}:{epoch}"),
            on_end=self._steps_ended,
        )
        self.info = _info(worker_id, settings.cluster.first_role(role), node_id, epoch, profile, self.engine)
        self.reports = WorkerReports(
            self,
            clock,
            message_s=scenario.message_s,
            report_s=scenario.report_s,
            measure=self._measure,
            on_heartbeat=self._heartbeat,
        )
        self.started_s, self.stopped_s = clock.now_s, math.inf
        self.paid_from_s = clock.now_s if paid_from_s is None else paid_from_s
        self.is_alive, self.is_draining, self.is_frozen = True, False, False
        self.num_freezes = 0
        self.moved_bytes = self.read_s = 0.0
        self.attempts: dict[str, SimulatedAttempt] = {}  # without a final answer
        self._inbox: list[tuple[Callable[..., object], tuple[Any, ...]]] = []
        self._will_turn = False
        self._tier_timeout: Event | None = None
        self._role_deadline: Event | None = None  # of what is left of an earlier role

    # ---- requests of ingresses

    def post(self, call: Callable[..., object], *args: Any) -> None:
        """Have this done between two steps: now when none is in progress."""
        if not self.is_alive:
            return
        self._inbox.append((call, args))
        stride = self.steps.stride
        if stride is None:
            self._turn_soon()
        elif stride.count > 1 and not self.is_frozen:
            self.steps.cut_short()

    def _turn_soon(self) -> None:
        if not self._will_turn and not self.is_frozen:
            self._will_turn = True
            self._clock.after(0.0, self._turn)

    def prefill(self, attempt: SimulatedAttempt, *, is_local: bool) -> None:
        """Compute a prompt: for a decode worker, or (`is_local`) to decode it here."""
        self._admit(attempt, self._add, attempt, is_local)

    def reserve(self, attempt: SimulatedAttempt, prefill_tokens_per_s: float) -> None:
        """Reserve blocks, now or when the request's turn comes in the queue."""
        if self._admit(attempt, self._add_reservation, attempt, prefill_tokens_per_s):
            attempt.wait = self._clock.after(RESERVE_TIMEOUT_S, self._reserve_timeout, attempt)

    def _admit(self, attempt: SimulatedAttempt, call: Callable[..., object], *args: Any) -> bool:
        if not self.is_alive:
            return False  # the ingress learns of that otherwise
        if self.is_draining or self._side_of(attempt) not in sides(self.info.role):
            self.reports.send(attempt.failed, self.worker_id, "draining")
            return False
        self.attempts[attempt.id] = attempt
        self.post(call, *args)
        return True

    def _add(self, attempt: SimulatedAttempt, is_local: bool) -> None:
        if self._is_acceptable(attempt):
            self.engine.scheduler.add(
                attempt.request,
                self._clock.now_s,
                hold=attempt.decision.path == "disaggregated",
                output_limit=None if is_local else 1,
            )

    def _add_reservation(self, attempt: SimulatedAttempt, prefill_tokens_per_s: float) -> None:
        if self._is_acceptable(attempt):
            seq = self.engine.scheduler.add_reservation(attempt.request, self._clock.now_s)
            seq.prefill_tokens_per_s = prefill_tokens_per_s

    def _is_acceptable(self, attempt: SimulatedAttempt) -> bool:
        """Whether it has not been aborted meanwhile, and the engine does not refuse it."""
        if attempt.id not in self.attempts:
            return False
        reason = self.engine.refusal(attempt.request)
        if reason is not None:
            self._refuse(attempt, reason)
        return reason is None

    def _refuse(self, attempt: SimulatedAttempt, reason: str) -> None:
        self._forget(attempt.id)
        self.reports.send(attempt.failed, self.worker_id, reason)

    def _reserve_timeout(self, attempt: SimulatedAttempt) -> None:
        if attempt.id in self.attempts:
            self._refuse(attempt, "full")
            self.post(self.engine.abort, attempt.id)

    def abort(self, attempt_id: str) -> None:
        self._forget(attempt_id)
        self.post(self.engine.abort, attempt_id)

    def received(self, attempt: SimulatedAttempt) -> None:
        assert attempt.flow is not None
        self.moved_bytes += attempt.flow.moved_bytes
        self.read_s += attempt.flow.read_s
        self.post(self._activate, attempt)

    def _activate(self, attempt: SimulatedAttempt) -> None:
        output = self.engine.activate(attempt.id)
        if output is not None:
            self._send_output(output)

    def _forget(self, attempt_id: str) -> SimulatedAttempt | None:
        attempt = self.attempts.pop(attempt_id, None)
        if attempt is not None and attempt.decision.decode == self.worker_id:
            _cancel_wait(attempt)
        return attempt

    # ---- steps

    def _turn(self) -> None:
        """Between two steps: do what was posted, then begin the next."""
        self._will_turn = False
        if not self.is_alive or self.is_frozen or self.steps.stride is not None:
            return
        inbox, self._inbox = self._inbox, []
        for call, args in inbox:
            call(*args)
        for seq in self.engine.grants(self._clock.now_s):
            self._granted(seq)
        stride = self.steps.plan()
        if (left := self.engine.take_left()) is not None:
            self._send_events(left)
        if stride is None:
            self.steps.rest()
            self.reports.publish(self.engine.drain_events(), is_idle=True)
            self._wait_for_tiers()
            return
        self.steps.start()
        if stride.plan is not None and Role.PREFILL in sides(self.info.role):
            self._feed(stride)

    def _wait_for_tiers(self) -> None:
        """While idle, look again when the first queued request stops waiting for a store."""
        until_s = self.engine.next_deadline_s()
        if self._tier_timeout is not None:
            self._tier_timeout.cancel()
        self._tier_timeout = None if until_s is None else self._clock.at(until_s, self.post, _nothing)

    def _steps_ended(self, events: StepEvents) -> None:
        self._send_events(events)
        self.reports.publish(self.engine.drain_events(), is_idle=not self.engine.has_work)
        if self.engine.has_work or self._inbox:
            self._turn()
        else:
            self.steps.rest()

    def _granted(self, seq: Sequence) -> None:
        attempt = self.attempts.get(seq.request_id)
        if attempt is None:
            self.engine.abort(seq.request_id)
            return
        _cancel_wait(attempt)
        self.reports.send(attempt.reserved, seq.num_cached)

    def _feed(self, stride: Stride) -> None:
        """KV of prompts that are decoded elsewhere can be transferred layer by layer during the step."""
        assert stride.plan is not None
        for item in stride.plan.work:
            attempt = self.attempts.get(item.seq.request_id)
            if attempt is None or attempt.flow is None or attempt.decision.prefill != self.worker_id:
                continue
            attempt.feed(item.start, item.start + item.num_tokens, stride.first_s, LAYER_GROUPS)

    # ---- answers to ingresses

    def _send_events(self, events: StepEvents) -> None:
        for output in events.outputs:
            self._send_output(output)
        for request_id, reason in events.refused:
            if (attempt := self._forget(request_id)) is not None:
                self.reports.send(attempt.failed, self.worker_id, reason)
        for request_id, num_emitted in events.returned_to_prefill:
            if (attempt := self._forget(request_id)) is not None:
                attempt.num_emitted = num_emitted
                self.reports.send(attempt.failed, self.worker_id, PREEMPTED)

    def _send_output(self, output: TokenOutput) -> None:
        attempt = self.attempts.get(output.request_id)
        if attempt is None:
            return
        if output.timings is not None:
            attempt.tier_tokens = self.engine.tier_tokens(output.request_id)
        if output.finish_reason is not None:
            self._forget(output.request_id)
        elif attempt.decision.prefill == self.worker_id:
            attempt.computed()
        self.reports.send(attempt.output, self.worker_id, output)

    def subscribe(self, subscriber: LoadSubscriber) -> tuple[KvSnapshot, LoadReport]:
        """Send this ingress all updates from now on; returns the present state."""
        self.reports.subscribe(subscriber)
        return self.engine.snapshot(), self.reports.load()

    def _measure(self) -> LoadReport:
        own: dict[str, Any] = {}
        if self.is_draining or self.moved_bytes:
            own = {"is_draining": self.is_draining, "transport": "simulated"}
            own |= {"kv_bytes": int(self.moved_bytes), "kv_seconds": self.read_s}
        return self.engine.load(own)

    def _heartbeat(self) -> None:
        if self.engine.tiers is not None and self.steps.stride is None:
            self.post(_nothing)  # stores that have completed are applied

    @property
    def is_idle(self) -> bool:
        return not self.attempts and not self.engine.scheduler.sequences and not self._inbox

    def num_emitted(self, attempt_id: str) -> int:
        """Tokens of output that the client has, as of the steps that ended."""
        return self.engine.num_output(attempt_id)

    def take_role(self, role: Role, drain_s: float) -> None:
        """In place, as engine/worker/role_switch.py does. Engine and cache stay; neighbours slow it as before."""
        self.role = role
        self.engine.curve = self._curves[role]
        self.info = msgspec.structs.replace(self.info, role=str(role))
        if self._role_deadline is not None:
            self._role_deadline.cancel()
        if self._not_of_role():
            self.post(self.engine.scheduler.reject_queued)
            self._role_deadline = self._clock.after(drain_s, self._fail_left)

    def _side_of(self, attempt: SimulatedAttempt) -> Role:
        return Role.DECODE if attempt.decision.decode == self.worker_id else Role.PREFILL

    def _not_of_role(self) -> list[SimulatedAttempt]:
        return [one for one in self.attempts.values() if self._side_of(one) not in sides(self.info.role)]

    def _fail_left(self) -> None:
        for attempt in self._not_of_role() if self.is_alive else ():
            self.reports.send(attempt.failed, self.worker_id, DRAINED)
            self.abort(attempt.id)

    # ---- faults

    def freeze(self) -> None:
        """Compute and send nothing; messages and transfers wait."""
        self.is_frozen, self.num_freezes = True, self.num_freezes + 1
        self.steps.freeze()
        self.reports.freeze()

    def thaw(self) -> None:
        """Go on with the step in progress, from its beginning."""
        self.is_frozen = False
        self.reports.resume()
        if self.steps.stride is None:
            self._turn_soon()
        else:
            self.steps.resume()

    def abort_all(self, subscriber: LoadSubscriber) -> None:
        """The connection to this ingress was lost: abort its attempts."""
        for attempt in [one for one in self.attempts.values() if one.owner.peer is subscriber]:
            self.abort(attempt.id)

    def stop(self) -> None:
        """End at once, with everything that it holds."""
        self.steps.settle()
        self.is_alive, self.stopped_s = False, self._clock.now_s
        self.steps.rest()
        if self.engine.tiers is not None:
            self.engine.tiers.close()
            self._sources.remove_worker(self.worker_id)
        self.steps.drop()
        self.reports.close()
        if self._tier_timeout is not None:
            self._tier_timeout.cancel()
        self._inbox.clear()


def _info(
    worker_id: str, role: str, node_id: str, epoch: int, profile: SimulatorProfile, engine: SimulatedEngine
) -> WorkerInfo:
    fingerprint = Fingerprint(1, profile.name, "", profile.block_size, 1, 1, 1, "")
    return WorkerInfo(
        worker_id=worker_id,
        role=role,
        epoch=str(epoch),
        host=node_id,
        port=1,
        node_id=node_id,
        model=profile.name,
        fingerprint=fingerprint,
        block_size=profile.block_size,
        num_blocks=profile.num_blocks,
        max_model_len=engine.max_model_len,
        max_running=engine.max_running,
        kv_bytes_per_token=profile.kv_bytes_per_token,
        device="simulated",
        transports=["simulated"],
    )


def _cancel_wait(attempt: SimulatedAttempt) -> None:
    if attempt.wait is not None:
        attempt.wait.cancel()
        attempt.wait = None


def _nothing() -> None:
    """Posted to have a worker look at its tiers."""
