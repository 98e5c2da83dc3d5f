"""The engine: one model, one KV pool, one thread. A step: schedule, run, sample, emit.

On a device that computes asynchronously a step is collected when the next one has been launched: see InFlightStep.
Every method is called from the owner's single thread; nothing here imports a network or Ray.
"""

import contextlib
import math
from collections.abc import Callable
from dataclasses import replace

from kvrelay.engine.execution.launch import LayerEvents, StepExecutor, StepLoads
from kvrelay.engine.execution.masks import Constraints, problem_of
from kvrelay.engine.execution.runner import InFlightStep, Runner
from kvrelay.engine.execution.sampler import OutputProcessor, Sampler
from kvrelay.engine.models.decoder import DecoderModel
from kvrelay.engine.scheduling.fair_share import FairShare
from kvrelay.engine.scheduling.groups import Groups
from kvrelay.engine.scheduling.plan import StepPlan
from kvrelay.engine.scheduling.preempt import MeasuredSpeeds, PreemptionMode
from kvrelay.engine.scheduling.scheduler import Scheduler
from kvrelay.engine.scheduling.sequence import Sequence, State
from kvrelay.engine.speculation.speculation import DraftSteps
from kvrelay.engine.step.config import EngineConfig, Extensions, KvCache, Reservation, StepResult
from kvrelay.engine.step.reports import EngineMonitor
from kvrelay.engine.step.requests import Batch, Requests, rejection_message
from kvrelay.grammar.compiler import CompiledGrammar
from kvrelay.kernels.backend import Backend
from kvrelay.kvcache.pool.block_pool import BlockPool
from kvrelay.kvcache.pool.resident_audit import ResidentAudit
from kvrelay.plane.messages import SequenceRequest
from kvrelay.types import BlockId

OnReserved = Callable[[list[Reservation]], object]
_NOTHING = contextlib.nullcontext()


class Engine:
    """Owns the model, the pool and all sequences of one worker: see build.py.

    Of its attributes ten are what its owner reads (config to reports); the others are what a step goes through.
    config: as the pool and the model allow it. extensions.swap_area is probed.
    """

    def __init__(
        self,
        model: DecoderModel,
        backend: Backend,
        cache: KvCache,
        config: EngineConfig,
        extensions: Extensions,
        clock: Callable[[], float],
    ) -> None:
        spec, pool, block_size, budget = model.spec, cache.pool, config.block_size, config.token_budget
        self.tiers, area = extensions.tiers(cache), extensions.swap_area(cache)
        if area is not None:
            area.probe(range(pool.num_blocks))
        max_len = min(spec.max_position, pool.num_blocks * block_size, config.max_model_len or 1 << 62)
        max_running = min(config.max_running, budget)  # each gets a token in every step
        token_bytes = cache.memory.layout.block_bytes / block_size
        self.config = config = replace(config, max_running=max_running, max_model_len=max_len, token_bytes=token_bytes)
        self.model, self.backend, self.cache, self._clock = model, backend, cache, clock
        speeds, eos_ids = MeasuredSpeeds(), tuple(spec.eos_ids)
        self.scheduler = scheduler = Scheduler(
            pool,
            config,
            fair_share=FairShare(config.rules),
            speeds=speeds,
            area=area,
            tiers=self.tiers,
            eos_ids=eos_ids,
        )
        self.runner = runner = Runner(
            model,
            backend,
            cache.storage.layers,
            block_size=block_size,
            max_running=max_running,
            max_blocks=-(-max_len // block_size) + 1,
            max_tokens=budget,
        )
        self.constraints = Constraints(extensions.grammars, eos_ids=eos_ids, vocab_size=spec.vocab_size)
        self.drafts = drafts = DraftSteps(
            pool,
            most=config.draft_tokens,
            token_budget=budget,
            max_model_len=max_len,
            lookup=config.prompt_lookup,
            model=extensions.draft_model,
            lengths=scheduler.headroom.lengths,
        )
        self.batch = batch = Batch(scheduler, runner, drafts)
        may_load = self.tiers is not None or area is not None
        self._loads = loads = StepLoads(scheduler, num_layers=spec.num_layers, may_load=may_load)
        self._outputs = outputs = OutputProcessor(batch.end, clock, eos_ids=eos_ids, max_model_len=max_len)
        groups = Groups(scheduler.queues, scheduler.blocks, pool, batch.end, runner.forget)
        hook = extensions.layer_hook
        self.executor = StepExecutor(
            scheduler,
            runner,
            cache.storage,
            loads,
            Sampler(backend, eos_ids),
            outputs,
            self.constraints,
            groups,
            drafts.note,
            None if hook is None else LayerEvents(hook, num_layers=spec.num_layers),
            backend.asynchronous,
            clock,
        )
        self.requests = Requests(
            scheduler,
            batch,
            groups,
            loads,
            outputs,
            speeds,
            clock,
            vocab_size=spec.vocab_size,
            max_model_len=max_len,
            has_grammars=extensions.grammars is not None,
        )
        self._audit = audit = ResidentAudit(pool, cache.memory.layout.block_bytes, cache.storage.sums)
        self._is_audited = cache.memory.view is not None  # a GPU would have to wait for the checksums
        self.reports = EngineMonitor(scheduler, speeds, drafts, backend, audit, clock)
        self._failed: list[tuple[str, str]] = []  # since the last step

    @property
    def pool(self) -> BlockPool:
        return self.cache.pool

    @property
    def max_model_len(self) -> int:
        """The most tokens that a sequence may have."""
        assert self.config.max_model_len is not None
        return self.config.max_model_len

    @property
    def looks_ahead(self) -> bool:
        """Whether a step may be launched before the one before it is collected."""
        return self.backend.asynchronous is not None

    def close(self) -> None:
        """Close the lower tiers and the swap area. Blocking."""
        try:
            self.settle()
        finally:
            self.constraints.close()
            if (area := self.scheduler.preemption.area) is not None:
                area.close()
            if self.tiers is not None:
                self.tiers.controller.close()

    def max_wait_s(self) -> float | None:
        """How long nothing need be done unless the engine is called otherwise; None: no limit."""
        fetched_s = self.tiers.fetches.next_deadline_s() if self.tiers is not None else None
        until_s = min(self.scheduler.queues.next_deadline_s(), math.inf if fetched_s is None else fetched_s)
        return None if until_s == math.inf else max(0.0, until_s - self._clock())

    # ---- requests: the others are methods of Requests

    def add(
        self,
        request: SequenceRequest,
        *,
        hold: bool = False,
        output_limit: int | None = None,
        grammar: CompiledGrammar | None = None,
    ) -> None:
        """Compute this sequence here. The caller has checked `requests.refusal`.

        grammar: the request's, if it is compiled; else it is compiled here. Raises InvalidRequest.
        """
        constraint = self.constraints.make(request.sampling, grammar) if request.sampling.is_constrained else None
        seq = self.scheduler.add(request, self._clock(), hold=hold, output_limit=output_limit)
        seq.constraint = constraint

    def reserve(
        self, request: SequenceRequest, *, prefill_tokens_per_s: float = 0.0, grammar: CompiledGrammar | None = None
    ) -> None:
        """Queue for blocks; a StepResult brings the Reservation. The caller has checked `requests.refusal`.

        prefill_tokens_per_s: of the worker that will compute it, to which it may be returned; 0: it may not.
        grammar: as in `add`.
        """
        constraint = self.constraints.make(request.sampling, grammar) if request.sampling.is_constrained else None
        seq = self.scheduler.add_reservation(request, self._clock())
        seq.prefill_tokens_per_s, seq.constraint = prefill_tokens_per_s, constraint

    def abort(self, request_id: str) -> bool:
        """Free everything that the request holds. False when it is not here."""
        is_here = self.requests.abort(request_id)
        if self.batch.in_flight is not None and not self.batch.in_flight.is_wanted:
            self.settle()
        return is_here

    # ---- the step

    def step(self, on_reserved: OnReserved | None = None) -> StepResult:
        """Grant reservations, then compute one batch. Cheap when there is nothing to do.

        On a device that computes asynchronously: launch that batch, and collect the one before.

        Args:
            on_reserved: called with the reservations that were granted, before the batch is computed.
        """
        scheduler, batch = self.scheduler, self.batch
        now_s, result = self._clock(), StepResult(self._outputs.take_unsent(), failed=self._failed)
        self._failed = []
        self.pool.tick(now_s)
        if self._is_audited:
            self._audit.sweep(now_s)
        was_in_flight = batch.in_flight is not None
        if was_in_flight and not self._may_look_ahead():
            self._collect(result)
        self._begin(result, now_s, on_reserved)
        with _NOTHING if batch.in_flight is None else batch.in_flight.with_placeholders(self._outputs.is_last):
            plan = self._schedule(result)
            launched = self.executor.launch(plan, now_s, batch.in_flight) if plan.work else None
        if batch.in_flight is not None:
            self._collect(result, launched)
        if launched is None:
            scheduler.blocks.copied()
            result.is_stuck = not (was_in_flight or plan.preempted or result.reservations or result.refused)
            scheduler.check_idle()
            return result
        batch.in_flight = launched
        self.advance(launched)
        if launched.pending is None and launched.is_wanted:
            self.executor.draw_late(launched)
        if launched.pending is None or not launched.is_wanted:
            self._collect(result)
            scheduler.check_idle()
        return result

    def settle(self) -> None:
        """Collect the step in flight, if any: the next step's result has its outputs."""
        if self.batch.in_flight is not None:
            self.batch.in_flight.remove_placeholders()
            result = StepResult()
            self._collect(result)
            self._outputs.send_later(result.outputs)
            self._failed += result.failed

    def _may_look_ahead(self) -> bool:
        scheduler, drafts = self.scheduler, self.drafts
        has_drafts = drafts.is_enabled and not scheduler.groups and drafts.comes_next(scheduler.running)
        return not has_drafts and scheduler.may_look_ahead()

    def _begin(self, result: StepResult, now_s: float, on_reserved: OnReserved | None) -> None:
        """What is due before a step is planned."""
        scheduler = self.scheduler
        if self.tiers is not None:
            self.tiers.controller.poll()
        scheduler.reject_overdue(now_s)
        result.refused = [
            (seq.request_id, reason, rejection_message(seq, reason, now_s)) for seq, reason in scheduler.take_rejected()
        ]
        if (area := scheduler.preemption.area) is not None and area.loading:
            area.poll()
        result.reservations = [_reservation(seq, now_s) for seq in scheduler.grant_reservations()]
        if result.reservations and on_reserved is not None:
            on_reserved(result.reservations)

    def _schedule(self, result: StepResult) -> StepPlan:
        scheduler, in_flight = self.scheduler, self.batch.in_flight
        plan = scheduler.schedule()
        assert in_flight is None or not plan.preempted, "a sequence in flight was preempted"
        plan = self._loads.verified(plan)
        for seq in plan.preempted:
            self.batch.forget(seq)
        if scheduler.preemption.returned:
            result.returned_to_prefill = [seq.request_id for seq in scheduler.preemption.take_returned()]
        if plan.work and self.drafts.is_enabled and in_flight is None and not scheduler.groups:
            plan = self.drafts.widen(plan)
            self.drafts.note_plan(plan)
        return plan

    def advance(self, step: InFlightStep) -> None:
        """The KV of a launched step is as good as there: what follows is computed after it.

        All its tokens are known by now.
        """
        work = step.plan.work
        if self.looks_ahead:  # some may have ended with the step before
            work = tuple(item for item in work if item.seq.state is State.RUNNING)
        if step.plan.num_drafted:
            work = tuple(item for item in work if not item.drafts)
        self.scheduler.advance(*work)

    def _collect(self, result: StepResult, launched: InFlightStep | None = None) -> None:
        """Take the tokens of the step in flight. launched: the one behind it, which is in flight from now on."""
        step, self.batch.in_flight = self.batch.in_flight, launched
        assert step is not None
        outputs = self.executor.collect(step)
        result.outputs += outputs
        if self._outputs.broken:
            result.failed += self._end_broken()
        self.reports.record(step, len(outputs), result)

    def _end_broken(self) -> list[tuple[str, str]]:
        """End requests with a sequence whose constraint has a problem; returns (request, problem)."""
        broken, self._outputs.broken = self._outputs.broken, []
        failed = {seq.stream_id: problem_of(seq) for seq in broken}
        for request_id in failed:
            self.requests.abort(request_id)
        return list(failed.items())

    def preempt(self, group: tuple[Sequence, ...]) -> PreemptionMode:
        """Preempt these running sequences between two steps, but for those that end with the last one."""
        self.settle()
        group = tuple(seq for seq in group if seq.state is State.RUNNING)
        for seq in group:
            self.batch.forget(seq)
        return self.scheduler.preempt_group(group)

    def take_probe_blocks(self, count: int) -> list[BlockId]:
        """Up to `count` free blocks for a probe, filled with noise; see SequenceBlocks.take_probe_blocks."""
        blocks = self.scheduler.blocks.take_probe_blocks(count)
        try:
            self.cache.storage.fill_with_noise(blocks)
        except BaseException:
            self.scheduler.blocks.return_probe_blocks(blocks)
            raise
        return blocks

    def check(self) -> None:
        """Raise AssertionError unless every block is accounted for."""
        self.scheduler.check()
        self.drafts.check(self.scheduler.running)
        if self.tiers is not None:
            self.tiers.controller.check()

    def reset_cache(self) -> int:
        """Drop cached blocks without a holder, in memory but not in stores; returns how many of the pool's."""
        if self.tiers is not None:
            self.tiers.controller.reset()
        return self.pool.reset_cache()


def _reservation(seq: Sequence, now_s: float) -> Reservation:
    first, count = seq.num_held_blocks, seq.blocks_for(seq.num_tokens)
    blocks = tuple(map(BlockId, seq.blocks[first:count]))
    return Reservation(seq.request_id, first, count, blocks, seq.num_cached, now_s - seq.arrived_s)
