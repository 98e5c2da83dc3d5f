"""How the decode worker's steps are computed while a row is served: eagerly, from captures, with prefixes read once.

For kvrelay/cluster/verify/parity.py. Functions with `@during` return a `During` of rows.py.
"""

from collections.abc import AsyncIterator
from dataclasses import replace
from importlib import import_module
from typing import Any
from unittest import mock

from kvrelay.cluster.verify import steering as steer
from kvrelay.cluster.verify.rows import Case, during
from kvrelay.engine.scheduling.plan import StepPlan

GRAPHS, PIECES = "_graphs", "_pieces"  # of the engine's runner: decode steps; steps with prompts


def captures(kind: str, case: Case) -> Any:
    """The worker's captures of this kind, which stand for true; None: its steps cannot be captured so."""
    found: Any = getattr(case.engine.runner, kind)
    return found if getattr(found, "is_possible", True) else None


def reads_prefixes_once(case: Case) -> bool:
    """Whether some of the model's layers may read a shared prefix once: those without a window."""
    return steer.shares_prefixes(case) and None in case.engine.model.spec.layer_windows


class Counted:
    """Captures, whose replayed steps are counted."""

    def __init__(self, captured: Any) -> None:
        self._captured, self.num_steps = captured, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._captured, name)

    def run(self, *args: Any) -> Any:
        self.num_steps += 1
        return self._captured.run(*args)


@during
async def steps_by(case: Case, *kinds: str) -> AsyncIterator[None]:
    """Steps run from these captures alone, each of which must compute some; without any, eagerly."""
    counted = {kind: Counted(captures(kind, case)) for kind in kinds}
    used: dict[str, Any] = {kind: counted.get(kind) for kind in (GRAPHS, PIECES)}
    with mock.patch.multiple(case.engine.runner, **used):
        yield
    for kind, found in counted.items():  # the CPU's may find that they cannot record
        is_used = found.num_steps > 0 or getattr(found, "why_not", None) is not None
        case.result.check("" if is_used else f"no step by {kind}", holds=is_used)


@during
async def changed_while_decoding(case: Case) -> AsyncIterator[None]:
    """The first block of every sequence changes once, when some of its output has been computed."""
    engine, changed = case.engine, set[str]()
    schedule = engine.scheduler.schedule

    def change_then_schedule() -> StepPlan:
        for seq in engine.scheduler.running:
            if seq.num_output >= steer.PREEMPT_AFTER and seq.request_id not in changed:
                changed.add(seq.request_id)
                steer.scale_block(engine, seq.blocks[0])
        return schedule()

    with mock.patch.object(engine.scheduler, "schedule", change_then_schedule):
        yield
    case.result.check("" if changed else "no sequence was changed", holds=bool(changed))


@during
async def sharing_unlike_kv(case: Case) -> AsyncIterator[None]:
    """All decode rows are taken to share the first one's blocks."""
    if (native := case.engine.backend.compiled_kernels) is not None:
        share = native.share

        def share_first(schedule: Any, batch: Any, shape: Any) -> None:
            share(schedule, replace(batch, block_tables=_all_as_first(batch.block_tables)), shape)

        with mock.patch.object(native, "share", share_first):
            yield
        return
    attention: Any = import_module("kvrelay.kernels.cuda.paged_attention")  # of this backend alone
    make_levels = attention.make_levels
    wrong: Any = lambda lens, tables, *more: make_levels(lens, _all_as_first(tables), *more)  # noqa: E731
    with mock.patch.object(attention, "make_levels", wrong):
        yield


def _all_as_first(tables: Any) -> Any:
    return tables[:1].expand_as(tables).contiguous()
