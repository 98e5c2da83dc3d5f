"""Rows as data, and the one runner that serves them.

A row names prompts, how they are served, what is done to the workers meanwhile, and what the answers must be. Negative
controls are rows as well: damage that must be refused, or must change the answers, so that the comparison can fail.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Concatenate, ParamSpec

from kvrelay.cluster.launch.local import LocalCluster
from kvrelay.cluster.verify.prompts import VerifyPrompt
from kvrelay.cluster.verify.verifier import Overrides, RowResult, ServedAnswer, Verifier, reset_caches
from kvrelay.errors import KvrelayError
from kvrelay.plane.messages import SequenceRequest

P = ParamSpec("P")
ROW_TIMEOUT_S = 300.0
REFUSAL = "did not arrive as they left"  # of ChecksumMismatch


class Must(Enum):
    """What a row requires of the answers."""

    EQUAL = "the expected tokens"
    CHANGE = "other tokens in one answer at least"
    FAIL_CHECKSUM = "an error that names the checksum"
    ANYTHING = "only what the evidence requires"


Finding = Callable[[Sequence[ServedAnswer]], tuple[bool, str]]
"""(answers of the row) -> whether it is as required, and a note. Called in a thread: it may compute for long."""


@dataclass(slots=True)
class Evidence:
    """What a row requires beside its answers; filled while its prompts are served."""

    findings: list[Finding] = field(default_factory=list)

    def require(self, note: str = "", *, holds: bool) -> None:
        """Require something that does not depend on the answers."""
        self.findings.append(lambda answers: (holds, note))

    async def judge(self, result: RowResult, answers: Sequence[ServedAnswer] = ()) -> None:
        for finding in self.findings:
            holds, note = await asyncio.to_thread(finding, answers)
            result.check(note, holds=holds)


During = Callable[[LocalCluster, Evidence], AbstractAsyncContextManager[object]]
"""What is done to the workers, or counted, while a row is served."""


def during(steps: Callable[Concatenate[LocalCluster, Evidence, P], AsyncIterator[None]]) -> Callable[P, During]:
    """Decorates a generator that yields once, while the row is served; its further parameters become the only ones."""
    context = asynccontextmanager(steps)

    def with_parameters(*args: P.args, **kwargs: P.kwargs) -> During:
        return lambda cluster, evidence: context(cluster, evidence, *args, **kwargs)

    return with_parameters


def usual_request(verifier: Verifier, prompt: VerifyPrompt) -> SequenceRequest:
    return verifier.request(prompt)


@dataclass(frozen=True, slots=True)
class VerifyRow:
    """One row that compares tokens.

    Args:
        prompts: names; none: all prompts of the setup.
        force: where prompts are prefilled: `remote`, `local`, `alternate` (every other one), or by prompt.
        cold: the workers' caches are reset before.
        together: all requests are sent concurrently, after the first `num_first` of them one by one.
        request: the request of a prompt, if not the usual one.
        when: whether the row applies to a cluster.
    """

    name: str
    must: Must = Must.EQUAL
    prompts: tuple[str, ...] = ()
    force: str | Callable[[VerifyPrompt], str] = "remote"
    cold: bool = False
    together: bool = False
    num_first: int = 0
    during: tuple[During, ...] = ()
    request: Callable[[Verifier, VerifyPrompt], SequenceRequest] = usual_request
    when: Callable[[LocalCluster], bool] = lambda cluster: True


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
    """

    title: str
    rows: tuple[VerifyRow | OwnRows, ...]
    transport: str | None
    checks: str = "full"
    overrides: Overrides | Callable[[], Overrides] = field(default_factory=dict)
    num_prefill: int = 1
    prompts: tuple[VerifyPrompt, ...] = ()
    prepare: Callable[[Verifier, LocalCluster], Awaitable[object]] | None = None

    @property
    def num_rows(self) -> int:
        return sum(len(row.names) if isinstance(row, OwnRows) else 1 for row in self.rows)


async def run_setup(verifier: Verifier, setup: Setup) -> None:
    """Start the setup's cluster and add its rows to the report. Raises KvrelayError when a worker cannot start."""
    prompts = setup.prompts or tuple(verifier.prompts)
    if any(isinstance(row, VerifyRow) for row in setup.rows):
        await verifier.learn(prompts)
    verifier.progress(setup.title)
    overrides = await asyncio.to_thread(setup.overrides) if callable(setup.overrides) else setup.overrides
    if setup.transport is None:
        for row in setup.rows:
            await run_row(verifier, None, row)
        return
    async with verifier.cluster(setup.transport, setup.checks, overrides, num_prefill=setup.num_prefill) as cluster:
        if setup.prepare is not None:
            await setup.prepare(verifier, cluster)
        for row in setup.rows:
            if isinstance(row, OwnRows) or row.when(cluster):
                await run_row(verifier, cluster, row, prompts)


async def run_row(
    verifier: Verifier, cluster: Any, row: VerifyRow | OwnRows, prompts: Sequence[VerifyPrompt] = ()
) -> list[RowResult]:
    """Serve one row, or rows that are served together, and add the results to the report."""
    names, began_s = row.names if isinstance(row, OwnRows) else (row.name,), time.monotonic()
    verifier.progress(names[0])
    results = [RowResult(name) for name in names]
    try:
        async with asyncio.timeout(ROW_TIMEOUT_S):
            if isinstance(row, OwnRows):
                await row.serve(verifier, cluster, *results)
            else:
                await _serve_row(verifier, cluster, row, prompts, results[0])
    except (KvrelayError, TimeoutError) as error:
        note = str(error) if isinstance(error, KvrelayError) else f"not served within {ROW_TIMEOUT_S:.0f} s"
        for result in results:
            result.check(note, holds=False)
    seconds = (time.monotonic() - began_s) / len(results)
    for result in results:
        verifier.report.rows.append(result)
        verifier.on_row(result, seconds)
    return results


async def _serve_row(
    verifier: Verifier, cluster: LocalCluster, row: VerifyRow, prompts: Sequence[VerifyPrompt], result: RowResult
) -> None:
    evidence = Evidence()
    chosen = [prompt for prompt in prompts if not row.prompts or prompt.name in row.prompts]
    if row.cold:
        await reset_caches(cluster)
    async with AsyncExitStack() as stack:
        for one in row.during:
            await stack.enter_async_context(one(cluster, evidence))
        answers = await _answers(verifier, cluster, row, chosen)
    judge(result, row.must, answers, verifier.expected)
    await evidence.judge(result, answers)


async def _answers(
    verifier: Verifier, cluster: LocalCluster, row: VerifyRow, prompts: Sequence[VerifyPrompt]
) -> list[ServedAnswer]:
    def serve(index: int, prompt: VerifyPrompt) -> Awaitable[ServedAnswer]:
        force = row.force(prompt) if callable(row.force) else row.force
        if force == "alternate":
            force = "remote" if index % 2 else "local"
        return verifier.serve(cluster, prompt, force, row.request(verifier, prompt))

    requests = list(enumerate(prompts))
    num_first = row.num_first if row.together else len(requests)
    answers = [await serve(index, prompt) for index, prompt in requests[:num_first]]
    return answers + await asyncio.gather(*(serve(index, prompt) for index, prompt in requests[num_first:]))


def judge(result: RowResult, must: Must, answers: Sequence[ServedAnswer], expected: dict[str, list[int]]) -> None:
    """Compare a row's answers with what it requires."""
    if must is Must.FAIL_CHECKSUM:
        for answer in answers:
            note = str(answer.error or f"answered with {len(answer.tokens)} tokens from a corrupt block")
            result.check(note, holds=answer.error is not None and REFUSAL in note)
        return
    for answer in answers:
        if answer.error is not None:
            result.check(f"{answer.prompt.name}: {answer.error}", holds=False)
        elif must is Must.EQUAL:
            result.compare(answer.prompt.name, expected[answer.prompt.name], answer.tokens)
    if must is Must.CHANGE:
        changed = sum(answer.tokens != expected[answer.prompt.name] for answer in answers)
        note = f"{changed} of {len(answers)} answers changed" if changed else "UNDETECTED: the same answers"
        result.check(note, holds=changed > 0)
