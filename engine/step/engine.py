"""The engine: one model, one KV pool, one thread. Schedule, run, sample, advance.

On a device that computes by itself a step is collected when the next one has been launched: see flight.py.
Every method is called from the owner's single thread; nothing here knows of networks or Ray.
"""

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from kvrelay import __version__
from kvrelay.engine.checkpoints.checkpoint import model_digest
from kvrelay.engine.groups.beam import BeamCandidates
from kvrelay.engine.groups.beam_candidates import likeliest
from kvrelay.engine.groups.group_steps import GroupSteps
from kvrelay.engine.models.decoder import DecoderModel, load_model
from kvrelay.engine.scheduling.fair_share import QueueRules
from kvrelay.engine.scheduling.preemption_policy import PreemptionMode
from kvrelay.engine.scheduling.request_checks import rejection_message, request_fault
from kvrelay.engine.scheduling.scheduler import Scheduled, Scheduler, SchedulerLimits, StepPlan
from kvrelay.engine.scheduling.sequence import Sequence, State
from kvrelay.engine.scheduling.tier_requests import LowerTiers
from kvrelay.engine.speculation.speculation_steps import DraftModelProtocol, DraftSteps
from kvrelay.engine.step.in_flight import InFlightStep, sampled
from kvrelay.engine.step.layer_events import LayerEvents, LayerHook
from kvrelay.engine.step.load_report import load_report
from kvrelay.engine.step.lookahead import Outlook, may_look_ahead
from kvrelay.engine.step.outputs import OutputProcessor, with_first_token_facts
from kvrelay.engine.step.runner import Runner
from kvrelay.engine.step.sampler import Sampler, token_logprobs
from kvrelay.engine.step.step_timing import StepTiming
from kvrelay.engine.worker.memory import pool_bytes
from kvrelay.engine.worker.preflight import num_blocks_for
from kvrelay.hashing import HASH_SEED
from kvrelay.kernels.async_backend import AsyncBackend, PendingTokens
from kvrelay.kernels.backend import Backend, KvOrder
from kvrelay.kernels.common.quant_scheme import Scheme
from kvrelay.kvcache.eviction.registry import make_policy
from kvrelay.kvcache.memory.storage import DTYPES, KV_DTYPES, KvStorage
from kvrelay.kvcache.memory.swap import SwapArea, SwapLoad
from kvrelay.kvcache.pool.block_pool import BlockPool
from kvrelay.kvcache.tiers.events import EventLog
from kvrelay.plane.messages import (
    PROTOCOL_VERSION,
    KvEvents,
    KvSnapshot,
    LoadReport,
    SequenceRequest,
    TokenLogprob,
    TokenOutput,
)
from kvrelay.types import BlockId, Fingerprint, FinishReason, KvLayout, KvMemory

logger = logging.getLogger(__name__)

_NOTHING = contextlib.nullcontext()
_PROMPT_LOGPROB_ROWS = 64  # logits of a whole chunk at once would be 100 MB at vocabularies of 50k and 512 tokens


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What an engine needs to know. Memory is bytes, the rest tokens and sequences."""

    block_size: int = 16
    kv_layout: KvOrder = "NHD"
    kv_memory_bytes: int = 256 << 20
    kv_memory_share: float | None = None  # of what is free once the weights are loaded, instead of `kv_memory_bytes`
    num_workers: int = 1  # of this machine, which share its memory
    kv_dtype: str = "auto"  # the model's, or a key of KV_DTYPES
    quantization: Scheme | None = None  # of the products' weights
    token_budget: int = 512
    max_running: int = 64
    max_waiting: int = 256
    max_model_len: int | None = None
    prefix_caching: bool = True
    policy: str = "lru"  # of eviction: see kvcache/eviction/registry.py
    rules: QueueRules = field(default_factory=QueueRules)  # who is next in line
    preemption: str = "auto"  # the cheapest way, or always that PreemptionMode where it can be gone
    headroom: float = 0.0  # see SchedulerLimits
    cascade: bool = True  # decode rows read blocks that they share once, where it pays
    draft_tokens: int = 0  # at most, behind a sequence's next token in a step; 0: no speculation
    warm_up: bool = False  # on a GPU, choose kernels and capture graphs before the first request
    prompt_lookup: bool = True  # drafts from a sequence's own text


@dataclass(frozen=True, slots=True)
class Reservation:
    """Blocks promised to a transfer. `target_blocks` are for blocks first_block .. num_blocks - 1 of the prompt."""

    request_id: str
    first_block: int
    num_blocks: int
    target_blocks: tuple[BlockId, ...]
    held_tokens: int
    waited_s: float


@dataclass(slots=True)
class StepResult:
    """What a call of `step` brought about. Tokens and seconds are those of the steps that were collected in it.

    seconds: from a step's launch, or the end of the one before if that was later, until its tokens were here.
    """

    outputs: list[TokenOutput] = field(default_factory=list)
    reservations: list[Reservation] = field(default_factory=list)
    refused: list[tuple[str, str, str]] = field(default_factory=list)  # out of the line: (request, reason, message)
    returned_to_prefill: list[str] = field(
        default_factory=list
    )  # requests that end here, to go on from a prefill worker
    num_tokens: int = 0
    num_decode: int = 0
    seconds: float = 0.0
    waited_s: float = 0.0  # of the host, for a device that computes by itself
    ahead_s: float = 0.0  # of the host, at the next step meanwhile
    is_stuck: bool = False  # nothing was done, and nothing can be until somebody acts on the engine
    events: KvEvents | None = None
    load: LoadReport | None = None


class Engine:
    """Owns the model, the pool and all sequences of one worker."""

    def __init__(
        self,
        model: DecoderModel,
        backend: Backend,
        config: EngineConfig,
        *,
        model_digest: str = "",
        layer_hook: LayerHook | None = None,
        layers_per_hook: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.model, self.backend, self.config = model, backend, config
        self._clock = clock
        shape, spec = model.attention_shape, model.spec
        compute_dtype = next(name for name, value in DTYPES.items() if value is shape.dtype)
        dtype = next(name for name, value in KV_DTYPES.items() if value is shape.kv_dtype)
        layout = KvLayout(
            spec.num_layers, 1, config.block_size, shape.num_kv_heads, shape.head_dim, dtype, order=config.kv_layout,
            is_latent=shape.latent_dim is not None,
        )  # fmt: skip
        num_blocks = num_blocks_for(config.kv_memory_bytes, layout.block_bytes)
        layout = replace(layout, num_blocks=num_blocks)
        self.storage = KvStorage(layout, backend.device)
        self.max_model_len = min(spec.max_position, num_blocks * config.block_size, config.max_model_len or 1 << 62)
        self.fingerprint = Fingerprint(
            PROTOCOL_VERSION,
            model_digest,
            dtype,
            config.block_size,
            layout.model_layers,
            layout.model_kv_heads,
            shape.head_dim,
            HASH_SEED,
            order=layout.order,
            tensor_parallel=layout.model_kv_heads // layout.num_kv_heads,
            versions=versions(),
            compute_dtype=compute_dtype,
            num_parts=layout.num_parts,
            quantization=str(config.quantization or "none"),
        )
        self.pool = BlockPool(
            num_blocks, block_size=config.block_size, prefix_caching=config.prefix_caching,
            policy=make_policy(config.policy, num_blocks),
        )  # fmt: skip
        self.max_running = min(config.max_running, config.token_budget)  # each gets a token in every step
        limits = SchedulerLimits(config.token_budget, self.max_running, config.max_waiting, config.headroom)
        self.scheduler = Scheduler(self.pool, config.block_size, limits, config.rules)
        step = layers_per_hook or max(1, -(-spec.num_layers // 4))
        self._layer_events = (
            None
            if layer_hook is None
            else LayerEvents(layer_hook, self.scheduler, num_layers=spec.num_layers, step=step)
        )
        self.scheduler.preemptor.token_bytes = layout.block_bytes / config.block_size
        self.scheduler.preemptor.only = None if config.preemption == "auto" else PreemptionMode(config.preemption)
        self._runner = Runner(
            model, backend, self.storage.layers,
            block_size=config.block_size, max_running=config.max_running, max_blocks=-(-self.max_model_len // config.block_size) + 1,
            max_tokens=config.token_budget,
        )  # fmt: skip
        backend.share_prefixes(enabled=config.cascade)
        self._sampler = Sampler(backend, tuple(spec.eos_ids))
        self._output_processor = OutputProcessor(
            self._end, clock, eos_ids=spec.eos_ids, max_model_len=self.max_model_len
        )
        self.scheduler.groups.eos_ids = tuple(spec.eos_ids)
        self._groups = GroupSteps(self.scheduler, self._end, self._runner.forget)
        self.drafts = DraftSteps(
            self.pool, most=config.draft_tokens, token_budget=config.token_budget, max_model_len=self.max_model_len,
            lookup=config.prompt_lookup,
        )  # fmt: skip
        self._events = EventLog()
        self._speed = StepTiming()
        self._load_seq = 0
        self._unsent: list[TokenOutput] = []  # ends that no step brought about
        self._ahead = backend if isinstance(backend, AsyncBackend) else None
        self._in_flight: InFlightStep | None = None  # launched, to be collected
        self._collected_s = -math.inf
        self.on_reserved: Callable[[list[Reservation]], object] | None = None  # told before the step is computed

    @property
    def memory(self) -> KvMemory:
        return self.storage.memory

    @property
    def looks_ahead(self) -> bool:
        """Whether a step may be launched before the one before it is collected."""
        return self._ahead is not None

    @property
    def tiers(self) -> LowerTiers | None:
        """What lies below the pool."""
        return self.scheduler.tiers

    def warm_up(self) -> None:
        """What a GPU's first steps would stop for: before any request, and before anything is in the KV pool."""
        self._runner.warm_up()

    def attach(self, tiers: LowerTiers) -> None:
        """Keep KV below the pool, too. Before the first request."""
        self.scheduler.tiers = tiers

    def attach_swap(self, area: SwapArea) -> None:
        """Where pre-empted sequences' KV may go: started, and closed by `close`. Before the first request."""
        area.probe(range(self.pool.num_blocks))
        self.scheduler.preemptor.area = area

    def attach_draft_model(self, model: DraftModelProtocol) -> None:
        """It drafts tokens from now on. Before the first request."""
        self.drafts.attach(model, self.scheduler.lengths)

    def close(self) -> None:
        """Let go of the tiers below the pool and of the swap area. Blocking."""
        try:
            self.settle()
        finally:
            if (area := self.scheduler.preemptor.area) is not None:
                area.close()
            if self.tiers is not None:
                self.tiers.tiers.close()

    def max_wait_s(self) -> float | None:
        """How long nothing need be done unless somebody acts on the engine; None: for ever."""
        fetched_s = self.tiers.tiers.next_deadline_s() if self.tiers is not None else None
        until_s = min(self.scheduler.next_deadline_s(), math.inf if fetched_s is None else fetched_s)
        return None if until_s == math.inf else max(0.0, until_s - self._clock())

    # ---- requests

    def refusal(self, request: SequenceRequest) -> tuple[str, str] | None:
        """(reason, message) when this request cannot be taken, else None."""
        if len(request.token_ids) >= self.max_model_len + (request.sampling.max_tokens <= 1):
            return "too_long", f"{len(request.token_ids)} tokens, but the longest sequence is {self.max_model_len}"
        if request.group is not None and request.group.beams is not None:
            longest = len(request.token_ids) + request.sampling.max_tokens
            if longest > self.max_model_len:
                return "too_long", f"up to {longest} tokens, but the longest sequence is {self.max_model_len}"
        fault = request_fault(request, self.config.block_size, self.model.spec.vocab_size)
        return ("invalid", fault) if fault is not None else self.scheduler.refusal(request)

    def add(self, request: SequenceRequest, *, hold: bool = False, output_limit: int | None = None) -> None:
        """Compute this sequence here. The caller has checked `refusal`."""
        self.scheduler.add(request, self._clock(), hold=hold, output_limit=output_limit)

    def reserve(self, request: SequenceRequest, *, prefill_tokens_per_s: float = 0.0) -> None:
        """Put in line for blocks; a StepResult brings the Reservation. The caller has checked `refusal`.

        prefill_tokens_per_s: of the worker that will compute it, to which it may be handed back; 0: it may not.
        """
        self.scheduler.add_reservation(request, self._clock()).prefill_tokens_per_s = prefill_tokens_per_s

    def note_transfer_speed(self, bytes_per_s: float, latency_s: float) -> None:
        """How fast KV comes from prefill workers: for the choice of what becomes of a pre-empted sequence."""
        measured = self.scheduler.preemptor.measured
        measured.transfer_bytes_per_s, measured.transfer_latency_s = bytes_per_s, latency_s

    def activate(self, request_id: str, token_ids: list[int], candidates: Rows[tuple[int, float]] = ()) -> bool:
        """The reservation's blocks hold the prompt's KV. False when the sequence is no longer here.

        token_ids: the first token; of a group, each live choice's. candidates: of a beam search, what may follow the prompt.
        """
        is_group = request_id in self.scheduler.groups.by_id
        seq = self.scheduler.activate(request_id, [] if is_group else token_ids)
        if seq is None:
            return False
        if is_group:
            self._take_over(seq, token_ids, list(candidates))
            return True
        self._end_if_too_long([seq])
        return True

    def _take_over(self, leader: Sequence, token_ids: list[int], candidates: BeamCandidates) -> None:
        """A group's prompt has arrived. Its members begin at once, so what comes from below the pool is waited for here."""
        group, load = leader.group, leader.load
        assert group is not None
        if load is not None:
            is_good = load.wait_verified() and load.wait_layer(self.model.spec.num_layers - 1)
            if not is_good:
                self.scheduler.rewind(leader)
                self._require_tiers().tiers.discard_load(load)
                return
            self._require_tiers().settle(leader)
            self.scheduler.cache_received(leader)
        if group.search is None:
            self._end_if_too_long(self._groups.take_over(leader, token_ids))
        else:
            outputs = self._groups.begin_search(group, leader, candidates)
            self._unsent += [output for output in outputs if output.finish_reason is not None]

    def _end_if_too_long(self, seqs: list[Sequence]) -> None:
        self._unsent += [end for seq in seqs if (end := self._output_processor.end_if_too_long(seq)) is not None]

    def pin_ahead(self, seq: Sequence, num_in_pool: int, ttl_s: float) -> None:
        """Keep a prompt's first blocks, which are in the pool, for a request that is yet to come."""
        self.pool.tick(self._clock())
        self.scheduler.pinning.pin_ahead(seq, num_in_pool, ttl_s)

    def end_pins(self, session: str) -> None:
        """The pins made for this session end now, and none is made for it any more."""
        self.pool.tick(self._clock())
        self.scheduler.pinning.end(session)

    def abort(self, request_id: str) -> bool:
        """Free everything that the sequence holds. False when it is not here."""
        seqs = self._sequences_of(request_id)
        for seq in seqs:
            self._end(seq, FinishReason.ABORT)
        if self._in_flight is not None and not self._in_flight.is_wanted:
            self.settle()
        return bool(seqs)

    def _sequences_of(self, request_id: str) -> list[Sequence]:
        if (group := self.scheduler.groups.by_id.get(request_id)) is not None and group.leader is None:
            return list(group.members)
        seq = self.scheduler.sequences.get(request_id)
        return [] if seq is None else [seq]

    def abort_choice(self, request_id: str, choice: int) -> None:
        """Nobody waits for this choice of a group any more."""
        group = self.scheduler.groups.by_id.get(request_id)
        if group is None or group.search is not None:
            return
        if group.leader is not None:
            group.unwanted.add(choice)
        for member in [member for member in group.members if member.choice == choice]:
            self._end(member, FinishReason.ABORT)

    def preempt(self, group: tuple[Sequence, ...]) -> PreemptionMode:
        """Take these running sequences off the batch, between two steps; those that end with the last one apart."""
        self.settle()
        group = tuple(seq for seq in group if seq.state is State.RUNNING)
        for seq in group:
            self._forget(seq)
        return self.scheduler.preempt_group(group)

    def quarantine(self, request_id: str) -> int | None:
        """Like abort for a receiving sequence, but its blocks stay taken until `unquarantine` of the key."""
        seq = self.scheduler.receiving.get(request_id)
        return None if seq is None else self.scheduler.quarantine(seq, FinishReason.ERROR)

    def unquarantine(self, key: int) -> None:
        self.scheduler.unquarantine(key)

    def take_probe_blocks(self, count: int) -> list[BlockId]:
        """Up to `count` free blocks, filled with numbers that mean nothing; see Scheduler.take_probe_blocks."""
        blocks = self.scheduler.take_probe_blocks(count)
        try:
            self.storage.fill_with_noise(blocks)
        except BaseException:
            self.scheduler.return_probe_blocks(blocks)
            raise
        return blocks

    def return_probe_blocks(self, blocks: Iterable[BlockId]) -> None:
        """Lent blocks may be used again."""
        self.scheduler.return_probe_blocks(blocks)

    def _end(self, seq: Sequence, reason: FinishReason) -> None:
        if self._in_flight is not None:
            self._in_flight.keep(seq, self.scheduler)
        self._forget(seq)
        self.scheduler.finish(seq, reason)

    def _forget(self, seq: Sequence) -> None:
        """It is off the batch."""
        self._runner.forget(seq)
        self.drafts.forget(seq)

    # ---- the step

    def step(self) -> StepResult:
        """Grant reservations, then compute one batch. Cheap when there is nothing to do.

        On a device that computes by itself: launch that batch and bring the one before.
        """
        result = StepResult()
        now_s = self._clock()
        self.pool.tick(now_s)
        self._send_unsent(result)
        is_under_way = self._in_flight is not None
        if is_under_way and not self._may_look_ahead():
            self._collect(result)
        self._begin(result, now_s)
        with _NOTHING if self._in_flight is None else self._in_flight.shown(self._output_processor.is_last):
            plan = self._plan(result)
            launched = self._launch(plan, now_s) if plan.work else None
        self._send_unsent(result)
        if self._in_flight is not None:
            result.ahead_s = self._clock() - now_s
            self._collect(result, launched)
        if launched is None:
            self.scheduler.copied()
            result.is_stuck = not (is_under_way or plan.preempted or result.reservations or result.refused)
            return result
        self._in_flight = launched
        self._advance(launched)
        if launched.pending is None or not launched.is_wanted:
            self._collect(result)
        return result

    def _send_unsent(self, result: StepResult) -> None:
        if self._unsent:
            result.outputs += self._unsent
            self._unsent = []

    def settle(self) -> None:
        """Collect the step that is under way, if any: the next one brings its outputs."""
        if self._in_flight is not None:
            self._in_flight.hide()
            result = StepResult()
            self._collect(result)
            self._unsent += result.outputs

    def _may_look_ahead(self) -> bool:
        scheduler = self.scheduler
        running, groups = scheduler.running, len(scheduler.groups.by_id)
        drafts = bool(self.config.draft_tokens) and not groups and self.drafts.comes_next(running)
        return may_look_ahead(Outlook(len(running), self.pool.num_available, len(scheduler.swapped), groups, drafts))

    def _begin(self, result: StepResult, now_s: float) -> None:
        """What is due before anything is planned."""
        if self.tiers is not None:
            self.tiers.tiers.poll()
        self.scheduler.reject_overdue(now_s)
        result.refused = self._rejections(now_s)
        if (area := self.scheduler.preemptor.area) is not None:
            area.poll()
        for seq in self.scheduler.grant_reservations():
            result.reservations.append(self._reservation(seq, now_s))
        if result.reservations and self.on_reserved is not None:
            self.on_reserved(result.reservations)

    def _plan(self, result: StepResult) -> StepPlan:
        plan = self.scheduler.schedule()
        assert self._in_flight is None or not plan.preempted, "what is being computed was taken away: see lookahead.py"
        plan = self._verified(plan)
        for seq in plan.preempted:
            self._forget(seq)
        result.returned_to_prefill = [seq.request_id for seq in self.scheduler.returned_to_prefill]
        self.scheduler.returned_to_prefill.clear()
        if plan.work and self.config.draft_tokens and self._in_flight is None and not self.scheduler.groups.by_id:
            plan = self.drafts.widen(plan)
            self.drafts.note_plan(plan)
        return plan

    def _launch(self, plan: StepPlan, now_s: float) -> InFlightStep:
        """Have a plan computed, and its tokens drawn, too, where that needs nothing that is not known yet."""
        others = [item for item in plan.work if not item.seq.plain_until]
        for item in others:
            seq = item.seq
            seq.num_chunks += 1
            if seq.scheduled_s is None:
                seq.scheduled_s = now_s
                if self._layer_events is not None:
                    self._layer_events.announce_cached(item)
        flight = InFlightStep(plan, *sampled(plan), now_s)
        try:
            self._copy_blocks(flight)
            drawn = self._in_flight.drawn() if self._in_flight is not None else None
            on_layer = None if self._layer_events is None else self._layer_events.on_layer(plan)
            hidden = self._runner.run(plan, on_layer, self._before_layer(plan), drawn)
            self._settle_loads(plan)
            wants_prompt_logprobs = any(item.seq.request.sampling.prompt_logprobs is not None for item in others)
            if self._ahead is not None and not wants_prompt_logprobs and self._draws_alone(flight):
                flight.pending = self._ahead.pending(self._draw(flight, hidden))
            else:
                flight.hidden, flight.wants_prompt_logprobs = hidden, wants_prompt_logprobs
        except BaseException:
            flight.let_go(self.scheduler)
            raise
        return flight

    def _draws_alone(self, flight: InFlightStep) -> bool:
        """Whether its tokens are drawn from its logits alone, and nothing else is wanted of them."""
        if flight.plan.num_drafted or self.scheduler.groups.by_id:
            return False
        return self._sampler.wants_tokens_alone(flight.seqs)

    def _draw(self, flight: InFlightStep, hidden: Tensor) -> Tensor:
        """One token for each of its rows, [R] int64 on the device."""
        if not flight.rows:
            return _none_drawn(hidden)
        return self._sampler.draw(self._runner.logits(hidden, flight.rows), flight.seqs)

    def _advance(self, flight: InFlightStep) -> None:
        """The KV of a launched step is as good as there: what follows is computed after it. Its tokens are all known by now."""
        work = flight.plan.work
        if self._ahead is not None:  # some may have ended with the step before
            work = tuple(item for item in work if item.seq.state is State.RUNNING)
        if flight.plan.num_drafted:
            work = tuple(item for item in work if not item.drafts)
        self.scheduler.advance(*work)

    def _collect(self, result: StepResult, launched: InFlightStep | None = None) -> None:
        """Take the tokens of the step that is under way. launched: the one behind it, which is under way from now on."""
        flight, self._in_flight = self._in_flight, launched
        assert flight is not None
        num_outputs = len(result.outputs)
        try:
            if flight.pending is None:
                self._sample(flight, result)
            else:
                self._take(flight, self._wait(flight.pending, result), result)
        finally:
            flight.let_go(self.scheduler)
        self._note(flight, result, len(result.outputs) - num_outputs)

    def _wait(self, pending: PendingTokens, result: StepResult) -> list[int]:
        begin_s = self._clock()
        tokens = pending.wait()
        result.waited_s += self._clock() - begin_s
        return tokens

    def _take(self, flight: InFlightStep, tokens: list[int], result: StepResult) -> None:
        """Tokens that were drawn at the step's launch. A sequence that has gone meanwhile is told nothing."""
        drawn = [pair for pair in zip(flight.seqs, tokens, strict=True) if pair[0].state is State.RUNNING]
        seqs = [seq for seq, _ in drawn]
        self._output_processor.append_all(seqs, [token for _, token in drawn], [None] * len(seqs), result.outputs)

    def _note(self, flight: InFlightStep, result: StepResult, num_outputs: int) -> None:
        """What a step took, for whoever wants to predict the next one."""
        plan, now_s = flight.plan, self._clock()
        seconds = now_s - max(flight.launched_s, self._collected_s)
        self._collected_s = now_s
        num_tokens, num_decode = plan.num_tokens, plan.num_decode
        result.num_tokens += num_tokens
        result.num_decode += num_decode
        result.seconds += seconds
        self._speed.note_batch(len(plan.work), num_tokens)
        if plan.num_drafted:
            self._speed.observe_drafted(len(plan.work), num_outputs, seconds)
        else:
            self._speed.observe(num_tokens, num_decode, seconds)
        if self.config.draft_tokens:
            self.drafts.note_step(plan, seconds)
        self.scheduler.preemptor.measured.compute_tokens_per_s = self._speed.compute_tokens_per_s
        if self.tiers is not None:
            self.tiers.tiers.observe_prefill_speed(self._speed.prefill_tokens_per_s)
            self.tiers.end_step(self.pool)

    def _rejections(self, now_s: float) -> list[tuple[str, str, str]]:
        told, self.scheduler.rejected = self.scheduler.rejected, []
        return [(seq.request_id, reason, rejection_message(seq, reason, now_s)) for seq, reason in told]

    def _verified(self, plan: StepPlan) -> StepPlan:
        """Without the sequences whose blocks below the pool turned out to be corrupt: those begin anew."""
        if not self._may_load:
            return plan
        bad = {id(item.seq) for item in plan.work if item.seq.load is not None and not item.seq.load.wait_verified()}
        if not bad:
            return plan
        rewound = tuple(item.seq for item in plan.work if id(item.seq) in bad)
        for seq in rewound:
            logger.warning("request %s: its saved blocks are of no use; they are computed anew", seq.request_id)
            load = seq.load
            self.scheduler.rewind(seq)
            if load is not None and not isinstance(load, SwapLoad):
                self._require_tiers().tiers.discard_load(load)
        return StepPlan(
            tuple(item for item in plan.work if id(item.seq) not in bad),
            sum(1 for item in plan.work[: plan.num_single] if id(item.seq) not in bad),
            plan.preempted + rewound,
            tuple(copy for copy in plan.copies if id(copy.seq) not in bad),
        )

    def _before_layer(self, plan: StepPlan) -> Callable[[int], None] | None:
        """Waits until a layer's KV from below the pool is in place; None when none is on its way."""
        if not self._may_load:
            return None
        last = self.model.spec.num_layers - 1
        loads = [load for item in plan.work if (load := item.seq.load) is not None and not load.has_layer(last)]
        if not loads:
            return None

        def before_layer(layer: int) -> None:
            for load in loads:
                if not load.wait_layer(layer):
                    raise RuntimeError("KV from host memory stopped half-way")

        return before_layer

    def _settle_loads(self, plan: StepPlan) -> None:
        if self._may_load:
            for item in plan.work:
                if item.seq.load is not None:
                    LowerTiers.settle(item.seq)

    @property
    def _may_load(self) -> bool:
        """Whether a sequence's blocks may be on their way, from below the pool or from where they were swapped to."""
        return self.tiers is not None or self.scheduler.preemptor.area is not None

    def _require_tiers(self) -> LowerTiers:
        assert self.tiers is not None
        return self.tiers

    def _copy_blocks(self, flight: InFlightStep) -> None:
        if copies := flight.plan.copies:
            for copy in copies:
                self._runner.forget(copy.seq)  # its row of the block table names the shared block
            flight.keep_blocks((copy.source for copy in copies), self.scheduler)
            self.storage.copy_blocks([(copy.source, copy.target) for copy in copies])
        self.scheduler.copied()

    def _reservation(self, seq: Sequence, now_s: float) -> Reservation:
        first, count = seq.num_held_blocks, seq.blocks_for(seq.num_tokens)
        return Reservation(
            seq.request_id,
            first,
            count,
            tuple(map(BlockId, seq.blocks[first:count])),
            seq.num_cached,
            now_s - seq.arrived_s,
        )

    def _sample(self, flight: InFlightStep, result: StepResult) -> None:
        """Draw the tokens of a step that has waited for what came before it."""
        plan, rows, seqs, hidden = flight.plan, flight.rows, flight.seqs, flight.hidden
        assert hidden is not None
        if flight.wants_prompt_logprobs:
            self._collect_prompt_logprobs(plan, hidden)
        if self._ahead is not None and not plan.num_drafted:  # some may have ended with the step before
            pairs = [pair for pair in zip(rows, seqs, strict=True) if pair[1].state is State.RUNNING]
            rows, seqs = [row for row, _ in pairs], [seq for _, seq in pairs]
        if not rows:
            if self._ahead is not None:  # whatever the step uses may go to others next
                self._wait(self._ahead.pending(_none_drawn(hidden)), result)
            return
        logits = self._runner.logits(hidden, rows)
        if plan.num_drafted:
            self._sample_drafted(plan, seqs, logits, result)
        elif self.scheduler.groups.by_id:
            self._sample_groups(seqs, logits, result)
        else:
            tokens, logprobs = self._sampler.sample(logits, seqs)
            self._output_processor.append_all(seqs, tokens, logprobs, result.outputs)

    def _sample_groups(self, seqs: list[Sequence], logits: Tensor, result: StepResult) -> None:
        """Some of these sequences may be a group's."""
        draws = self._groups.rows_of(seqs)
        if len(draws) != len(seqs) or any(seq.group is not None for seq in seqs):
            drawn = logits[torch.tensor([row for row, _ in draws], dtype=torch.int64, device=logits.device)]
        else:
            drawn = logits
        if draws:
            members = [seq for _, seq in draws]
            tokens, logprobs = self._sampler.sample(drawn, members)
            self._output_processor.append_all(members, tokens, logprobs, result.outputs)
        now_s = self._clock()
        leaders = [seq for seq in seqs if seq.group is not None and seq is seq.group.leader]
        for output in self._groups.advance_beams(seqs, lambda rows, beams: likeliest(logits[rows], beams)):
            leader = next((seq for seq in leaders if seq.request_id == output.request_id), None)
            result.outputs.append(output if leader is None else with_first_token_facts(output, leader, now_s))
        self._groups.settle(leaders)

    def _sample_drafted(self, plan: StepPlan, seqs: list[Sequence], logits: Tensor, result: StepResult) -> None:
        """Each row draws what it would draw if all drafts before it were right; the first that was not ends its sequence's step.

        So the tokens are those of plain steps, one by one: see `uniform`.
        """
        items = [item for item in plan.work if item.samples]
        ahead = [index for item in items for index in range(1 + len(item.drafts))]
        tokens, logprobs = self._sampler.sample(logits, seqs, ahead)
        begin = 0
        for item in items:
            end = begin + 1 + len(item.drafts)
            if item.drafts:
                self.take_drafted(item, tokens[begin:end], logprobs[begin:end], result.outputs)
            else:
                self._output_processor.append_all([item.seq], tokens[begin:end], logprobs[begin:end], result.outputs)
            begin = end

    def take_drafted(
        self, item: Scheduled, tokens: list[int], logprobs: list[TokenLogprob | None], outputs: list[TokenOutput]
    ) -> None:
        """Append a sequence's next token and those behind right drafts. tokens, logprobs: of its rows."""
        seq, num_accepted = item.seq, 0
        for index, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
            self.scheduler.advance(Scheduled(seq, item.start + index, 1))
            self._output_processor.append_all([seq], [token], [logprob], outputs)
            if index == len(item.drafts) or token != item.drafts[index]:
                break
            num_accepted += 1
            if seq.state is not State.RUNNING:
                break
        self.drafts.note(item, num_accepted)

    def _collect_prompt_logprobs(self, plan: StepPlan, hidden: Tensor) -> None:
        begin = 0
        for item in plan.work:
            count = item.seq.request.sampling.prompt_logprobs
            if count is None:
                begin += item.num_tokens
                continue
            last = min(item.start + item.num_tokens, item.seq.request.num_prompt_tokens - 1)
            is_done = item.seq.num_output > item.seq.request.num_output_tokens  # sent, before a pre-emption
            if item.start < last and not is_done:
                targets = item.seq.token_ids[item.start + 1 : last + 1]
                for offset in range(0, len(targets), _PROMPT_LOGPROB_ROWS):
                    part = targets[offset : offset + _PROMPT_LOGPROB_ROWS]
                    rows = list(range(begin + offset, begin + offset + len(part)))
                    logits = self._runner.logits(hidden, rows)
                    item.seq.prompt_logprobs += token_logprobs(logits, part, [count] * len(part))
            begin += item.num_tokens

    # ---- what others may know

    def drain_events(self) -> KvEvents | None:
        """What changed in the prefix cache since the last call."""
        return self._events.drain(self.pool, self.tiers.tiers.drain_changes() if self.tiers is not None else ())

    def snapshot(self) -> KvSnapshot:
        """The prefix cache as of the last drained event."""
        return self._events.snapshot()

    def audit(self, hashes: list[bytes]) -> tuple[int, list[int]]:
        """(the last drained event, where each of these is in truth); see `Audited`."""
        return self._events.audit(hashes, self.pool, self.tiers.tiers.host.index if self.tiers is not None else None)

    def load(self) -> LoadReport:
        """This engine's load now; the transfer fields are the worker's to fill."""
        self._load_seq += 1
        return load_report(
            self._load_seq, self.scheduler, self._speed, self.drafts.load(), self.backend.cascade_saved_tokens
        )

    def check(self) -> None:
        """Raise AssertionError unless every block is accounted for."""
        self.scheduler.check()
        self.drafts.check(self.scheduler.running)
        if self.tiers is not None:
            self.tiers.tiers.check()

    def reset_cache(self) -> int:
        """Forget cached blocks that nobody holds, in memory, not those in stores; returns how many of the pool's."""
        if self.tiers is not None:
            self.tiers.tiers.reset()
        return self.pool.reset_cache()


def _none_drawn(hidden: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.int64, device=hidden.device)


def versions() -> str:
    """Of what computes KV and hashes: see Fingerprint. torch's build (CPU, CUDA) and patch are left out."""
    return f"kvrelay {__version__}, torch {'.'.join(torch.__version__.split('.')[:2])}"


def load_engine(
    folder: Path,
    backend: Backend,
    dtype: torch.dtype,
    config: EngineConfig,
    *,
    layer_hook: LayerHook | None = None,
    layers_per_hook: int = 0,
) -> Engine:
    """An engine for the checkpoint in a prepared folder. Raises ModelError, ConfigError."""
    kv_dtype = dtype if config.kv_dtype == "auto" else KV_DTYPES[config.kv_dtype]
    model = load_model(
        folder, backend, dtype, block_size=config.block_size, kv_layout=config.kv_layout, kv_dtype=kv_dtype,
        quantization=config.quantization,
    )  # fmt: skip
    if config.kv_memory_share is not None:
        budget = pool_bytes(config.kv_memory_share, backend.device, config.num_workers)
        logger.info("KV pool: %.0f MiB, %.0f%% of the free memory", budget / (1 << 20), 100 * config.kv_memory_share)
        config = replace(config, kv_memory_bytes=budget)
    engine = Engine(
        model,
        backend,
        config,
        model_digest=model_digest(folder),
        layer_hook=layer_hook,
        layers_per_hook=layers_per_hook,
    )
    if config.warm_up:
        engine.warm_up()
    return engine
