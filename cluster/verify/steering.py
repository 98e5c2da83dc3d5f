"""What rows have an engine do that the load alone does not bring about: wait for a whole load, preempt, draft, share.

And the damage to KV that negative controls do: to what the decode worker receives, and to what its lower tiers hold.
Functions with `@during` return a `During` of rows.py; the engine is that of the decode worker in this process.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest import mock

from kvrelay.cluster.verify.rows import Case, during
from kvrelay.decode import read_queue
from kvrelay.engine.scheduling.plan import StepPlan
from kvrelay.engine.scheduling.scheduler import Scheduler
from kvrelay.engine.scheduling.sequence import Scheduled
from kvrelay.engine.scheduling.sequence import Sequence as EngineSequence
from kvrelay.engine.step.engine import Engine
from kvrelay.engine.worker.service import WorkerService
from kvrelay.kvcache.tiers.controller import TierController
from kvrelay.kvtransfer.mover.verification import ArrivingRead
from kvrelay.types import KvLayout

PREEMPT_AFTER = 4  # tokens of output
Ready = Callable[[Scheduler], bool]


@during
async def counted(
    case: Case, *counters: str, note: str, holds: Callable[..., bool] = lambda count: count > 0
) -> AsyncIterator[None]:
    """Require something of how much the worker's counters grow: fields of LoadReport. note: with `{}` for each."""
    before = await case.load()
    yield
    after = await case.load()
    counts = [getattr(after, name) - getattr(before, name) for name in counters]
    case.result.check(note.format(*counts), holds=holds(*counts))


# ---- what shares a queue or a batch


@contextmanager
def held_back(
    engine: Engine, ready: Ready, *, grants: bool = True, damage: Callable[[StepPlan], None] = lambda plan: None
) -> Iterator[list[StepPlan]]:
    """Nothing is scheduled until `ready` was true once; yields the plans since.

    grants: reservations are granted meanwhile. damage: done before each step is computed.
    """
    scheduler, plans, is_open = engine.scheduler, list[StepPlan](), False
    schedule, grant = scheduler.schedule, scheduler.grant_reservations

    def may_begin() -> bool:
        nonlocal is_open
        is_open = is_open or ready(scheduler)
        return is_open

    def held_schedule() -> StepPlan:
        if not may_begin():
            return StepPlan((), 0, ())
        plans.append(schedule())
        damage(plans[-1])
        return plans[-1]

    def held_grant() -> list[EngineSequence]:
        return grant() if grants or may_begin() else []

    with mock.patch.multiple(scheduler, schedule=held_schedule, grant_reservations=held_grant):
        yield plans


def all_queued(count: int) -> Ready:
    """So many sequences are queued."""
    return lambda scheduler: len(scheduler.waiting) + len(scheduler.reserving) == count


@during
async def served_in_order(case: Case, stage: str, order: Sequence[str]) -> AsyncIterator[None]:
    """All requests queue before the first is served; they must reach `stage` in this order of prompts."""
    with held_back(case.engine, all_queued(len(order)), grants=False):
        yield

    def reached_s(request_id: str) -> float:
        """When the ingress learnt that a request had reached the stage."""
        (record,) = case.cluster.dispatcher.requests.find(request_id)
        return record.started_s + next((one["at_s"] for one in record.stages if one["name"] == stage), float("inf"))

    served = sorted(case.answers, key=lambda answer: reached_s(answer.request_id))
    names = [answer.prompt.name for answer in served]
    case.result.check(f"served: {', '.join(names)}", holds=names == list(order))


def is_mixed(plan: StepPlan) -> bool:
    """Whether the step decodes a sequence and computes several tokens of another one's prompt."""
    return any(map(_is_decode, plan.work)) and any(map(_is_chunk, plan.work))


def _is_decode(item: Scheduled) -> bool:
    return item.seq.num_output > 0 and item.num_tokens == 1


def _is_chunk(item: Scheduled) -> bool:
    return item.num_tokens > 1 and item.start < item.seq.request.num_prompt_tokens


@during
async def mixed(case: Case, ready: Ready) -> AsyncIterator[None]:
    """At least one step must be mixed."""
    with held_back(case.engine, ready) as plans:
        yield
    count = sum(map(is_mixed, plans))
    case.result.check(f"{count} of {len(plans)} steps decoded and computed a part of a prompt", holds=count > 0)


@during
async def corrupt_mixed(case: Case, ready: Ready, long: str) -> AsyncIterator[None]:
    """In the first mixed step, change KV of a sequence that decodes and of the prompt `long`.

    Both must answer otherwise.
    """
    engine, changed = case.engine, set[int]()  # lengths of prompts, which differ

    def damage(plan: StepPlan) -> None:
        begun = [item for item in plan.work if _is_chunk(item) and item.start >= engine.config.block_size]
        if changed or not is_mixed(plan) or not begun:
            return
        for item in (next(filter(_is_decode, plan.work)), begun[0]):
            scale_block(engine, item.seq.blocks[0])
            changed.add(item.seq.request.num_prompt_tokens)

    with held_back(engine, ready, damage=damage):
        yield
    expected = case.verifier.expected
    damaged = {answer.prompt.name: answer for answer in case.answers if len(answer.prompt.token_ids) in changed}
    same = [name for name, answer in damaged.items() if answer.tokens == expected[name]]
    note = f"UNDETECTED: {same[0]} is the same" if same else f"changed: {', '.join(sorted(damaged)) or 'nothing'}"
    case.result.check(note, holds=not same and long in damaged and len(damaged) > 1)


# ---- preemption


@during
async def preempting(
    case: Case, mode: str, damage: Callable[[Engine], None] = lambda engine: None
) -> AsyncIterator[None]:
    """Each sequence is preempted once, damage is done, and the pool's cache forgotten.

    All must be preempted in this mode.
    """
    engine, seen = case.engine, set[str]()
    schedule = engine.scheduler.schedule
    before = (await case.load()).preempted.get(mode, 0)

    def preempt_then_schedule() -> StepPlan:
        for seq in list(engine.scheduler.running):
            name = seq.request_id.partition("~")[0]  # the same after a return to prefill
            if seq.num_output >= PREEMPT_AFTER and name not in seen:
                seen.add(name)
                engine.preempt((seq,))
                damage(engine)
                engine.pool.reset_cache()
        return schedule()

    with mock.patch.object(engine.scheduler, "schedule", preempt_then_schedule):
        yield
    count, wanted = (await case.load()).preempted.get(mode, 0) - before, len(case.answers)
    note = f"{count} of {wanted} sequences preempted by {mode}, {len(seen)} in all"
    case.result.check(note, holds=count == len(seen) == wanted)


# ---- cascade attention


def shares_prefixes(case: Case) -> bool:
    """Whether the worker's attention reads a shared prefix once."""
    return case.engine.backend.shares_prefixes(case.engine.model.attention_shape)


def has_native_cascade(case: Case) -> bool:
    """Whether it does so in the compiled CPU kernels, where any prefix is worth it."""
    return shares_prefixes(case) and getattr(case.engine.backend, "compiled_kernels", None) is not None


@during
async def prefix_read_once(case: Case) -> AsyncIterator[None]:
    """KV reads must be saved, if the backend can."""
    can_share = shares_prefixes(case)
    note = "{} tokens of KV not read again" if can_share else "this backend reads for every sequence"
    async with counted("cascade_saved_tokens", note=note, holds=lambda count: (count > 0) is can_share)(case):
        yield


# ---- speculation


@during
async def always_drafting(case: Case) -> AsyncIterator[None]:
    """As many drafts as allowed in every step; of a draft model, which is the model itself, the last token is wrong."""
    engine = case.engine
    speculation: Any = engine.drafts.speculation
    model: Any = engine.drafts.model
    with ExitStack() as stack:
        most: Any = lambda _, drafters: [speculation.most] * len(drafters)  # noqa: E731
        stack.enter_context(mock.patch.multiple(speculation, begins=lambda _: True, lengths=most))
        if model is not None:
            lengths = lambda candidates, *_, **__: [one.most for one in candidates]  # noqa: E731
            stack.enter_context(mock.patch.object(engine.drafts.choice, "lengths", lengths))
            draft = _last_token_wrong(model.draft, engine.model.spec.vocab_size)
            stack.enter_context(mock.patch.object(model, "draft", draft))
        yield


def _last_token_wrong(draft: Any, vocab_size: int) -> Any:
    def with_wrong_token(wanted: Any, *, chunk: int) -> Any:
        drafted = draft(wanted, chunk=chunk)
        for tokens in drafted.tokens.values():
            tokens[-1] = (tokens[-1] + 1) % vocab_size
        return drafted

    return with_wrong_token


@during
async def accepting_every_draft(case: Case) -> AsyncIterator[None]:
    """Every draft is taken to be right."""
    executor: Any = case.engine.executor
    take_drafted = executor.take_drafted

    def take(item: Any, tokens: Any, logprobs: Any, outputs: Any) -> None:
        take_drafted(item, [*item.drafts, tokens[-1]], logprobs, outputs)

    with mock.patch.object(executor, "take_drafted", take):
        yield


# ---- constraints


@during
async def without_masks(case: Case) -> AsyncIterator[None]:
    """The decode worker's sampler is given no masks; it must have been about to."""
    backend: Any = case.engine.backend
    sample, num_masked = backend.sample_on_device, 0

    def sample_without(logits: Any, batch: Any) -> Any:
        nonlocal num_masked
        num_masked += batch.masks is not None
        return sample(logits, replace(batch, masks=None, mask_rows=None))

    with mock.patch.object(backend, "sample_on_device", sample_without):
        yield
    case.result.check(f"{num_masked} masks left out" if num_masked else "no masks", holds=num_masked > 0)


if TYPE_CHECKING:
    import torch

TIERS_IDLE_S = 30.0
Change = Callable[["torch.Tensor", KvLayout], None]
"""(bytes of a region, layout of the pool) -> None: changes the bytes in place."""


# ---- in flight


@contextmanager
def tampering(change: Change, *, most: int | None = None) -> Iterator[Callable[[], int]]:
    """Change the regions that this process receives, `most` of them at most; yields a counter of those."""
    import torch

    count = 0

    class DamagedRead(ArrivingRead):
        """Its pieces are changed after they landed, before they are verified."""

        def receipt(self) -> None:
            return None  # so that it is called instead

        def __call__(self, num_bytes: int) -> None:
            nonlocal count
            assert isinstance(self.memory.owner, torch.Tensor)  # through the tensor: a GPU's pool has no host view
            pool, size = self.memory.owner.reshape(-1).view(torch.uint8), self.piece_bytes
            landed = self.pieces[self.num_landed // self.chunk_bytes : num_bytes // self.chunk_bytes].ravel().tolist()
            with torch.inference_mode():
                for offset in landed if most is None else landed[: most - count]:
                    change(pool[offset : offset + size], self.memory.layout)
                    count += 1
            super().__call__(num_bytes)

    with mock.patch.object(read_queue, "ArrivingRead", DamagedRead):
        yield lambda: count


@during
async def in_flight(case: Case, change: Change, *, most: int | None = None) -> AsyncIterator[None]:
    """Every region that arrives is changed, or the first `most`; at least one must arrive."""
    with tampering(change, most=most) as count:
        yield
    case.result.check("" if count() else "no KV was transferred", holds=count() > 0)


def flip_exponent_bit(region: "torch.Tensor", layout: KvLayout) -> None:
    """The top exponent bit of one number, in its last byte: of the first one in the second half, where values are."""
    region[len(region) // 2 + layout.itemsize - 1].bitwise_xor_(0x40)


def scale_fp8_scales(region: "torch.Tensor", layout: KvLayout) -> None:
    """Every scale of fp8 KV times 8."""
    import torch

    scales = _fp8_scales(region, layout)
    scales.copy_((scales.clone().view(torch.float32) * 8).view(torch.uint8))


def flip_scale_exponent(region: "torch.Tensor", layout: KvLayout) -> None:
    """The top exponent bit of one scale of fp8 KV: of the first value's, which follows the keys'."""
    scales = _fp8_scales(region, layout)
    scales[len(scales) // 2, 3].bitwise_xor_(0x40)


def _fp8_scales(region: "torch.Tensor", layout: KvLayout) -> "torch.Tensor":
    """[vectors, 4] bytes, a view."""
    return region.view(-1, layout.row_bytes)[:, layout.head_dim * layout.itemsize :]


def negate_entries(start: int, end: int) -> Change:
    """The numbers start .. end - 1 of every token's latent KV, float32."""
    import torch

    def change(region: "torch.Tensor", layout: KvLayout) -> None:
        region.view(torch.float32).view(-1, layout.head_dim)[:, start:end].neg_()

    return change


# ---- in lower tiers


def tiers_of(engine: Engine) -> TierController:
    assert engine.tiers is not None
    return engine.tiers.controller


@during
async def corrupt_host_tier(case: Case, *, is_checked: bool) -> AsyncIterator[None]:
    """What the host tier holds is changed, and the pool forgotten. is_checked: the damage must be noticed."""
    worker = case.cluster.inside[0]

    def corrupt(engine: Engine) -> int:
        host = tiers_of(engine).host
        for row in map(host.row, host.hashes()):
            assert row is not None
            _corrupt(host.slab.row(row))
        engine.pool.reset_cache()
        return tiers_of(engine).stats.corrupt

    await tiers_idle(worker)
    before = await worker.thread.call(corrupt)
    yield
    await tiers_idle(worker)
    found = await worker.thread.call(lambda engine: tiers_of(engine).stats.corrupt) - before
    if is_checked:
        case.result.check(f"{found} blocks found corrupt, the prompt was recomputed", holds=found > 0)


async def tiers_idle(worker: WorkerService) -> None:
    """Wait until nothing moves between the worker's tiers. Raises TimeoutError."""
    async with asyncio.timeout(TIERS_IDLE_S):
        while not await worker.thread.call(lambda engine: tiers_of(engine).is_idle):
            await asyncio.sleep(0.02)


def corrupt_swapped(engine: Engine) -> None:
    """Change bytes of every swapped block."""
    area = engine.scheduler.preemption.area
    assert area is not None
    for seq in engine.scheduler.swapped:
        for row in seq.swapped.rows if seq.swapped is not None else ():
            _corrupt(area.slab.row(row))


def _corrupt(view: memoryview) -> None:
    """Change the first 4 KiB, exponents included."""
    view[:] = bytes(byte ^ 0x5A for byte in view[:4096]) + bytes(view[4096:])


def scale_block(engine: Engine, block: int) -> None:
    """Multiply every key and value of a block of the pool."""
    import torch

    with torch.inference_mode():
        engine.cache.storage.tensor[block].mul_(-4.0)
