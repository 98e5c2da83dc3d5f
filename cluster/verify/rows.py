"""Rows as data, and the one runner that serves them.

A row names prompts, how they are served, what is done to the workers meanwhile, and what the answers must be. Negative
controls are rows as well: damage that must be refused, or must change the answers, so that the comparison can fail.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field
from enum import Enum

from kvrelay.cluster.launch.local import LocalCluster
from kvrelay.cluster.verify.prompts import VerifyPrompt
from kvrelay.cluster.verify.report import RowResult
from kvrelay.cluster.verify.verifier import Overrides, ServedAnswer, Verifier, reset_caches
from kvrelay.plane.messages import SequenceRequest

ROW_TIMEOUT_S = 300.0
REFUSAL = "did not arrive as they left"  # of ChecksumMismatch


class Must(Enum):
    """What a row requires of the answers."""

    EQUAL = "the expected tokens"
    CHANGE = "other tokens in one answer at least"
    FAIL_CHECKSUM = "an error that names the checksum"
    ANYTHING = "only what the evidence requires"


Finding = Callable[[Sequence[ServedAnswer]], tuple[bool, str]]
"""(answers of the row) -> whether it is as required, and a note."""


@dataclass(slots=True)
class Evidence:
    """What a row requires beside its answers; filled while its prompts are served."""

    findings: list[Finding] = field(default_factory=list)

    def require(self, note: str = "", *, holds: bool) -> None:
        """Require something that does not depend on the answers."""
        self.findings.append(lambda answers: (holds, note))


During = Callable[[LocalCluster, Evidence], AbstractAsyncContextManager[object]]
"""What is done to the workers, or counted, while a row is served."""


def usual_request(verifier: Verifier, prompt: VerifyPrompt) -> SequenceRequest:
    return verifier.request(prompt)


@dataclass(frozen=True, slots=True)
class VerifyRow:
    """One row.

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
class BlocksFreed:
    """A row: no block of the decode worker is in use when the rows before it have ended."""

    name: str


@dataclass(frozen=True, slots=True)
class Setup:
    """One cluster, and the rows that it serves in order.

    Args:
        prompts: of its rows; none: the verifier's.
        prepare: is awaited before the first row.
    """

    title: str
    rows: tuple[VerifyRow | BlocksFreed, ...]
    transport: str
    checks: str = "full"
    overrides: Overrides = field(default_factory=dict)
    num_prefill: int = 1
    prompts: tuple[VerifyPrompt, ...] = ()
    prepare: Callable[[Verifier, LocalCluster], Awaitable[object]] | None = None


async def run_setup(verifier: Verifier, setup: Setup) -> None:
    """Start the setup's cluster and add its rows to the report. Raises KvrelayError when a worker cannot start."""
    prompts = setup.prompts or tuple(verifier.prompts)
    await verifier.learn(prompts)
    verifier.progress(setup.title)
    cluster_of = verifier.cluster(setup.transport, setup.checks, setup.overrides, num_prefill=setup.num_prefill)
    async with cluster_of as cluster:
        if setup.prepare is not None:
            await setup.prepare(verifier, cluster)
        for row in setup.rows:
            if isinstance(row, BlocksFreed):
                leaks = await cluster.pool_leaks()
                note = leaks[0] if leaks else "free + cached = total"
                verifier.report.row(row.name).check(note, holds=not leaks)
            elif row.when(cluster):
                await run_row(verifier, cluster, row, prompts)


async def run_row(
    verifier: Verifier, cluster: LocalCluster, row: VerifyRow, prompts: Sequence[VerifyPrompt]
) -> Sequence[ServedAnswer]:
    """Serve one row, add its result to the report, and return the answers."""
    verifier.progress(row.name)
    result, evidence = verifier.report.row(row.name), Evidence()
    chosen = [prompt for prompt in prompts if not row.prompts or prompt.name in row.prompts]
    if row.cold:
        await reset_caches(cluster)
    try:
        async with AsyncExitStack() as stack, asyncio.timeout(ROW_TIMEOUT_S):
            for during in row.during:
                await stack.enter_async_context(during(cluster, evidence))
            answers = await _serve(verifier, cluster, row, chosen)
    except TimeoutError:
        result.check(f"not served within {ROW_TIMEOUT_S:.0f} s", holds=False)
        return ()
    judge(result, row.must, answers, verifier.expected)
    for finding in evidence.findings:
        holds, note = finding(answers)
        result.check(note, holds=holds)
    return answers


async def _serve(
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
