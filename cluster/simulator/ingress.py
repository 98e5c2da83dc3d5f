"""An ingress in virtual time: one Router, and the drivers of the requests that came here.

As serve/workers/dispatcher.py and serve/requests/request_driver.py do it, with the same Router and the same Retries; the messages' ways are
delays. A restarted ingress begins with an empty Router and hears snapshots.
"""

import math
from collections.abc import Callable
from typing import Any

import msgspec

from kvrelay.cluster.simulator.attempt import SimulatedAttempt
from kvrelay.cluster.simulator.requests import SimulatedRequest
from kvrelay.cluster.simulator.resources.clock import Clock
from kvrelay.cluster.simulator.resources.network import Network
from kvrelay.cluster.simulator.worker import Delays, SimulatedWorker
from kvrelay.config import Settings
from kvrelay.errors import KvrelayError
from kvrelay.pacing import Paced
from kvrelay.plane.messages import AssignedByOthers, KvEvents, KvSnapshot, LoadReport, TokenOutput
from kvrelay.router.decision.router import Router
from kvrelay.router.objectives import SloRequirement
from kvrelay.router.types import Decision, Deferred, Refusal, RouteRequest
from kvrelay.serve.requests.retries import AttemptFailed, Retries, outcome_of
from kvrelay.serve.telemetry.observer import ServeStats


class SimulatedRequestDriver:
    """One request from its arrival to its end."""

    __slots__ = ("_attempt", "_deadline", "_ingress", "_is_deferred", "_num_emitted", "_retries", "job")

    def __init__(self, job: SimulatedRequest, ingress: "SimulatedIngress") -> None:
        self.job, self._ingress = job, ingress
        self._retries = Retries(ingress.settings.router.retry_budget)
        self._attempt: SimulatedAttempt | None = None
        self._num_emitted, self._is_deferred = 0, False
        self._deadline = ingress.time_limit.begin(self._end, "error")

    @property
    def peer(self) -> object:
        return self._ingress

    def begin(self) -> None:
        """Route, and ask for a reservation or for the first token."""
        ingress, job = self._ingress, self.job
        attempt_number = job.num_attempts + 1
        request_id = f"{job.index}" if attempt_number == 1 else f"{job.index}~{attempt_number}"
        block_size, max_tokens = ingress.block_size, max(ingress.max_tokens, job.output_tokens)
        request = job.request(request_id, block_size, max_tokens, self._num_emitted)
        num_tokens, remaining = len(request.token_ids), max_tokens - self._num_emitted
        query = RouteRequest(
            request_id=request_id,
            block_hashes=tuple(request.block_hashes[: num_tokens // block_size]),
            num_tokens=num_tokens,
            max_tokens=remaining,
            needs_decode=remaining > 1,
            slo=ingress.ask if attempt_number == 1 else None,
            session=job.session,
            tenant=job.tenant,
            may_wait=attempt_number == 1,
        )
        choice = self._retries.choose(query, ingress.route)
        self._is_deferred = isinstance(choice, Deferred)
        if isinstance(choice, Deferred):
            ingress.stats.deferred += 1
            ingress.deferred[request_id] = self
            ingress.call_deferred()
            return
        job.num_attempts = attempt_number
        if isinstance(choice, Refusal):
            self._not_routed(choice)
            return
        request = msgspec.structs.replace(request, tpot_target_s=choice.tpot_target_s)
        attempt = self._attempt = SimulatedAttempt(self, request, choice, ingress.bytes_per_token)
        self._say_when(attempt)
        ingress.attach(attempt)
        if choice.path == "disaggregated":
            speed = ingress.router.prefill_tokens_per_s(choice.prefill)
            self._send(attempt, choice.decode, lambda worker: worker.reserve(attempt, speed))
        else:
            is_local = choice.path == "local"
            target = choice.decode if is_local else choice.prefill
            self._send(attempt, target, lambda worker: worker.prefill(attempt, is_local=is_local))

    def _say_when(self, attempt: SimulatedAttempt) -> None:
        """How soon its first token is wanted from now on."""
        ttft_target_s = attempt.decision.ttft_target_s
        if ttft_target_s is not None and not self._num_emitted:
            left_s = self.job.arrival_s + ttft_target_s - self._ingress.clock.now_s
            attempt.request = msgspec.structs.replace(attempt.request, ttft_target_s=left_s)

    def _send(self, attempt: SimulatedAttempt, worker_id: str | None, call: Callable[[SimulatedWorker], None]) -> None:
        assert worker_id is not None
        worker = self._ingress.workers[worker_id]
        attempt.holders[worker_id] = worker
        self._ingress.send(_if_wanted, attempt, worker, call)

    def _not_routed(self, refusal: Refusal) -> None:
        error = self._retries.error_of(refusal)
        if isinstance(error, AttemptFailed):
            self._consider(error)
        else:
            self.job.retry_after_s = refusal.retry_after_s
            self._end(outcome_of(error))

    # ---- what workers say

    def reserved(self, attempt: SimulatedAttempt, held_tokens: int) -> None:
        ingress, decision = self._ingress, attempt.decision
        assert decision.prefill is not None and decision.decode is not None
        source, target = ingress.workers.get(decision.prefill), ingress.workers.get(decision.decode)
        if source is None or target is None:  # gone since the decision, when nothing was there to be lost
            self.failed(attempt, decision.prefill, "lost")
            return
        attempt.flow = ingress.network.open(
            source.node_id, target.node_id, lambda: ingress.moved(attempt, source, target)
        )
        self._say_when(attempt)
        self._send(attempt, decision.prefill, lambda worker: worker.prefill(attempt, is_local=False))

    def output(self, attempt: SimulatedAttempt, worker_id: str, output: TokenOutput) -> None:
        now_s, job = self._ingress.clock.now_s, self.job
        if output.timings is not None and not attempt.has_first_token:
            attempt.has_first_token = True
            self._ingress.router.on_first_token(
                attempt.id, now_s, timings=output.timings, cached_tokens=output.cached_tokens or 0
            )
            self._ingress.load_changed()
            self._ingress.call_deferred()
            self._num_emitted = max(self._num_emitted, 1)
            if math.isnan(job.first_s):
                job.first_s, job.cached_tokens = now_s, output.cached_tokens or 0
                self._ingress.stats.ttft_s.observe(job.ttft_s)
                self._ingress.stats.cached_prefix_tokens += job.cached_tokens
                job.tier_tokens = attempt.tier_tokens
        if output.finish_reason is not None:
            attempt.holders.pop(worker_id, None)
            job.end_s = now_s
            if job.num_attempts == 1:
                self._ingress.router.on_finished(attempt.id, job.output_tokens, job.tpot_s, now_s)
            self._end("done")

    def failed(self, attempt: SimulatedAttempt, worker_id: str, code: str) -> None:
        self._num_emitted = max(self._num_emitted, self._ingress.num_emitted(attempt))
        self._end_attempt()
        self._consider(AttemptFailed(worker_id, code, ""))

    def _consider(self, failure: AttemptFailed) -> None:
        try:
            self._ingress.stats.retries += self._retries.failed(failure)
        except KvrelayError as error:
            self.job.retry_after_s = failure.retry_after_s
            self._end(outcome_of(error))
            return
        pause_s, self._retries.pause_s = self._retries.pause_s, 0.0
        self._ingress.clock.after(pause_s, self._begin_again)

    def _begin_again(self) -> None:
        if self in self._ingress.drivers:  # its time is not up meanwhile
            self.begin()

    def _end_attempt(self) -> None:
        if self._attempt is not None:
            self._ingress.detach(self._attempt)
            self._attempt = None

    def _end(self, outcome: str) -> None:
        self._end_attempt()
        if self._is_deferred:
            self._ingress.give_up(f"{self.job.index}")
        self._deadline.cancel()
        self.job.outcome = outcome
        self._ingress.over(self)

    def lost(self) -> None:
        """Its ingress is gone, and the client's connection with it."""
        self._end("error")


def _if_wanted(attempt: SimulatedAttempt, worker: SimulatedWorker, call: Callable[[SimulatedWorker], None]) -> None:
    """A message has arrived; one for an attempt that ended meanwhile is followed by its abort."""
    if not attempt.is_over:
        call(worker)


class SimulatedIngress:
    """Requests come by `arrive`; workers are told of by `worker_up` and `worker_gone`."""

    def __init__(
        self,
        clock: Clock,
        network: Network,
        settings: Settings,
        delays: Delays,
        *,
        block_size: int,
        bytes_per_token: int,
        max_tokens: int,
        ask: SloRequirement | None,
        ended: Callable[[SimulatedRequest], object],
    ) -> None:
        """max_tokens: what every client allows its output to have. ended: is told of every request that is over."""
        self.clock, self.network, self.settings, self._delays = clock, network, settings, delays
        self.block_size, self.bytes_per_token, self.max_tokens, self.ask = block_size, bytes_per_token, max_tokens, ask
        self._ended = ended
        self.router = self._new_router()
        self._has_others = False
        self._sharing = Paced(self._tell_assigned, settings.router.share_load_s, now=clock.time, after=clock.after)
        self.workers: dict[str, SimulatedWorker] = {}
        self.attempts: dict[str, SimulatedAttempt] = {}
        self.drivers: dict[SimulatedRequestDriver, None] = {}
        self.deferred: dict[str, SimulatedRequestDriver] = {}  # whose turn has not come
        self.stats = ServeStats()
        self.time_limit = clock.timer(settings.serve.request_timeout_s)

    def _new_router(self) -> Router:
        settings = self.settings
        return Router(
            settings.router, tokens_per_hash=self.block_size, max_waiting=settings.engine.max_waiting, slo=settings.slo
        )

    # ---- workers

    def worker_up(self, worker: SimulatedWorker) -> None:
        """It is a member: connect, and subscribe to its news. An earlier one of this name is gone by that."""
        known = self.workers.get(worker.worker_id)
        if known is not None and known is not worker:
            self.worker_gone(known)
        self.workers[worker.worker_id] = worker
        self.router.worker_up(worker.info)
        self._subscribe(worker)
        self.call_deferred()

    def _subscribe(self, worker: SimulatedWorker) -> None:
        self.clock.after(self._delays.message_s, self._subscribed, worker)

    def _subscribed(self, worker: SimulatedWorker) -> None:
        if not worker.is_alive or worker.is_draining:
            return
        snapshot, load = worker.subscribe(self)
        self.clock.after(self._delays.message_s, self._hear_snapshot, worker, snapshot, load)

    def _hear_snapshot(self, worker: SimulatedWorker, snapshot: KvSnapshot, load: LoadReport) -> None:
        if self._is_member(worker):
            self.router.apply_snapshot(worker.worker_id, snapshot)
            self.router.apply_load(worker.worker_id, load, self.clock.now_s)

    def hear(self, worker: SimulatedWorker, events: KvEvents | None, load: LoadReport | None) -> None:
        """News of its cache, and of its load."""
        if not self._is_member(worker):
            return
        if events is not None and not self.router.apply_events(worker.worker_id, events):
            self._subscribe(worker)
        if load is not None:
            self.router.apply_load(worker.worker_id, load, self.clock.now_s)
            self.call_deferred()

    def _is_member(self, worker: SimulatedWorker) -> bool:
        return self.workers.get(worker.worker_id) is worker and not worker.is_draining

    def hear_others(self, worker: SimulatedWorker, others: AssignedByOthers) -> None:
        if self.settings.router.share_load_s and self.workers.get(worker.worker_id) is worker:
            self._has_others |= others.num_others > 0
            self.router.apply_others(worker.worker_id, others)
            self.load_changed()

    def load_changed(self) -> None:
        """Other ingresses are to hear of it, where there are any."""
        if self._has_others and self.settings.router.share_load_s:
            self._sharing.request()

    def _tell_assigned(self) -> None:
        for worker_id, share in self.router.take_assigned():
            self.send(self.workers[worker_id].hear_assigned, self, share)

    def worker_gone(self, worker: SimulatedWorker) -> None:
        """Its connection ended."""
        if self.workers.get(worker.worker_id) is not worker:
            return
        self.router.worker_down(worker.worker_id)
        for attempt in list(self.attempts.values()):
            if attempt.holders.get(worker.worker_id) is worker:
                attempt.failed(worker.worker_id, "lost")
        del self.workers[worker.worker_id]
        self.call_deferred()

    def retire(self, worker: SimulatedWorker) -> None:
        """It is no member any more: nothing new goes there, and what is there goes on."""
        if self.workers.get(worker.worker_id) is worker:
            self.router.worker_down(worker.worker_id)
            self.call_deferred()

    def stop_flows(self, worker: SimulatedWorker) -> None:
        """Nothing goes out of it, or comes in."""
        for attempt in self.attempts.values():
            if attempt.flow is not None and worker.worker_id in (attempt.decision.prefill, attempt.decision.decode):
                attempt.flow.cancel()

    def num_emitted(self, attempt: SimulatedAttempt) -> int:
        """Of an attempt's output, what the client has."""
        worker = self.workers.get(attempt.decision.decode or "")
        return max(attempt.num_emitted, worker.num_emitted(attempt.id) if worker is not None else 0)

    # ---- requests

    def arrive(self, job: SimulatedRequest) -> None:
        if len(self.drivers) >= self.settings.router.max_inflight:
            job.outcome = "overloaded"
            self.stats.outcomes["overloaded"] += 1
            self._ended(job)
            return
        self.stats.running += 1
        self.stats.prompt_tokens += job.num_tokens
        self.stats.prompt_squares += job.num_tokens**2
        driver = SimulatedRequestDriver(job, self)
        self.drivers[driver] = None
        driver.begin()

    def route(self, request: RouteRequest) -> Decision | Refusal | Deferred:
        choice = self.router.select_and_reserve(request, self.clock.now_s)
        self.load_changed()
        return choice

    def call_deferred(self) -> None:
        """Whose turn has come goes."""
        while (request_id := self.router.take_ready()) is not None:
            self.deferred.pop(request_id).begin()

    def give_up(self, request_id: str) -> None:
        """It waits for its turn no more."""
        del self.deferred[request_id]
        self.router.on_end(request_id)

    def send(self, call: Callable[..., object], *args: Any) -> None:
        """A message to a worker."""
        self.clock.after(self._delays.message_s, call, *args)

    def attach(self, attempt: SimulatedAttempt) -> None:
        self.attempts[attempt.id] = attempt

    def detach(self, attempt: SimulatedAttempt) -> None:
        """The one release path: whoever may still hold something is told to let go."""
        attempt.is_over = True
        del self.attempts[attempt.id]
        self.router.on_end(attempt.id)
        self.load_changed()
        if attempt.flow is not None:
            attempt.flow.cancel()
            attempt.flow = None
        for holder in attempt.holders.values():
            self.send(holder.abort, attempt.id)
        self.call_deferred()

    def moved(self, attempt: SimulatedAttempt, source: SimulatedWorker, target: SimulatedWorker) -> None:
        """All its KV has been read; the decode worker asks the prefill worker to confirm it, then both know."""
        self.clock.after(2 * self._delays.message_s, self._confirmed, attempt, source, target)

    def _confirmed(self, attempt: SimulatedAttempt, source: SimulatedWorker, target: SimulatedWorker) -> None:
        if attempt.is_over:
            return
        if not source.is_alive:
            target.abort(attempt.id)  # it lets go by itself, and says so
            attempt.failed(target.worker_id, "transfer")
            return
        attempt.holders.pop(source.worker_id, None)
        source.abort(attempt.id)
        target.arrived(attempt)

    def over(self, driver: SimulatedRequestDriver) -> None:
        job, stats = driver.job, self.stats
        stats.running -= 1
        stats.outcomes["stop" if job.outcome == "done" else job.outcome] += 1
        if job.outcome == "done":
            stats.output_tokens += job.output_tokens
            if job.output_tokens > 1:
                stats.tpot_s.observe(job.tpot_s)
        del self.drivers[driver]
        self._ended(driver.job)

    # ---- faults

    def restart(self) -> None:
        """Its process is gone, with the requests that it had; a new one begins, and connects to every worker."""
        for driver in list(self.drivers):
            driver.lost()
        self.router = self._new_router()
        for worker in self.workers.values():
            worker.forget_peer(self)
            if worker.is_alive and not worker.is_draining:
                self.router.worker_up(worker.info)
                self._subscribe(worker)
