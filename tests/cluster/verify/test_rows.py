"""The runner of rows: a row passes only if every answer and every piece of evidence is as required."""

from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest

from kvrelay.cluster.verify.prompts import VerifyPrompt
from kvrelay.cluster.verify.rows import REFUSAL, Must, OwnRows, Setup, VerifyRow, blocks_freed, run_row, run_setup
from kvrelay.cluster.verify.verifier import RowResult, ServedAnswer, VerifyReport
from kvrelay.errors import KvrelayError

PROMPTS = [VerifyPrompt("a", [1, 2]), VerifyPrompt("b", [3])]


class FakeVerifier:
    """Every prompt's expected answer is [5, 6, 7]; `answers` are what is served, by prompt."""

    def __init__(self, answers=None, *, leaks=()):
        self.prompts, self.expected = PROMPTS, {prompt.name: [5, 6, 7] for prompt in PROMPTS}
        self.answers, self.leaks = answers or {}, list(leaks)
        self.report, self.served, self.num_resets = VerifyReport("fake", []), [], 0

    def progress(self, what):
        """Nothing is shown."""

    def on_row(self, result, seconds):
        assert self.report.rows[-1] is result

    async def learn(self, prompts):
        assert list(prompts) == PROMPTS

    @asynccontextmanager
    async def cluster(self, transport, checks, overrides, **counts):
        yield self

    async def pool_leaks(self):
        return self.leaks

    members = ()

    async def serve(self, cluster, prompt, force, request):
        assert request is None
        self.served.append((prompt.name, force))
        found = self.answers.get(prompt.name, [5, 6, 7])
        error = found if isinstance(found, KvrelayError) else None
        return ServedAnswer(prompt, "", [[] if error else found], [[]], error=error)


async def row_of(answers, must=Must.EQUAL, **fields):
    verifier = FakeVerifier(answers)
    row = VerifyRow("row", must, during=fields.pop("during", ()), **fields)
    await run_row(verifier, verifier, row, PROMPTS)
    (result,) = verifier.report.rows
    return result


def refused():
    return KvrelayError(f"1 regions {REFUSAL}")


@pytest.mark.parametrize(
    ("answers", "must", "passed", "note"),
    [
        ({}, Must.EQUAL, "2/2", ""),
        ({"b": [5, 6, 8]}, Must.EQUAL, "1/2", "b: token 2 differs"),
        ({"b": [5, 6]}, Must.EQUAL, "1/2", "b: token 2 differs"),
        ({"a": KvrelayError("gone")}, Must.EQUAL, "1/2", "a: gone"),
        ({}, Must.CHANGE, "0/1", "UNDETECTED: the same answers"),
        ({"a": [5]}, Must.CHANGE, "1/1", "1 of 2 answers changed"),
        ({"a": KvrelayError("gone"), "b": [5]}, Must.CHANGE, "1/2", "a: gone"),
        ({"a": refused(), "b": refused()}, Must.FAIL_CHECKSUM, "2/2", f"1 regions {REFUSAL}"),
        ({"a": refused()}, Must.FAIL_CHECKSUM, "1/2", "answered with 3 tokens from a corrupt block"),
        ({"a": refused(), "b": KvrelayError("gone")}, Must.FAIL_CHECKSUM, "1/2", "gone"),
        ({"a": KvrelayError("gone")}, Must.ANYTHING, "0/1", "a: gone"),
    ],
)
async def test_a_row_requires_of_every_answer_what_it_must(answers, must, passed, note):
    result = await row_of(answers, must)
    assert (f"{result.passed}/{result.total}", result.note) == (passed, note)


@pytest.mark.parametrize("holds", [True, False])
async def test_right_answers_do_not_pass_without_the_evidence(holds):
    @asynccontextmanager
    async def during(case):
        yield
        case.result.check("seen", holds=holds)
        case.result.check("both", holds=len(case.answers) == 2)

    result = await row_of({}, during=(during,))
    assert (result.ok, result.passed, result.total, result.note) == (holds, 3 + holds, 4, "seen")


async def test_a_row_that_checks_nothing_fails():
    assert not (await row_of({}, prompts=("no such prompt",))).ok
    assert not RowResult("empty").ok and not VerifyReport("empty", []).ok


@pytest.mark.parametrize(
    ("error", "note"), [(KvrelayError("gone"), "gone"), (RuntimeError("refused"), "RuntimeError: refused")]
)
async def test_rows_that_compare_something_else_fail_together_with_their_error(error, note):
    async def serve(verifier, cluster, first, second):
        first.check("seen", holds=True)
        raise error

    verifier = FakeVerifier()
    await run_row(verifier, verifier, OwnRows(("first", "second"), serve))
    assert [(row.name, row.passed, row.total, row.note) for row in verifier.report.rows] == [
        ("first", 1, 2, note),
        ("second", 0, 1, note),
    ]


async def test_prompts_are_served_as_the_row_says():
    verifier = FakeVerifier()
    for force in ("remote", "local remote", "remote local"):
        await run_row(verifier, verifier, VerifyRow("row", force=force, together=True, num_first=1), PROMPTS)
    assert verifier.served == [
        ("a", "remote"),
        ("b", "remote"),
        ("a", "local"),
        ("b", "remote"),
        ("a", "remote"),
        ("b", "local"),
    ]


async def test_a_setup_serves_its_rows_in_order_and_leaves_out_those_that_do_not_apply():
    prepared = []

    async def prepare(verifier, cluster):
        prepared.append(verifier.served.copy())

    rows = (VerifyRow("first"), VerifyRow("never", when=lambda case: False), blocks_freed("freed"))
    verifier = FakeVerifier(leaks=["1 block is used"])
    await run_setup(verifier, Setup("setup", rows, "shm", prepare=prepare))
    assert prepared == [[]] and len(verifier.served) == 2
    assert [(row.name, row.ok, row.note) for row in verifier.report.rows] == [
        ("first", True, ""),
        ("freed", False, "1 block is used"),
    ]


async def test_the_first_requests_are_served_one_by_one_and_the_others_together():
    verifier, under_way = FakeVerifier(), []

    async def serve(cluster, prompt, force, request):
        under_way.append(prompt.name)
        answer = ServedAnswer(prompt, "", [[5, 6, 7]], [[]])
        if len(under_way) > 1:
            return answer
        import asyncio

        await asyncio.sleep(0)
        assert under_way == (["a"] if first else ["a", "b"])
        return answer

    verifier.serve = serve
    for first in (1, 0):
        under_way.clear()
        await run_row(verifier, verifier, VerifyRow("row", together=True, num_first=first), PROMPTS)
    assert all(row.ok for row in verifier.report.rows)


def test_scores_are_summed_log_probabilities_of_each_choice():
    entries = [[SimpleNamespace(logprob=-0.5), SimpleNamespace(logprob=-1.0)], []]
    assert ServedAnswer(PROMPTS[0], "r", [[1, 2], []], entries).scores == [-1.5, 0]
