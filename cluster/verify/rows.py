"""Rows as data, and the one runner that serves them.

A row names prompts, how they are served, what is done to the workers meanwhile, and what the answers must be. Negative
controls are rows as well: damage that must be refused, or must change the answers, so that the comparison can fail.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from enum import Enum
from itertools import cycle
from typing import Any, Concatenate, ParamSpec

from kvrelay.cluster.launch.local import LocalCluster
from kvrelay.cluster.verify.prompts import VerifyPrompt
from kvrelay.cluster.verify.verifier import Overrides, RowResult, ServedAnswer, Verifier, reset_caches
from kvrelay.engine.step.engine import Engine
from kvrelay.errors import KvrelayError
from kvrelay.plane.messages import SequenceRequest
from kvrelay.plane.reports import LoadReport

logger = logging.getLogger(__name__)
P = ParamSpec("P")
ROW_TIMEOUT_S = 300.0
OUTSIDE = "does not match its grammar"
REFUSAL = "did not arrive as they left"  # of ChecksumMismatch


class Must(Enum):
    """What a row requires of the answers."""

    EQUAL = "the expected tokens"
    CHANGE = "other tokens in one answer at least"
    ALL_CHANGE = "other tokens in every answer, or an error that names the grammar"
    FAIL_CHECKSUM = "an error that names the checksum"
    ANYTHING = "only what is required beside them"


@dataclass(slots=True)
class Case:
    """A row while it is served. The answers are there when what is done meanwhile has ended."""

    verifier: Verifier
    cluster: LocalCluster
    result: RowResult
    answers: list[ServedAnswer] = field(default_factory=list)

    @property
    def engine(self) -> Engine:
        """That of the first decode worker in this process."""
        engine = self.cluster.inside[0].thread.engine
        assert engine is not None
        return engine

    async def load(self) -> LoadReport:
        return await self.cluster.inside[0].thread.call(lambda engine: engine.reports.load())

    def judge(self, must: Must) -> None:
        """Compare the answers with what is required."""
        result, expected = self.result, self.verifier.expected
        for answer in self.answers:
            if must is Must.FAIL_CHECKSUM:
                note = str(answer.error or f"answered with {len(answer.tokens)} tokens from a corrupt block")
                result.check(note, holds=answer.error is not None and REFUSAL in note)
            elif must is Must.ALL_CHANGE:
                is_same, note = answer.tokens == expected[answer.prompt.name], str(answer.error or "")
                differs = OUTSIDE in note if answer.error is not None else not is_same
                result.check(
                    "" if differs else f"{answer.prompt.name}: {note or 'UNDETECTED: the same'}", holds=differs
                )
            elif answer.error is not None:
                result.check(f"{answer.prompt.name}: {answer.error}", holds=False)
            elif must is Must.EQUAL:
                result.compare(answer.prompt.name, expected[answer.prompt.name], answer.tokens)
        if must is Must.CHANGE:
            changed = sum(answer.tokens != expected[answer.prompt.name] for answer in self.answers)
            note = f"{changed} of {len(self.answers)} answers changed" if changed else "UNDETECTED: the same answers"
            result.check(note, holds=changed > 0)


During = Callable[[Case], AbstractAsyncContextManager[object]]
"""What is done to the workers, or counted, while a row is served."""


def during(steps: Callable[Concatenate[Case, P], AsyncIterator[None]]) -> Callable[P, During]:
    """Decorates a generator that yields once, while the row is served; its further parameters become the only ones."""
    context = asynccontextmanager(steps)

    def with_parameters(*args: P.args, **kwargs: P.kwargs) -> During:
        return lambda case: context(case, *args, **kwargs)

    return with_parameters


@dataclass(frozen=True, slots=True)
class VerifyRow:
    """One row that compares tokens.

    Args:
        prompts: names; none: all prompts of the setup.
        force: where prompts are prefilled, `remote` or `local`; of several words one for each prompt, in turn.
        cold: the workers' caches are reset before.
        together: all requests are sent concurrently, after the first `num_first` of them one by one.
        request: the request of a prompt, if not the usual one.
        when: whether the row applies to a cluster.
    """

    name: str
    must: Must = Must.EQUAL
    prompts: tuple[str, ...] = ()
    force: str = "remote"
    cold: bool = False
    together: bool = False
    num_first: int = 0
    during: tuple[During, ...] = ()
    request: Callable[[Verifier, VerifyPrompt], SequenceRequest | None] = lambda verifier, prompt: None
    when: Callable[[Case], bool] = lambda case: True

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)

    async def answers(self, case: Case, prompts: Sequence[VerifyPrompt]) -> list[ServedAnswer]:
        """Serve those of the prompts that it names."""

        chosen = [prompt for prompt in prompts if not self.prompts or prompt.name in self.prompts]
        requests = [
            case.verifier.serve(case.cluster, prompt, force, self.request(case.verifier, prompt))
            for prompt, force in zip(chosen, cycle(self.force.split()), strict=False)
        ]
        num_first = self.num_first if self.together else len(requests)
        return [await one for one in requests[:num_first]] + await asyncio.gather(*requests[num_first:])


@dataclass(frozen=True, slots=True)
class OwnRows:
    """Rows that compare something else, served together.

    serve: (verifier, cluster, a result for each name) -> checks them; a KvrelayError that it raises fails them all.
    """

    names: tuple[str, ...]
    serve: Callable[..., Awaitable[object]]


def blocks_freed(name: str) -> OwnRows:
    """A row: no block of the decode worker is in use when the rows before it have ended."""

    async def serve(verifier: Verifier, cluster: LocalCluster, result: RowResult) -> None:
        leaks = await cluster.pool_leaks()
        result.check(leaks[0] if leaks else "free + cached = total", holds=not leaks)

    return OwnRows((name,), serve)


@dataclass(frozen=True, slots=True)
class Setup:
    """One cluster, and the rows that it serves in order.

    Args:
        transport: none: the rows need no cluster.
        overrides: settings over the verifier's; a function is called in a thread before the cluster starts.
        prompts: of its rows; none: the verifier's.
        prepare: is awaited before the first row.
        learns: the expected tokens of its prompts, before the first row.
    """

    title: str
    rows: tuple[VerifyRow | OwnRows, ...]
    transport: str | None
    checks: str = "full"
    overrides: Overrides | Callable[[], Overrides] = field(default_factory=dict)
    num_prefill: int = 1
    num_decode: int = 1
    prompts: tuple[VerifyPrompt, ...] = ()
    prepare: Callable[[Verifier, LocalCluster], Awaitable[object]] | None = None
    learns: bool = True

    @property
    def num_rows(self) -> int:
        return sum(len(row.names) for row in self.rows)


async def run_setup(verifier: Verifier, setup: Setup) -> None:
    """Start the setup's cluster and add its rows to the report. Workers that cannot start are a row that failed."""
    prompts = setup.prompts or tuple(verifier.prompts)
    if setup.learns and any(isinstance(row, VerifyRow) for row in setup.rows):
        await verifier.learn(prompts)
    verifier.progress(setup.title)
    overrides = await asyncio.to_thread(setup.overrides) if callable(setup.overrides) else setup.overrides
    async with AsyncExitStack() as stack:
        cluster: Any = None
        if setup.transport is not None:
            counts = {"num_prefill": setup.num_prefill, "num_inside": setup.num_decode}
            started = verifier.cluster(setup.transport, setup.checks, overrides, **counts)
            try:
                cluster = await stack.enter_async_context(started)
            except KvrelayError as error:
                return _report(verifier, RowResult(setup.title, total=1, note=f"{type(error).__name__}: {error}"))
        if setup.prepare is not None:
            await setup.prepare(verifier, cluster)
        for row in setup.rows:
            await run_row(verifier, cluster, row, prompts)


async def run_row(
    verifier: Verifier, cluster: Any, row: VerifyRow | OwnRows, prompts: Sequence[VerifyPrompt] = ()
) -> None:
    """Serve one row, or rows that are served together, and add the results to the report."""
    results, began_s = [RowResult(name) for name in row.names], time.monotonic()
    case = Case(verifier, cluster, results[0])
    if isinstance(row, VerifyRow) and not row.when(case):
        return
    verifier.progress(row.names[0])
    note = ""
    try:
        async with asyncio.timeout(ROW_TIMEOUT_S), AsyncExitStack() as stack:
            if isinstance(row, OwnRows):
                await row.serve(verifier, cluster, *results)
            else:
                if row.cold:
                    await reset_caches(cluster)
                for one in row.during:
                    await stack.enter_async_context(one(case))
                case.answers += await row.answers(case, prompts)
                case.judge(row.must)
    except TimeoutError:
        note = f"not served within {ROW_TIMEOUT_S:.0f} s"
    except KvrelayError as error:
        note = str(error) or type(error).__name__
    except Exception as error:  # a device's kernels raise errors of many types; other rows follow
        logger.exception("row %r", row.names[0])
        note = f"{type(error).__name__}: {error}"
    for result in results if note else ():
        result.check(note, holds=False)
    seconds = (time.monotonic() - began_s) / len(results)
    for result in results:
        _report(verifier, result, seconds)


def _report(verifier: Verifier, result: RowResult, seconds: float = 0.0) -> None:
    verifier.report.rows.append(result)
    verifier.on_row(result, seconds)
