"""A worker in virtual time: what it is told between two steps, when its steps end, and whom it tells what.

As prefill/worker.py, decode/worker.py and engine/worker/thread.py do it, without sockets: actions wait for the step in progress; after
a step go the news of its cache and, at most every `report_s`, of its load.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from kvrelay.cluster.profiles.profile import SimulatorProfile
from kvrelay.cluster.simulator.attempt import SimulatedAttempt
from kvrelay.cluster.simulator.engine import SimulatedEngine, StepEvents, Stride
from kvrelay.cluster.simulator.resources.clock import Clock, Event
from kvrelay.cluster.simulator.resources.machine import Machine, slowed
from kvrelay.cluster.simulator.resources.network import Network
from kvrelay.cluster.simulator.tiers import BlockHolders, make_tiers
from kvrelay.config import Settings
from kvrelay.engine.scheduling.sequence import Sequence
from kvrelay.engine.worker.load_sharing import AssignedShares
from kvrelay.pacing import Paced
from kvrelay.plane.messages import (
    PREEMPTED,
    Assigned,
    AssignedByOthers,
    KvEvents,
    KvSnapshot,
    LoadReport,
    TokenOutput,
    WorkerInfo,
)
from kvrelay.types import Fingerprint, Role

HEARTBEAT_S = 2.0
LAYER_GROUPS = 4  # in which a prompt's KV is announced: see engine.py, layers_per_hook


class LoadSubscriber(Protocol):
    """An ingress, as far as workers tell it something. Calls come when the message has arrived."""

    def hear(self, worker: "SimulatedWorker", events: KvEvents | None, load: LoadReport | None) -> None: ...
    def hear_others(self, worker: "SimulatedWorker", others: AssignedByOthers) -> None: ...


@dataclass(frozen=True, slots=True)
class Delays:
    """Seconds. message_s: of a message. report_s: at most so often a load is told. noise: sigma of the logarithm of each step's factor."""

    message_s: float = 0.001
    report_s: float = 0.05
    noise: float = 0.0
    reserve_timeout_s: float = 10.0


class SimulatedWorker:
    """One incarnation of one worker."""

    def __init__(
        self,
        worker_id: str,
        role: Role,
        node_id: str,
        *,
        epoch: int,
        profile: SimulatorProfile,
        settings: Settings,
        clock: Clock,
        delays: Delays,
        holders: BlockHolders,
        network: Network,
        machine: Machine,
        seed: int,
    ) -> None:
        self.worker_id, self.role, self.node_id, self.profile = worker_id, role, node_id, profile
        self._clock, self._delays = clock, delays
        self.engine = SimulatedEngine(profile, settings, role, clock)
        self._holders, self._waits = holders, clock.timer(delays.reserve_timeout_s)
        self._slowdown = profile.slowdown_of(role)
        self._machine = machine if self._slowdown else None  # where it matters who else computes
        below = make_tiers(
            self.engine.pool, profile, settings, holders, network, clock, worker_id=worker_id, node_id=node_id,
            wake=lambda: self.post(_nothing), message_s=delays.message_s,
        )  # fmt: skip
        if below is not None:
            self.engine.attach(below)
        self._patience: Event | None = None
        self.peers: dict[LoadSubscriber, None] = {}
        self.assigned: AssignedShares[LoadSubscriber] = AssignedShares()
        self._tell_others = Paced(self._on_assigned, settings.router.share_load_s, now=clock.time, after=clock.after)
        self.started_s, self.stopped_s = clock.now_s, math.inf
        self.paid_from_s = clock.now_s
        self.is_alive, self.is_draining, self.is_frozen = True, False, False
        self.slowness = 1.0  # on its steps' times
        self.num_freezes = 0
        self.moved_bytes = self.read_s = 0.0
        self.attempts: dict[str, SimulatedAttempt] = {}  # that it has answered nothing final to
        self._inbox: list[tuple[Callable[..., object], tuple[Any, ...]]] = []
        self._stride: Stride | None = None
        self._ends: Event | None = None
        self._wakes = False
        self._reported_s = -math.inf
        self._load: LoadReport | None = None
        self._noise = random.Random(f"{seed}:{worker_id}:{epoch}") if delays.noise else None
        self.info = self._info(epoch)
        self._beat: Event | None = clock.after(HEARTBEAT_S, self._heartbeat)

    def _info(self, epoch: int) -> WorkerInfo:
        profile = self.profile
        fingerprint = Fingerprint(1, profile.name, "", profile.block_size, 1, 1, 1, "")
        return WorkerInfo(
            worker_id=self.worker_id, role=str(self.role), epoch=str(epoch), host=self.node_id, port=1, node_id=self.node_id,
            model=profile.name, fingerprint=fingerprint, block_size=profile.block_size, num_blocks=profile.num_blocks,
            max_model_len=self.engine.max_model_len, max_running=self.engine.max_running,
            kv_bytes_per_token=profile.kv_bytes_per_token, device="simulated", transports=["simulated"],
        )  # fmt: skip

    # ---- what it is told

    def post(self, call: Callable[..., object], *args: Any) -> None:
        """Have this done between two steps: at once when none is under way."""
        if not self.is_alive:
            return
        self._inbox.append((call, args))
        if self._stride is None:
            self._wake()
        elif self._stride.count > 1:
            self._cut_short(self._stride)

    def _cut_short(self, stride: Stride) -> None:
        """Of several steps, only the one that is being computed is still waited for."""
        if self.is_frozen:
            return
        count = stride.steps_until(self._clock.now_s)
        if count < stride.count and self._ends is not None:
            self._ends.cancel()
            stride.count = count
            self._ends = self._clock.at(stride.began_s + stride.seconds(count), self._step_ended)

    def _wake(self) -> None:
        if not self._wakes and not self.is_frozen:
            self._wakes = True
            self._clock.after(0.0, self._turn)

    def prefill(self, attempt: SimulatedAttempt, *, is_local: bool) -> None:
        """Compute a prompt: for a decode worker, or (`is_local`) to decode it here."""
        self._admit(attempt, self._add, attempt, is_local)

    def reserve(self, attempt: SimulatedAttempt, prefill_tokens_per_s: float) -> None:
        """Have blocks reserved, now or in line."""
        if self._admit(attempt, self._add_reservation, attempt, prefill_tokens_per_s):
            attempt.wait = self._waits.begin(self._wait_over, attempt)

    def _admit(self, attempt: SimulatedAttempt, call: Callable[..., object], *args: Any) -> bool:
        if not self.is_alive:
            return False  # the ingress will hear of that by itself
        if self.is_draining:
            self._tell(attempt.failed, self.worker_id, "draining")
            return False
        self.attempts[attempt.id] = attempt
        self.post(call, *args)
        return True

    def _add(self, attempt: SimulatedAttempt, is_local: bool) -> None:
        if self._is_wanted(attempt):
            self.engine.scheduler.add(
                attempt.request,
                self._clock.now_s,
                hold=attempt.decision.path == "disaggregated",
                output_limit=None if is_local else 1,
            )

    def _add_reservation(self, attempt: SimulatedAttempt, prefill_tokens_per_s: float) -> None:
        if self._is_wanted(attempt):
            seq = self.engine.scheduler.add_reservation(attempt.request, self._clock.now_s)
            seq.prefill_tokens_per_s = prefill_tokens_per_s

    def _is_wanted(self, attempt: SimulatedAttempt) -> bool:
        """Whether it is to be taken: nobody has aborted it meanwhile, and there is no reason against it."""
        if attempt.id not in self.attempts:
            return False
        reason = self.engine.refusal(attempt.request)
        if reason is not None:
            self._refuse(attempt, reason)
        return reason is None

    def _refuse(self, attempt: SimulatedAttempt, reason: str) -> None:
        self._forget(attempt.id)
        self._tell(attempt.failed, self.worker_id, reason)

    def _wait_over(self, attempt: SimulatedAttempt) -> None:
        if attempt.id in self.attempts:
            self._refuse(attempt, "full")
            self.post(self.engine.abort, attempt.id)

    def abort(self, attempt_id: str) -> None:
        """Let go of whatever it holds here. Idempotent."""
        self._forget(attempt_id)
        self.post(self.engine.abort, attempt_id)

    def arrived(self, attempt: SimulatedAttempt) -> None:
        """Its KV is here, all of it."""
        assert attempt.flow is not None
        self.moved_bytes += attempt.flow.moved_bytes
        self.read_s += attempt.flow.read_s
        self.post(self._activate, attempt)

    def _activate(self, attempt: SimulatedAttempt) -> None:
        output = self.engine.activate(attempt.id)
        if output is not None:
            self._tell_output(output)

    def _forget(self, attempt_id: str) -> SimulatedAttempt | None:
        attempt = self.attempts.pop(attempt_id, None)
        if attempt is not None and attempt.wait is not None and self.role is Role.DECODE:
            attempt.wait.cancel()
            attempt.wait = None
        return attempt

    # ---- steps

    def _turn(self) -> None:
        """Between two steps."""
        self._wakes = False
        if not self.is_alive or self.is_frozen or self._stride is not None:
            return
        inbox, self._inbox = self._inbox, []
        for call, args in inbox:
            call(*args)
        now_s = self._clock.now_s
        for seq in self.engine.grants(now_s):
            self._granted(seq)
        factor = (
            self.slowness if self._noise is None else self.slowness * math.exp(self._noise.gauss(0, self._delays.noise))
        )
        if self._machine is not None:
            factor *= slowed(self._slowdown, self._machine.crowd_with(self))
        stride = self._stride = self.engine.begin(now_s, factor)
        if (gone := self.engine.take_gone()) is not None:
            self._tell_all(gone)
        if stride is None:
            self._rest()
            self._publish(is_idle=True)
            self._be_patient()
            return
        self._ends = self._clock.at(now_s + stride.seconds(stride.count), self._step_ended)
        if self._machine is not None:
            self._machine.begins(self)
        if stride.plan is not None and self.role is Role.PREFILL:
            self._feed(stride)

    def _be_patient(self) -> None:
        """With nothing to do, look again when somebody in line has waited for a store for long enough."""
        until_s = self.engine.next_deadline_s()
        if self._patience is not None:
            self._patience.cancel()
        self._patience = None if until_s is None else self._clock.at(until_s, self.post, _nothing)

    def _step_ended(self) -> None:
        stride, told = self._stride, StepEvents()
        assert stride is not None
        self._stride = self._ends = None
        self.engine.end(stride, stride.count, told)
        self._tell_all(told)
        self._publish(is_idle=not self.engine.has_work)
        if self.engine.has_work or self._inbox:
            self._turn()
        else:
            self._rest()

    def _rest(self) -> None:
        if self._machine is not None:
            self._machine.rests(self)

    def crowd_changed(self, before: int, now: int) -> None:
        """What is left of the step under way takes longer, or less long; those that were to follow are planned anew."""
        ratio = slowed(self._slowdown, now) / slowed(self._slowdown, before)
        stride = self._stride
        if ratio == 1.0 or stride is None or self._ends is None:
            return
        self.settle()
        stride.count = 1
        stride.first_s += (ratio - 1) * max(0.0, stride.began_s + stride.first_s - self._clock.now_s)
        self._ends.cancel()
        self._ends = self._clock.at(stride.began_s + stride.first_s, self._step_ended)

    def _granted(self, seq: Sequence) -> None:
        attempt = self.attempts.get(seq.request_id)
        if attempt is None:
            self.engine.abort(seq.request_id)
            return
        if attempt.wait is not None:
            attempt.wait.cancel()
            attempt.wait = None
        self._tell(attempt.reserved, seq.num_cached)

    def _feed(self, stride: Stride) -> None:
        """What this step computes of prompts that are to go elsewhere is ready layer by layer, in its course."""
        assert stride.plan is not None
        for item in stride.plan.work:
            attempt = self.attempts.get(item.seq.request_id)
            if attempt is None or attempt.flow is None:
                continue
            attempt.feed(item.start, item.start + item.num_tokens, stride.first_s, LAYER_GROUPS)

    # ---- what it tells

    def _tell(self, call: Callable[..., object], *args: Any) -> None:
        self._clock.after(self._delays.message_s, call, *args)

    def _tell_all(self, told: StepEvents) -> None:
        for output in told.outputs:
            self._tell_output(output)
        for request_id, reason in told.refused:
            if (attempt := self._forget(request_id)) is not None:
                self._tell(attempt.failed, self.worker_id, reason)
        for request_id, num_emitted in told.returned_to_prefill:
            if (attempt := self._forget(request_id)) is not None:
                attempt.num_emitted = num_emitted
                self._tell(attempt.failed, self.worker_id, PREEMPTED)

    def _tell_output(self, output: TokenOutput) -> None:
        attempt = self.attempts.get(output.request_id)
        if attempt is None:
            return
        if output.timings is not None and self.engine.below is not None:
            seq = self.engine.scheduler.sequences.get(output.request_id)
            attempt.tier_tokens = seq.num_loaded_blocks * seq.block_size if seq is not None else 0
        if output.finish_reason is not None:
            self._forget(output.request_id)
        elif self.role is Role.PREFILL:
            attempt.computed()
        self._tell(attempt.output, self.worker_id, output)

    def _publish(self, *, is_idle: bool) -> None:
        events = self.engine.drain_events()
        is_due = is_idle or self._clock.now_s - self._reported_s >= self._delays.report_s
        load = self.load() if is_due else None
        if events is not None or load is not None:
            for peer in self.peers:
                self._clock.after(self._delays.message_s, peer.hear, self, events, load)

    def load(self) -> LoadReport:
        """What it tells of itself now."""
        own: dict[str, Any] = {}
        if self.is_draining or self.moved_bytes:
            own = {"is_draining": self.is_draining, "transport": "simulated", "kv_bytes": int(self.moved_bytes), "kv_seconds": self.read_s}  # fmt: skip
        load = self._load = self.engine.load(own)
        self._reported_s = self._clock.now_s
        return load

    @property
    def last_load(self) -> LoadReport:
        """What it has told of itself last."""
        return self._load or self.load()

    @property
    def is_idle(self) -> bool:
        """Whether it holds nothing for anybody."""
        return not self.attempts and not self.engine.scheduler.sequences and not self._inbox

    def _heartbeat(self) -> None:
        if not self.is_frozen:
            load = self.last_load
            for peer in self.peers:
                self._clock.after(self._delays.message_s, peer.hear, self, None, load)
            if self.engine.below is not None and self._stride is None:
                self.post(_nothing)  # what has been put away meanwhile is noted
        self._beat = self._clock.after(HEARTBEAT_S, self._heartbeat)

    def subscribe(self, peer: LoadSubscriber) -> tuple[KvSnapshot, LoadReport]:
        """From now on this ingress hears all news; first what there is."""
        self.peers[peer] = None
        self.assigned.join(peer)
        self._tell_others.request()
        return self.engine.snapshot(), self.load()

    def forget_peer(self, peer: LoadSubscriber) -> None:
        """This ingress's connection has ended."""
        self.peers.pop(peer, None)
        self.assigned.leave(peer)
        self._tell_others.request()

    def hear_assigned(self, peer: LoadSubscriber, share: Assigned) -> None:
        """What this ingress has assigned here."""
        if self.is_alive and self.assigned.hear(peer, share):
            self._tell_others.request()

    def _on_assigned(self) -> None:
        if self.is_alive and not self.is_frozen:
            for peer, others in self.assigned.take_news():
                self._tell(peer.hear_others, self, others)

    # ---- faults

    def recover_speed(self) -> None:
        """Its steps take what they took, from the next one on."""
        self.slowness = 1.0

    def freeze(self) -> None:
        """It does nothing and says nothing; what it is told, and what its links carry, waits for it."""
        self.settle()
        self.is_frozen, self.num_freezes = True, self.num_freezes + 1
        if self._ends is not None:
            self._ends.cancel()
            self._ends = None
        self._rest()

    def thaw(self) -> None:
        """It goes on with the step that it was at, from that step's beginning."""
        self.is_frozen = False
        self._tell_others.request()
        if self._stride is None:
            self._wake()
            return
        self._stride.began_s = self._clock.now_s
        if self._machine is not None:
            self._machine.begins(self)
        self._ends = self._clock.after(self._stride.seconds(self._stride.count), self._step_ended)

    def drop_all(self, peer: object) -> None:
        """The connection to this ingress was lost: what it had asked for is let go of."""
        for attempt in [one for one in self.attempts.values() if one.owner.peer is peer]:
            self.abort(attempt.id)

    # ---- its end

    def settle(self) -> None:
        """Of the steps under way, those that are over count, before something else is done to it."""
        stride = self._stride
        if stride is None or stride.count == 1:
            return
        done = stride.steps_until(self._clock.now_s) - 1
        if done:
            self.engine.end(stride, done, StepEvents())
            stride.drop(done)

    def num_emitted(self, attempt_id: str) -> int:
        """Tokens of output that the client has by now, as far as they are known here."""
        return self.engine.num_output(attempt_id)

    def stop(self) -> None:
        """It is gone at once, with everything that it holds."""
        self.settle()
        self.is_alive, self.stopped_s = False, self._clock.now_s
        self._rest()
        if self.engine.below is not None:
            self.engine.below.close()
            self._holders.gone(self.worker_id)
        for event in (self._ends, self._beat, self._patience):
            if event is not None:
                event.cancel()
        self._stride = self._ends = self._beat = None
        self._inbox.clear()
        self.peers.clear()


def _nothing() -> None:
    """Only to be looked at."""
