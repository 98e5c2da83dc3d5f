"""An ingress in virtual time, and the drivers of the requests that arrive there.

Follows serve/workers/ and serve/requests/, with production's Router and Retries; messages are delays. A restarted
ingress begins with an empty Router and receives snapshots.
"""

import math
from collections.abc import Callable
from typing import Any

import msgspec

from kvrelay import types
from kvrelay.cluster.simulator.requests import SimulatedAttempt, SimulatedRequest
from kvrelay.cluster.simulator.scenario import World
from kvrelay.cluster.simulator.worker import SimulatedWorker
from kvrelay.errors import KvrelayError
from kvrelay.pacing import Paced
from kvrelay.plane.messages import SHARE_LOAD_S, TokenOutput
from kvrelay.plane.reports import AssignedByOthers, KvEvents, KvSnapshot, LoadReport
from kvrelay.router.decision.router import Router
from kvrelay.router.types import Decision, Deferred, RouteRequest, RoutingRefusal, SloRequirement
from kvrelay.serve.requests.retries import AttemptFailed, Retries, outcome_of
from kvrelay.serve.telemetry.observer import ServeStats


class SimulatedRequestDriver:
    """One request from its arrival to its end."""

    def __init__(self, job: SimulatedRequest, ingress: "SimulatedIngress") -> None:
        self.job, self._ingress, self.peer = job, ingress, ingress.links
        self._retries = Retries()
        self._attempt: SimulatedAttempt | None = None
        self._num_emitted, self._is_deferred = 0, False
        self._deadline = ingress.clock.after(ingress.world.settings.serve.request_timeout_s, self.end, "error")

    def begin(self) -> None:
        """Place the request, and send it to be reserved or prefilled."""
        ingress, job, world = self._ingress, self.job, self._ingress.world
        block_size = world.profile.block_size
        attempt_number = job.num_attempts + 1
        request_id = f"{job.index}" if attempt_number == 1 else f"{job.index}~{attempt_number}"
        max_tokens = max(world.scenario.max_tokens, job.output_tokens)
        request = job.request(request_id, block_size, max_tokens, self._num_emitted)
        num_tokens, remaining = len(request.token_ids), max_tokens - self._num_emitted
        query = RouteRequest(
            request_id=request_id,
            block_hashes=tuple(request.block_hashes[: num_tokens // block_size]),
            num_tokens=num_tokens,
            max_tokens=remaining,
            needs_decode=remaining > 1,
            slo=ingress.slo if attempt_number == 1 else None,
            session=job.session,
            tenant=job.tenant,
            weight=job.weight,
            is_new=attempt_number == 1,
            may_wait=attempt_number == 1,
        )
        choice = self._retries.choose(query, ingress.route)
        self._is_deferred = isinstance(choice, Deferred)
        if isinstance(choice, Deferred):
            ingress.defer(request_id, self, choice.longest_s)
            return
        job.num_attempts = attempt_number
        if isinstance(choice, RoutingRefusal):
            self._not_placed(choice)
            return
        request = msgspec.structs.replace(request, tpot_target_s=choice.tpot_target_s)
        attempt = self._attempt = SimulatedAttempt(self, request, choice, world.profile.kv_bytes_per_token)
        self._set_ttft_target(attempt)
        ingress.attempts[attempt.id] = attempt
        if choice.path == "disaggregated":
            speed = ingress.router.prefill_tokens_per_s(choice.prefill)
            self._send(attempt, choice.decode, lambda worker: worker.reserve(attempt, speed))
        else:
            is_local = choice.path == "local"
            target = choice.decode if is_local else choice.prefill
            self._send(attempt, target, lambda worker: worker.prefill(attempt, is_local=is_local))

    def _set_ttft_target(self, attempt: SimulatedAttempt) -> None:
        target_s = attempt.decision.ttft_target_s
        if target_s is not None and not self._num_emitted:
            left_s = self.job.arrival_s + target_s - self._ingress.clock.now_s
            attempt.request = msgspec.structs.replace(attempt.request, ttft_target_s=left_s)

    def _send(self, attempt: SimulatedAttempt, worker_id: str | None, call: Callable[[SimulatedWorker], None]) -> None:
        assert worker_id is not None
        worker = self._ingress.links.members[worker_id]
        attempt.holders[worker_id] = worker
        self._ingress.links.send(_unless_over, attempt, worker, call)

    def _not_placed(self, refusal: RoutingRefusal) -> None:
        is_awaited = any(worker.is_draining for worker in self._ingress.links.members.values())
        error = self._retries.error_of(refusal, is_awaited=is_awaited)
        if isinstance(error, AttemptFailed):
            self._retry(error)
        else:
            self.job.retry_after_s = refusal.retry_after_s
            self._ingress.stats.hopeless += refusal.verdict is not None and refusal.verdict.is_hopeless
            self.end(outcome_of(error))

    # ---- reports of workers

    def reserved(self, attempt: SimulatedAttempt, held_tokens: int) -> None:
        ingress, decision = self._ingress, attempt.decision
        assert decision.prefill is not None and decision.decode is not None
        members = ingress.links.members
        source, target = members.get(decision.prefill), members.get(decision.decode)
        if source is None or target is None:  # gone since the decision, when nothing was there to be lost
            self.failed(attempt, decision.prefill, "lost")
            return
        attempt.flow = ingress.network.open(
            source.node_id, target.node_id, lambda: ingress.transferred(attempt, source, target)
        )
        self._set_ttft_target(attempt)
        self._send(attempt, decision.prefill, lambda worker: worker.prefill(attempt, is_local=False))

    def output(self, attempt: SimulatedAttempt, worker_id: str, output: TokenOutput) -> None:
        if output.timings is not None and not attempt.has_first_token:
            self._first_token(attempt, output)
        if output.finish_reason is not None:
            job, now_s = self.job, self._ingress.clock.now_s
            attempt.holders.pop(worker_id, None)
            job.end_s = now_s
            if job.num_attempts == 1:
                self._ingress.router.on_finished(attempt.id, job.output_tokens, job.tpot_s, now_s)
            self.end("done")

    def _first_token(self, attempt: SimulatedAttempt, output: TokenOutput) -> None:
        """The attempt's; of the request only unless an earlier attempt had one."""
        ingress, job, now_s = self._ingress, self.job, self._ingress.clock.now_s
        cached_tokens = output.cached_tokens or 0
        assert output.timings is not None
        attempt.has_first_token = True
        ingress.router.on_first_token(attempt.id, now_s, timings=output.timings, cached_tokens=cached_tokens)
        ingress.links.assigned_changed()
        ingress.start_deferred()
        self._num_emitted = max(self._num_emitted, 1)
        if math.isnan(job.first_s):
            job.first_s, job.cached_tokens, job.tier_tokens = now_s, cached_tokens, attempt.tier_tokens
            job.is_local = attempt.decision.path == "local"
            ingress.stats.ttft_s.observe(job.ttft_s)
            ingress.stats.cached_prefix_tokens += cached_tokens

    def failed(self, attempt: SimulatedAttempt, worker_id: str, code: str) -> None:
        self._num_emitted = max(self._num_emitted, self._ingress.num_emitted(attempt))
        self._end_attempt()
        self._retry(AttemptFailed(worker_id, code, ""))

    def _retry(self, failure: AttemptFailed) -> None:
        try:
            self._ingress.stats.retries += self._retries.failed(failure, self._num_emitted)
        except KvrelayError as error:
            self.job.retry_after_s = failure.retry_after_s
            self.end(outcome_of(error))
            return
        pause_s, self._retries.pause_s = self._retries.pause_s, 0.0
        self._ingress.clock.after(pause_s, self._begin_again)

    def _begin_again(self) -> None:
        if self in self._ingress.drivers:  # else the time limit has ended it
            self.begin()

    def _end_attempt(self) -> None:
        if self._attempt is not None:
            self._ingress.detach(self._attempt)
            self._attempt = None

    def end(self, outcome: str) -> None:
        self._end_attempt()
        if self._is_deferred:
            self._ingress.drop_deferred(f"{self.job.index}")
        self._deadline.cancel()
        self.job.outcome = outcome
        self._ingress.ended(self)


def _unless_over(attempt: SimulatedAttempt, worker: SimulatedWorker, call: Callable[[SimulatedWorker], None]) -> None:
    """A message for an attempt that ended meanwhile has no effect: its abort follows."""
    if not attempt.is_over:
        call(worker)


WORKERS_PER_INGRESS = 8
"""A simulated ingress with more workers stands for several ingresses, and takes what they would take together."""


class SimulatedIngress:
    """Requests come by `arrive`; workers join by `worker_up` and leave by `worker_gone`.

    on_ended: called with every request that has ended.
    """

    def __init__(
        self, world: World, slo: SloRequirement | None, on_ended: Callable[[SimulatedRequest], object]
    ) -> None:
        self.world, self.slo, self._on_ended = world, slo, on_ended
        self.clock, self.network = world.clock, world.network
        self.links = WorkerLinks(world, self.start_deferred)
        self.attempts: dict[str, SimulatedAttempt] = {}
        self.drivers: dict[SimulatedRequestDriver, None] = {}
        self.deferred: dict[str, SimulatedRequestDriver] = {}
        self.stats = ServeStats.with_targets(world.settings)

    @property
    def router(self) -> Router:
        return self.links.router

    # ---- workers

    def worker_up(self, worker: SimulatedWorker) -> None:
        """Connect and subscribe to a worker. An earlier one of this name is gone by that."""
        known = self.links.members.get(worker.worker_id)
        if known is not None and known is not worker:
            self.worker_gone(known)
        self.links.add(worker)
        self.start_deferred()

    def worker_gone(self, worker: SimulatedWorker) -> None:
        """The connection has ended."""
        if not self.links.is_connected(worker):
            return
        self.router.worker_down(worker.worker_id)
        for attempt in list(self.attempts.values()):
            if attempt.holders.get(worker.worker_id) is worker:
                attempt.failed(worker.worker_id, "lost")
        del self.links.members[worker.worker_id]
        self.start_deferred()

    def retire(self, worker: SimulatedWorker) -> None:
        """Place nothing more on a worker; what it has goes on."""
        if self.links.is_connected(worker):
            self.router.worker_down(worker.worker_id)
            self.start_deferred()

    def role_changed(self, worker: SimulatedWorker) -> None:
        """Place what its role takes now; what it has goes on."""
        if self.links.is_connected(worker):
            self.router.role_changed(worker.worker_id, worker.info.role)
            self.start_deferred()

    def stop_flows(self, worker: SimulatedWorker) -> None:
        for attempt in self.attempts.values():
            if attempt.flow is not None and worker.worker_id in (attempt.decision.prefill, attempt.decision.decode):
                attempt.flow.cancel()

    def num_emitted(self, attempt: SimulatedAttempt) -> int:
        worker = self.links.members.get(attempt.decision.decode or "")
        return max(attempt.num_emitted, worker.num_emitted(attempt.id) if worker is not None else 0)

    # ---- requests

    def arrive(self, job: SimulatedRequest) -> None:
        if len(self.drivers) >= self._max_inflight:
            job.outcome = "overloaded"
            self.stats.outcomes["overloaded"] += 1
            self._on_ended(job)
            return
        self.stats.running += 1
        self.stats.taken += 1
        self.stats.prompt_tokens += job.num_tokens
        self.stats.prompt_squares += job.num_tokens**2
        driver = SimulatedRequestDriver(job, self)
        self.drivers[driver] = None
        driver.begin()

    @property
    def _max_inflight(self) -> int:
        num_ingresses = len(self.links.members) // (WORKERS_PER_INGRESS * self.world.scenario.ingress)
        return max(1, num_ingresses) * self.world.settings.router.max_inflight

    def route(self, request: RouteRequest) -> Decision | RoutingRefusal | Deferred:
        choice = self.router.select_and_reserve(request, self.clock.now_s)
        self.links.assigned_changed()
        return choice

    def defer(self, request_id: str, driver: SimulatedRequestDriver, longest_s: float) -> None:
        """Keep a request until the router reports that it is ready, or is to refuse it."""
        self.stats.deferred += 1
        self.deferred[request_id] = driver
        self.clock.after(longest_s, self._expire, request_id, driver)
        self.start_deferred()

    def _expire(self, request_id: str, driver: SimulatedRequestDriver) -> None:
        if self.deferred.get(request_id) is driver:
            del self.deferred[request_id]
            driver.begin()

    def start_deferred(self) -> None:
        """Begin the deferred requests that the router reports as ready."""
        while (request_id := self.router.take_ready()) is not None:
            self.deferred.pop(request_id).begin()

    def drop_deferred(self, request_id: str) -> None:
        del self.deferred[request_id]
        self.router.on_end(request_id)

    def detach(self, attempt: SimulatedAttempt) -> None:
        """The one release path: every worker that may hold something of the attempt aborts it."""
        attempt.is_over = True
        del self.attempts[attempt.id]
        self.router.on_end(attempt.id)
        self.links.assigned_changed()
        if attempt.flow is not None:
            attempt.flow.cancel()
            attempt.flow = None
        for holder in attempt.holders.values():
            self.links.send(holder.abort, attempt.id)
        self.start_deferred()

    def transferred(self, attempt: SimulatedAttempt, source: SimulatedWorker, target: SimulatedWorker) -> None:
        """All KV has been read; the decode worker has the prefill worker confirm it, a message each way."""
        self.clock.after(2 * self.world.scenario.message_s, self._confirmed, attempt, source, target)

    def _confirmed(self, attempt: SimulatedAttempt, source: SimulatedWorker, target: SimulatedWorker) -> None:
        if attempt.is_over:
            return
        if not source.is_alive:
            target.abort(attempt.id)
            attempt.failed(target.worker_id, "transfer")
            return
        attempt.holders.pop(source.worker_id, None)
        source.abort(attempt.id)
        target.received(attempt)

    def ended(self, driver: SimulatedRequestDriver) -> None:
        job, stats = driver.job, self.stats
        stats.running -= 1
        stats.outcomes["stop" if job.outcome == "done" else job.outcome] += 1
        if job.outcome == "done":
            stats.output_tokens += job.output_tokens
            if job.output_tokens > 1:
                stats.tpot_s.observe(job.tpot_s)
        del self.drivers[driver]
        self._on_ended(driver.job)

    # ---- faults

    def restart(self) -> None:
        """The process is gone, with its requests; a new one connects to every worker."""
        for driver in list(self.drivers):
            driver.end("error")
        self.links.restart()


class WorkerLinks:
    """The Router of one ingress and the workers that report to it."""

    def __init__(self, world: World, load_changed: Callable[[], object]) -> None:
        """load_changed: is called after what a worker reports may let a deferred request go."""
        self._clock, self._world, self._load_changed = world.clock, world, load_changed
        self.router = self._new_router()
        self.members: dict[str, SimulatedWorker] = {}
        self._has_others = False
        self._sharing = Paced(self._share_assigned, SHARE_LOAD_S, now=self._clock.time, after=self._clock.after)

    def _new_router(self) -> Router:
        settings, size = self._world.settings, self._world.profile.block_size
        limit, has_store = types.MAX_WAITING, settings.cache.is_shared
        return Router(settings.router, tokens_per_hash=size, max_waiting=limit, slo=settings.slo, has_store=has_store)

    def send(self, call: Callable[..., object], *args: Any) -> None:
        self._clock.after(self._world.scenario.message_s, call, *args)

    # ---- membership

    def is_connected(self, worker: SimulatedWorker) -> bool:
        return self.members.get(worker.worker_id) is worker

    def add(self, worker: SimulatedWorker) -> None:
        self.members[worker.worker_id] = worker
        self.router.worker_up(worker.info)
        self.send(self._subscribed, worker)

    def restart(self) -> None:
        """Begin with an empty Router and connect to every worker again."""
        self.router = self._new_router()
        for worker in self.members.values():
            worker.reports.unsubscribe(self)
            if worker.is_alive and not worker.is_draining:
                self.router.worker_up(worker.info)
                self.send(self._subscribed, worker)

    def _takes_requests(self, worker: SimulatedWorker) -> bool:
        return self.is_connected(worker) and not worker.is_draining

    # ---- reports

    def _subscribed(self, worker: SimulatedWorker) -> None:
        if not worker.is_alive or worker.is_draining:
            return
        snapshot, load = worker.subscribe(self)
        self.send(self._receive_snapshot, worker, snapshot, load)

    def _receive_snapshot(self, worker: SimulatedWorker, snapshot: KvSnapshot, load: LoadReport) -> None:
        if self._takes_requests(worker):
            self.router.apply_snapshot(worker.worker_id, snapshot)
            self.router.apply_load(worker.worker_id, load, self._clock.now_s)

    def receive_update(self, worker: SimulatedWorker, events: KvEvents | None, load: LoadReport | None) -> None:
        """Apply cache events and a load report; events with a gap lead to a new subscription."""
        if not self._takes_requests(worker):
            return
        if events is not None and not self.router.apply_events(worker.worker_id, events):
            self.send(self._subscribed, worker)
        if load is not None:
            self.router.apply_load(worker.worker_id, load, self._clock.now_s)
            self._load_changed()

    # ---- load that ingresses share through the workers

    def receive_others(self, worker: SimulatedWorker, others: AssignedByOthers) -> None:
        if self.is_connected(worker):
            self._has_others |= others.num_others > 0
            self.router.apply_others(worker.worker_id, others)
            self.assigned_changed()

    def assigned_changed(self) -> None:
        """Report this ingress's assignments soon, where there are other ingresses."""
        if self._has_others:
            self._sharing.request()

    def _share_assigned(self) -> None:
        for worker_id, share in self.router.take_assigned():
            self.send(self.members[worker_id].reports.receive_assigned, self, share)
