"""The engine: one model, one KV pool, one thread. Schedule, run, sample, advance.

Every method is called from the owner's single thread; nothing here knows of networks or Ray.
"""

import logging
import math
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch
from torch import Tensor

from kvrelay import __version__
from kvrelay.engine.admission import request_fault, why_turned_away
from kvrelay.engine.beam import Candidates
from kvrelay.engine.beam_candidates import likeliest
from kvrelay.engine.checkpoint import model_digest
from kvrelay.engine.fit import num_blocks_for
from kvrelay.engine.group_steps import GroupSteps
from kvrelay.engine.lower_tiers import LowerTiers
from kvrelay.engine.memory import pool_bytes
from kvrelay.engine.model import DecoderModel, load_model
from kvrelay.engine.preemption import Way
from kvrelay.engine.runner import Runner
from kvrelay.engine.sampler import Sampler, token_logprobs
from kvrelay.engine.scheduler import Scheduled, Scheduler, SchedulerLimits, StepPlan
from kvrelay.engine.sequence import Sequence, State
from kvrelay.engine.shares import LineRules
from kvrelay.engine.speculation_steps import DraftModel, DraftSteps
from kvrelay.hashing import HASH_SEED
from kvrelay.kernels.backend import Backend, KvOrder
from kvrelay.kernels.quant_scheme import Scheme
from kvrelay.kvcache.block_pool import BlockPool
from kvrelay.kvcache.events import EventLog
from kvrelay.kvcache.eviction import make_policy
from kvrelay.kvcache.storage import DTYPES, KV_DTYPES, KvStorage
from kvrelay.kvcache.swap import SwapArea, SwapLoad
from kvrelay.types import BlockId, Fingerprint, FinishReason, KvLayout, KvMemory
from kvrelay.wire import (
    PROTOCOL_VERSION,
    KvEvents,
    KvSnapshot,
    LoadReport,
    SequenceRequest,
    Timings,
    TokenLogprob,
    TokenOutput,
)

logger = logging.getLogger(__name__)

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
    policy: str = "lru"  # of eviction: see kvcache/eviction.py
    rules: LineRules = field(default_factory=LineRules)  # who is next in line
    preemption: str = "auto"  # the cheapest way, or always that Way where it can be gone
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
    """What a step brought about."""

    outputs: list[TokenOutput] = field(default_factory=list)
    reservations: list[Reservation] = field(default_factory=list)
    refused: list[tuple[str, str, str]] = field(default_factory=list)  # out of the line: (request, reason, message)
    handed_back: list[str] = field(default_factory=list)  # requests that end here, to go on from a prefill worker
    num_tokens: int = 0
    num_decode: int = 0
    seconds: float = 0.0
    is_stuck: bool = False  # nothing was done, and nothing can be until somebody acts on the engine
    events: KvEvents | None = None
    load: LoadReport | None = None


@dataclass(slots=True)
class Speed:
    """Moving averages of what steps took, for the router's predictions."""

    step_s: float = 0.0
    decode_step_s: float = 0.0
    prefill_tokens_per_s: float = 0.0
    decode_tokens_per_s: float = 0.0
    num_steps: int = 0
    batch_sequences: int = 0  # of the last step
    batch_tokens: int = 0

    @property
    def compute_tokens_per_s(self) -> float:
        """Of a prompt: as measured, or, on a worker that has computed none, at least what its decode steps reach."""
        return self.prefill_tokens_per_s or self.decode_tokens_per_s

    def observe(self, num_tokens: int, num_decode: int, seconds: float) -> None:
        self.step_s = _blend(self.step_s, seconds)
        if num_tokens == num_decode:
            self.decode_step_s = _blend(self.decode_step_s, seconds)
            if seconds > 0:
                self.decode_tokens_per_s = max(0.95 * self.decode_tokens_per_s, num_decode / seconds)
        elif num_tokens - num_decode >= 64 and seconds > 0:
            self.prefill_tokens_per_s = _blend(self.prefill_tokens_per_s, num_tokens / seconds)

    def observe_drafted(self, num_sequences: int, num_output: int, seconds: float) -> None:
        """A step that brought several tokens of a sequence counts as so many."""
        self.step_s = _blend(self.step_s, seconds)
        if num_output and seconds > 0:
            self.decode_step_s = _blend(self.decode_step_s, seconds * num_sequences / num_output)

    def note_batch(self, num_sequences: int, num_tokens: int) -> None:
        self.num_steps += 1
        self.batch_sequences, self.batch_tokens = num_sequences, num_tokens


def _blend(old: float, new: float) -> float:
    return new if old == 0.0 else 0.8 * old + 0.2 * new


class LayerHook(Protocol):
    """Told, on the engine thread, that blocks of a held sequence are final for some layers."""

    def __call__(self, request_id: str, first_index: int, blocks: list[BlockId], layers: range) -> None: ...


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
        self._clock, self._layer_hook = clock, layer_hook
        shape, spec = model.attention_shape, model.spec
        self._layers_per_hook = layers_per_hook or max(1, -(-spec.num_layers // 4))
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
        self.scheduler.preemptor.token_bytes = layout.block_bytes / config.block_size
        self.scheduler.preemptor.only = None if config.preemption == "auto" else Way(config.preemption)
        self._runner = Runner(
            model, backend, self.storage.layers,
            block_size=config.block_size, max_running=config.max_running, max_blocks=-(-self.max_model_len // config.block_size) + 1,
            max_tokens=config.token_budget,
        )  # fmt: skip
        backend.share_prefixes(enabled=config.cascade)
        self._eos_ids = tuple(spec.eos_ids)
        self._eos = frozenset(self._eos_ids)
        self._sampler = Sampler(backend, self._eos_ids)
        self.scheduler.groups.eos_ids = self._eos_ids
        self._groups = GroupSteps(self.scheduler, self._end, self._runner.forget)
        self.drafts = DraftSteps(
            self.pool, most=config.draft_tokens, token_budget=config.token_budget, max_model_len=self.max_model_len,
            lookup=config.prompt_lookup,
        )  # fmt: skip
        self._events = EventLog()
        self._speed = Speed()
        self._load_seq = 0
        self._unsent: list[TokenOutput] = []  # ends that no step brought about

    @property
    def memory(self) -> KvMemory:
        return self.storage.memory

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

    def attach_draft_model(self, model: DraftModel) -> None:
        """It drafts tokens from now on. Before the first request."""
        self.drafts.attach(model, self.scheduler.lengths)

    def close(self) -> None:
        """Let go of the tiers below the pool and of the swap area. Blocking."""
        if (area := self.scheduler.preemptor.area) is not None:
            area.close()
        if self.tiers is not None:
            self.tiers.tiers.close()

    def patience_s(self) -> float | None:
        """How long nothing need be done unless somebody acts on the engine; None: for ever."""
        fetched_s = self.tiers.tiers.fetches.next_deadline_s() if self.tiers is not None else None
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

    def hop_measured(self, bytes_per_s: float, latency_s: float) -> None:
        """How fast KV comes from prefill workers: for the choice of what becomes of a pre-empted sequence."""
        measured = self.scheduler.preemptor.measured
        measured.hop_bytes_per_s, measured.hop_latency_s = bytes_per_s, latency_s

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
        self._end_if_too_long(seq)
        return True

    def _take_over(self, leader: Sequence, token_ids: list[int], candidates: Candidates) -> None:
        """A group's prompt has arrived. Its members begin at once, so what comes from below the pool is waited for here."""
        group, load = leader.group, leader.load
        assert group is not None
        if load is not None:
            is_good = load.wait_verified() and load.wait_layer(self.model.spec.num_layers - 1)
            if not is_good:
                self.scheduler.rewind(leader)
                self._require_tiers().tiers.give_up(load)
                return
            self._require_tiers().settle(leader)
            self.scheduler.name_arrived(leader)
        if group.search is None:
            for member in self._groups.take_over(leader, token_ids):
                self._end_if_too_long(member)
        else:
            outputs = self._groups.begin_search(group, leader, candidates)
            self._unsent += [output for output in outputs if output.finish_reason is not None]

    def _end_if_too_long(self, seq: Sequence) -> None:
        if (reason := self._finish_reason(seq)) is not None:  # this engine's context is shorter than the source's
            self._end(seq, reason)
            end = TokenOutput(
                request_id=seq.stream_id, position=seq.num_output, token_ids=[], finish_reason=reason,
                choice=seq.choice, num_left=self._num_left(seq),
            )  # fmt: skip
            self._unsent.append(end)

    @staticmethod
    def _num_left(seq: Sequence) -> int:
        return len(seq.group.members) if seq.group is not None else 0

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

    def preempt(self, group: tuple[Sequence, ...]) -> Way:
        """Take these running sequences off the batch, between two steps."""
        for seq in group:
            self._forget(seq)
        return self.scheduler.preempt_group(group)

    def quarantine(self, request_id: str) -> int | None:
        """Like abort for a receiving sequence, but its blocks stay taken until `unquarantine` of the key."""
        seq = self.scheduler.receiving.get(request_id)
        return None if seq is None else self.scheduler.quarantine(seq, FinishReason.ERROR)

    def unquarantine(self, key: int) -> None:
        self.scheduler.unquarantine(key)

    def lend(self, count: int) -> list[BlockId]:
        """Up to `count` free blocks, filled with numbers that mean nothing; see Scheduler.lend."""
        blocks = self.scheduler.lend(count)
        try:
            self.storage.fill_with_noise(blocks)
        except BaseException:
            self.scheduler.take_back(blocks)
            raise
        return blocks

    def take_back(self, blocks: Iterable[BlockId]) -> None:
        """Lent blocks may be used again."""
        self.scheduler.take_back(blocks)

    def _end(self, seq: Sequence, reason: FinishReason) -> None:
        self._forget(seq)
        self.scheduler.finish(seq, reason)

    def _forget(self, seq: Sequence) -> None:
        """It is off the batch."""
        self._runner.forget(seq)
        self.drafts.forget(seq)

    # ---- the step

    def step(self) -> StepResult:
        """Grant reservations, then compute one batch. Cheap when there is nothing to do."""
        result = StepResult()
        result.outputs, self._unsent = self._unsent, []
        now_s = self._clock()
        self.pool.tick(now_s)
        if self.tiers is not None:
            self.tiers.tiers.poll()
        self.scheduler.turn_late_away(now_s)
        result.refused = self._turned_away(now_s)
        if (area := self.scheduler.preemptor.area) is not None:
            area.poll()
        for seq in self.scheduler.grant_reservations():
            result.reservations.append(self._reservation(seq, now_s))
        plan = self._verified(self.scheduler.schedule())
        for seq in plan.preempted:
            self._forget(seq)
        result.handed_back = [seq.request_id for seq in self.scheduler.handed_back]
        self.scheduler.handed_back.clear()
        if not plan.work:
            self.scheduler.copied()
            result.is_stuck = not (plan.preempted or result.reservations or result.refused)
            return result
        if self.config.draft_tokens and not self.scheduler.groups.by_id:
            plan = self.drafts.widen(plan)
        others = [item for item in plan.work if not item.seq.plain_until]
        for item in others:
            seq = item.seq
            seq.num_chunks += 1
            if seq.scheduled_s is None:
                seq.scheduled_s = now_s
                self._announce_cached(item)
        self._copy_blocks(plan)
        hidden = self._runner.run(plan, self._on_layer(plan), self._before_layer(plan))
        self._settle_loads(plan)
        if any(item.seq.request.sampling.prompt_logprobs is not None for item in others):
            self._collect_prompt_logprobs(plan, hidden)
        self._sample(plan, hidden, result)
        result.num_tokens, result.num_decode = plan.num_tokens, plan.num_decode
        self._speed.note_batch(len(plan.work), result.num_tokens)
        result.seconds = self._clock() - now_s
        if plan.num_drafted:
            self._speed.observe_drafted(
                len(plan.work), sum(len(out.token_ids) for out in result.outputs), result.seconds
            )
        else:
            self._speed.observe(result.num_tokens, result.num_decode, result.seconds)
        if self.config.draft_tokens:
            self.drafts.note_step(plan, result.seconds)
        self.scheduler.preemptor.measured.compute_tokens_per_s = self._speed.compute_tokens_per_s
        if self.tiers is not None:
            self.tiers.tiers.prefill_tokens_per_s = self._speed.prefill_tokens_per_s
            self.tiers.end_step(self.pool)
        return result

    def _turned_away(self, now_s: float) -> list[tuple[str, str, str]]:
        told, self.scheduler.turned_away = self.scheduler.turned_away, []
        return [(seq.request_id, reason, why_turned_away(seq, reason, now_s)) for seq, reason in told]

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
                self._require_tiers().tiers.give_up(load)
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

    def _copy_blocks(self, plan: StepPlan) -> None:
        if plan.copies:
            for copy in plan.copies:
                self._runner.forget(copy.seq)  # its row of the block table names the shared block
            self.storage.copy_blocks([(copy.source, copy.target) for copy in plan.copies])
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

    def _sample(self, plan: StepPlan, hidden: Tensor, result: StepResult) -> None:
        rows, seqs = _sampling(plan)
        if plan.num_drafted:
            self.scheduler.advance(*(item for item in plan.work if not item.drafts))
        else:
            self.scheduler.advance(*plan.work)
        if not rows:
            return
        logits = self._runner.logits(hidden, rows)
        if plan.num_drafted:
            self._sample_drafted(plan, seqs, logits, result)
        elif self.scheduler.groups.by_id:
            self._sample_groups(seqs, logits, result)
        else:
            tokens, logprobs = self._sampler.sample(logits, seqs)
            self._append_all(seqs, tokens, logprobs, result.outputs)

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
            self._append_all(members, tokens, logprobs, result.outputs)
        now_s = self._clock()
        leaders = [seq for seq in seqs if seq.group is not None and seq is seq.group.leader]
        for output in self._groups.advance_beams(seqs, lambda rows, beams: likeliest(logits[rows], beams)):
            leader = next((seq for seq in leaders if seq.request_id == output.request_id), None)
            result.outputs.append(output if leader is None else self._with_first_token_facts(output, leader, now_s))
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
                self._append_all([item.seq], tokens[begin:end], logprobs[begin:end], result.outputs)
            begin = end

    def take_drafted(
        self, item: Scheduled, tokens: list[int], logprobs: list[TokenLogprob | None], outputs: list[TokenOutput]
    ) -> None:
        """Append a sequence's next token and those behind right drafts. tokens, logprobs: of its rows."""
        seq, num_accepted = item.seq, 0
        for index, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
            self.scheduler.advance(Scheduled(seq, item.start + index, 1))
            self._append_all([seq], [token], [logprob], outputs)
            if index == len(item.drafts) or token != item.drafts[index]:
                break
            num_accepted += 1
            if seq.state is not State.RUNNING:
                break
        self.drafts.note(item, num_accepted)

    def _append_all(
        self, seqs: list[Sequence], tokens: list[int], logprobs: list[TokenLogprob | None], outputs: list[TokenOutput]
    ) -> None:
        now_s, send = self._clock(), outputs.append
        for seq, token, logprob in zip(seqs, tokens, logprobs, strict=True):
            token_ids = seq.token_ids
            count = len(token_ids)
            if count < seq.plain_until and token not in seq.stop_ids:  # as nearly always
                token_ids.append(token)
                request = seq.request
                position = count - request.num_prompt_tokens
                send(TokenOutput(request_id=request.request_id, position=position, token_ids=[token]))
            else:
                send(self._append(seq, token, logprob, now_s))

    def _append(self, seq: Sequence, token: int, logprob: TokenLogprob | None, now_s: float) -> TokenOutput:
        request, token_ids = seq.request, seq.token_ids
        position = len(token_ids) - request.num_prompt_tokens
        is_first = len(token_ids) == len(request.token_ids)
        token_ids.append(token)
        reason = self._finish_reason(seq)
        if reason is not None:
            seq.hold = False  # nothing is left to decode elsewhere
            self._end(seq, reason)
        elif seq.output_limit is not None and seq.num_output >= seq.max_output:
            self._end(seq, FinishReason.LENGTH)  # a prefill worker's one token: the stream goes on elsewhere
        elif seq.group is None and request.sampling.logprobs is None and seq.output_limit is None:
            self._note_plain(seq)
        wanted = request.sampling.max_tokens > 0
        output = TokenOutput(
            request_id=seq.stream_id,
            choice=seq.choice,
            num_left=self._num_left(seq),
            position=position,
            token_ids=[token] if wanted else [],
            logprobs=[logprob] if logprob is not None and wanted else [],
            finish_reason=reason,
            stop_token=token if reason is FinishReason.STOP else None,
        )
        return self._with_first_token_facts(output, seq, now_s) if is_first else output

    @staticmethod
    def _with_first_token_facts(output: TokenOutput, seq: Sequence, now_s: float) -> TokenOutput:
        scheduled_s = seq.scheduled_s if seq.scheduled_s is not None else now_s
        timings = Timings(queue_s=scheduled_s - seq.arrived_s, compute_s=now_s - scheduled_s, num_chunks=seq.num_chunks)
        return msgspec.structs.replace(
            output, cached_tokens=seq.num_cached, prompt_logprobs=seq.prompt_logprobs, timings=timings
        )

    def _note_plain(self, seq: Sequence) -> None:
        """What follows needs a closer look when it may be the end of the stream, and not before."""
        params = seq.request.sampling
        seq.stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos)
        seq.plain_until = min(seq.request.num_prompt_tokens + params.max_tokens, self.max_model_len) - 1

    def _finish_reason(self, seq: Sequence) -> FinishReason | None:
        """Why the stream ends with its last token, or None. A prefill worker's own limit is no reason."""
        params, token, num_tokens = seq.request.sampling, seq.token_ids[-1], len(seq.token_ids)
        num_output = num_tokens - seq.request.num_prompt_tokens
        ends = token in params.stop_token_ids or (token in self._eos_ids and not params.ignore_eos)
        if ends and params.max_tokens > 0 and num_output > params.min_tokens:
            return FinishReason.STOP
        if num_output >= params.max_tokens or num_tokens >= self.max_model_len:
            return FinishReason.LENGTH
        return None

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

    def load(self) -> LoadReport:
        """This engine's load now; the transfer fields are the worker's to fill."""
        counts, scheduler = self.pool.counts(), self.scheduler
        self._load_seq += 1
        return LoadReport(
            seq=self._load_seq,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting) + len(scheduler.reserving),
            receiving=len(scheduler.receiving),
            queued_tokens=scheduler.queued_tokens,
            free_blocks=self.pool.num_available,
            cached_blocks=counts.cached,
            used_blocks=counts.used,
            total_blocks=self.pool.num_blocks,
            leased_blocks=sum(len(seq.blocks) for seq in scheduler.held.values()),
            quarantined_blocks=sum(map(len, scheduler.quarantined.values())),
            lent_blocks=len(scheduler.lent),
            step_s=self._speed.step_s,
            prefill_tokens_per_s=self._speed.prefill_tokens_per_s,
            decode_step_s=self._speed.decode_step_s,
            preemptions=scheduler.num_preemptions,
            preempted={str(way): count for way, count in scheduler.preemptor.num_by_way.items()},
            **self._swap_load(),
            prefix_hit_tokens=scheduler.hit_tokens,
            prefix_query_tokens=scheduler.query_tokens,
            tier_hit_tokens=self.tiers.hit_tokens if self.tiers is not None else 0,
            fetching=len(self.tiers.tiers.fetches) if self.tiers is not None else 0,
            waiting_by_priority=dict(scheduler.waiting.num_by_priority + scheduler.reserving.num_by_priority),
            waiting_tenants=len(scheduler.shares.num_waiting),
            deadline_refusals=scheduler.num_late,
            displaced=scheduler.num_displaced,
            tenant_tokens=dict(scheduler.shares.computed_tokens),
            other_tenant_tokens=scheduler.shares.other_tokens,
            tiers=self.tiers.tiers.tier_loads() if self.tiers is not None else [],
            reserving=len(scheduler.reserving),
            held=len(scheduler.held),
            pinned_blocks=counts.pinned,
            steps=self._speed.num_steps,
            batch_sequences=self._speed.batch_sequences,
            batch_tokens=self._speed.batch_tokens,
            spared_kv_tokens=self.backend.spared_kv_tokens,
            **self.drafts.load(),
        )

    def _swap_load(self) -> dict[str, Any]:
        """LoadReport's fields about pre-empted sequences."""
        preemptor = self.scheduler.preemptor
        found: dict[str, Any] = {
            "swapped": len(self.scheduler.swapped),
            "recomputed_tokens": preemptor.recomputed_tokens,
        }
        if (area := preemptor.area) is not None:
            found |= {
                "swapped_blocks": area.num_held,
                "swapped_bytes": area.num_held * area.slab.block_bytes,
                "swap_out_s": area.sums.save_s,
                "swap_in_s": area.sums.load_s,
                "swap_corrupt_blocks": area.sums.corrupt,
            }
        return found

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

    # ---- layers going out

    def _announce_cached(self, item: Scheduled) -> None:
        """Blocks found in the prefix cache are final for every layer before the first step."""
        seq = item.seq
        num_in_pool = seq.num_cached // self.config.block_size - seq.num_loaded_blocks
        if seq.hold and self._layer_hook is not None and num_in_pool:
            blocks = [BlockId(block) for block in seq.blocks[:num_in_pool]]
            self._layer_hook(seq.request_id, 0, blocks, range(self.model.spec.num_layers))

    def _brought_up(self, seq: Sequence) -> tuple[str, int, list[BlockId]]:
        """(request, first index, blocks) of what comes from below the pool: final layer by layer, like what is computed."""
        end = seq.num_cached // self.config.block_size
        first = end - seq.num_loaded_blocks
        return seq.request_id, first, [BlockId(block) for block in seq.blocks[first:end]]

    def _on_layer(self, plan: StepPlan) -> Callable[[int], None] | None:
        hook = self._layer_hook
        if hook is None:
            return None
        ready = [(item.seq.request_id, *self.scheduler.ready_blocks(item)) for item in plan.work if item.seq.hold]
        ready += [self._brought_up(item.seq) for item in plan.work if item.seq.hold and item.seq.load is not None]
        ready = [entry for entry in ready if entry[2]]
        if not ready:
            return None
        last_layer, step = self.model.spec.num_layers - 1, self._layers_per_hook

        def on_layer(layer: int) -> None:
            if (layer + 1) % step == 0 or layer == last_layer:
                for request_id, first, blocks in ready:
                    hook(request_id, first, blocks, range(layer - layer % step, layer + 1))

        return on_layer


def _sampling(plan: StepPlan) -> tuple[list[int], list[Sequence]]:
    """(row of its last token among the step's, sequence) of all whose end the step reaches, as two lists."""
    singles, chunks = plan.work[: plan.num_single], plan.work[plan.num_single :]
    seqs = [item.seq for item in singles if item.start + 1 == len(item.seq.token_ids)]
    rows = list(range(len(singles)))
    if len(seqs) < len(singles):  # the budget ended in the middle of one
        rows = [row for row, item in enumerate(singles) if item.samples]
    end = len(singles)
    for item in chunks:
        end += item.num_tokens
        if item.samples:
            rows += range(end - 1 - len(item.drafts), end)
            seqs += [item.seq] * (1 + len(item.drafts))
    return rows, seqs


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
