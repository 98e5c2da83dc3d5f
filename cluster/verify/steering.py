"""What rows have an engine do that the load alone does not bring about: wait for a whole load, preempt, draft, share.

Functions with `@during` return a `During` of rows.py; the engine is that of the decode worker in this process.
"""

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

from kvrelay.cluster.launch.local import LocalCluster
from kvrelay.cluster.verify.damage import scale_block
from kvrelay.cluster.verify.rows import Evidence, during
from kvrelay.cluster.verify.verifier import ServedAnswer
from kvrelay.engine.scheduling.plan import StepPlan
from kvrelay.engine.scheduling.scheduler import Scheduler
from kvrelay.engine.scheduling.sequence import Scheduled
from kvrelay.engine.scheduling.sequence import Sequence as EngineSequence
from kvrelay.engine.step.engine import Engine
from kvrelay.plane.reports import LoadReport

PREEMPT_AFTER = 4  # tokens of output
Ready = Callable[[Scheduler], bool]
Counter = Callable[[LoadReport], int]


def engine_of(cluster: LocalCluster) -> Engine:
    engine = cluster.inside[0].thread.engine
    assert engine is not None
    return engine


async def load_of(cluster: LocalCluster) -> LoadReport:
    return await cluster.inside[0].thread.call(lambda engine: engine.load())


@during
async def counted(
    cluster: LocalCluster,
    evidence: Evidence,
    counter: Counter,
    note: str,
    holds: Callable[[int], bool] = lambda count: count > 0,
) -> AsyncIterator[None]:
    """Require something of how much a counter of the worker grows. note: with `{}` for the number."""
    before = counter(await load_of(cluster))
    yield
    count = counter(await load_of(cluster)) - before
    evidence.require(note.format(count), holds=holds(count))


# ---- what shares a queue or a batch


@contextmanager
def held_back(
    engine: Engine, ready: Ready, *, grants: bool = True, damage: Callable[[Engine, StepPlan], None] | None = None
) -> Iterator[list[StepPlan]]:
    """Nothing is scheduled until `ready` was true once; yields the plans since.

    grants: reservations are granted meanwhile. damage: done to the engine before each step is computed.
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
        plan = schedule()
        plans.append(plan)
        if damage is not None:
            damage(engine, plan)
        return plan

    def held_grant() -> list[EngineSequence]:
        return grant() if grants or may_begin() else []

    with mock.patch.multiple(scheduler, schedule=held_schedule, grant_reservations=held_grant):
        yield plans


def all_queued(count: int) -> Ready:
    """So many sequences are queued."""
    return lambda scheduler: len(scheduler.waiting) + len(scheduler.reserving) == count


@during
async def served_in_order(
    cluster: LocalCluster, evidence: Evidence, stage: str, order: Sequence[str]
) -> AsyncIterator[None]:
    """All requests queue before the first is served; they must reach `stage` in this order of prompts."""

    def in_order(answers: Sequence[ServedAnswer]) -> tuple[bool, str]:
        served = sorted(answers, key=lambda answer: _reached_s(cluster, answer.request_id, stage))
        names = [answer.prompt.name for answer in served]
        return names == list(order), f"served: {', '.join(names)}"

    evidence.findings.append(in_order)
    with held_back(engine_of(cluster), all_queued(len(order)), grants=False):
        yield


def _reached_s(cluster: LocalCluster, request_id: str, stage: str) -> float:
    """When the ingress learnt that a request had reached the stage."""
    (record,) = cluster.dispatcher.requests.find(request_id)
    return record.started_s + next((one["at_s"] for one in record.stages if one["name"] == stage), float("inf"))


def is_mixed(plan: StepPlan) -> bool:
    """Whether the step decodes a sequence and computes several tokens of another one's prompt."""
    return any(map(_is_decode, plan.work)) and any(map(_is_chunk, plan.work))


def _is_decode(item: Scheduled) -> bool:
    return item.seq.num_output > 0 and item.num_tokens == 1


def _is_chunk(item: Scheduled) -> bool:
    return item.num_tokens > 1 and item.start < item.seq.request.num_prompt_tokens


@during
async def mixed(cluster: LocalCluster, evidence: Evidence, ready: Ready) -> AsyncIterator[None]:
    """At least one step must be mixed."""
    with held_back(engine_of(cluster), ready) as plans:
        yield
    count = sum(map(is_mixed, plans))
    evidence.require(f"{count} of {len(plans)} steps decoded and computed a part of a prompt", holds=count > 0)


@during
async def corrupt_mixed(
    cluster: LocalCluster, evidence: Evidence, ready: Ready, expected: dict[str, list[int]], long: str
) -> AsyncIterator[None]:
    """In the first mixed step, change KV of a sequence that decodes and of the prompt `long`.

    Both must answer otherwise.
    """
    changed: set[int] = set()  # lengths of prompts, which differ

    def damage(engine: Engine, plan: StepPlan) -> None:
        begun = [item for item in plan.work if _is_chunk(item) and item.start >= engine.config.block_size]
        if changed or not is_mixed(plan) or not begun:
            return
        for item in (next(filter(_is_decode, plan.work)), begun[0]):
            scale_block(engine, item.seq.blocks[0])
            changed.add(item.seq.request.num_prompt_tokens)

    def other_answers(answers: Sequence[ServedAnswer]) -> tuple[bool, str]:
        damaged = [answer for answer in answers if len(answer.prompt.token_ids) in changed]
        names = sorted(answer.prompt.name for answer in damaged)
        same = [answer.prompt.name for answer in damaged if answer.tokens == expected[answer.prompt.name]]
        if same:
            return False, f"UNDETECTED: {same[0]} is the same"
        return long in names and len(names) > 1, f"changed: {', '.join(names) or 'nothing'}"

    evidence.findings.append(other_answers)
    with held_back(engine_of(cluster), ready, damage=damage):
        yield


# ---- preemption


@during
async def preempting(
    cluster: LocalCluster, evidence: Evidence, mode: str, damage: Callable[[Engine], None] = lambda engine: None
) -> AsyncIterator[None]:
    """Each sequence is preempted once, damage is done, and the pool's cache forgotten.

    All must be preempted in this mode.
    """
    engine = engine_of(cluster)
    scheduler, seen = engine.scheduler, set[str]()
    schedule = scheduler.schedule
    before = (await load_of(cluster)).preempted.get(mode, 0)

    def preempt_then_schedule() -> StepPlan:
        for seq in list(scheduler.running):
            name = seq.request_id.partition("~")[0]  # the same after a return to prefill
            if seq.num_output >= PREEMPT_AFTER and name not in seen:
                seen.add(name)
                engine.preempt((seq,))
                damage(engine)
                engine.pool.reset_cache()
        return schedule()

    with mock.patch.object(scheduler, "schedule", preempt_then_schedule):
        yield
    count = (await load_of(cluster)).preempted.get(mode, 0) - before

    def all_preempted(answers: Sequence[ServedAnswer]) -> tuple[bool, str]:
        note = f"{count} of {len(answers)} sequences preempted by {mode}, {len(seen)} in all"
        return count == len(seen) == len(answers), note

    evidence.findings.append(all_preempted)


# ---- cascade attention


def shares_prefixes(cluster: LocalCluster) -> bool:
    """Whether the worker's attention reads a shared prefix once."""
    engine = engine_of(cluster)
    return engine.backend.shares_prefixes(engine.model.attention_shape)


def has_native_cascade(cluster: LocalCluster) -> bool:
    """Whether it does so in the compiled CPU kernels, which `sharing_unlike_kv` can steer."""
    return shares_prefixes(cluster) and getattr(engine_of(cluster).backend, "compiled_kernels", None) is not None


@during
async def prefix_read_once(cluster: LocalCluster, evidence: Evidence) -> AsyncIterator[None]:
    """KV reads must be saved, if the backend can."""
    can_share = shares_prefixes(cluster)
    before = (await load_of(cluster)).cascade_saved_tokens
    yield
    count = (await load_of(cluster)).cascade_saved_tokens - before
    note = f"{count} tokens of KV not read again" if can_share else "this backend reads for every sequence"
    evidence.require(note, holds=(count > 0) is can_share)


@during
async def sharing_unlike_kv(cluster: LocalCluster, evidence: Evidence) -> AsyncIterator[None]:
    """All decode rows are taken to share the first one's blocks."""
    native: Any = engine_of(cluster).backend.compiled_kernels  # type: ignore[attr-defined]
    share = native.share

    def share_first(schedule: Any, batch: Any, shape: Any) -> None:
        tables = batch.block_tables[:1].expand_as(batch.block_tables).contiguous()
        share(schedule, replace(batch, block_tables=tables), shape)

    with mock.patch.object(native, "share", share_first):
        yield


# ---- speculation


@during
async def always_drafting(cluster: LocalCluster, evidence: Evidence) -> AsyncIterator[None]:
    """As many drafts as allowed in every step; of a draft model, which is the model itself, the last token is wrong."""
    engine = engine_of(cluster)
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
async def accepting_every_draft(cluster: LocalCluster, evidence: Evidence) -> AsyncIterator[None]:
    """Every draft is taken to be right."""
    executor: Any = engine_of(cluster).executor
    take_drafted = executor.take_drafted

    def take(item: Any, tokens: Any, logprobs: Any, outputs: Any) -> None:
        take_drafted(item, [*item.drafts, tokens[-1]], logprobs, outputs)

    with mock.patch.object(executor, "take_drafted", take):
        yield


@during
async def drafts_partly_accepted(cluster: LocalCluster, evidence: Evidence) -> AsyncIterator[None]:
    """Some drafted tokens must be accepted, and some must not."""
    before = await load_of(cluster)
    yield
    after = await load_of(cluster)
    drafted = after.drafted_tokens - before.drafted_tokens
    accepted = after.accepted_tokens - before.accepted_tokens
    evidence.require(f"{accepted} of {drafted} drafted tokens were accepted", holds=drafted > accepted > 0)
