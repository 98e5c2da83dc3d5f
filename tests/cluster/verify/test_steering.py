"""Evidence that an engine did what a row steers it to: right answers without it fail the row."""

from types import SimpleNamespace

import pytest

from kvrelay.cluster.verify import suites
from kvrelay.cluster.verify.computing import sharing_unlike_kv
from kvrelay.cluster.verify.prompts import VerifyPrompt
from kvrelay.cluster.verify.rows import Case
from kvrelay.cluster.verify.steering import (
    accepting_every_draft,
    all_queued,
    always_drafting,
    corrupt_mixed,
    counted,
    has_native_cascade,
    is_mixed,
    mixed,
    preempting,
    prefix_read_once,
    served_in_order,
)
from kvrelay.cluster.verify.verifier import RowResult, ServedAnswer
from kvrelay.plane.reports import LoadReport


class FakeEngine:
    """An idle engine, whose load report has these figures."""

    def __init__(self, *, shares=True, **figures):
        self.figures = figures
        self.scheduler = SimpleNamespace(schedule=self.plain, grant_reservations=self.plain, running=[])
        self.backend = SimpleNamespace(
            compiled_kernels=SimpleNamespace(share=self.plain), shares_prefixes=lambda shape: shares
        )
        speculation = SimpleNamespace(begins=self.plain, lengths=self.plain, most=3)
        self.drafts = SimpleNamespace(speculation=speculation, model=None)
        self.model = SimpleNamespace(attention_shape=None)
        self.executor = SimpleNamespace(take_drafted=self.plain)
        self.reports = SimpleNamespace(load=self.load)

    def plain(self, *_):
        """Never called."""

    def load(self):
        return LoadReport(seq=1, **self.figures)


def cluster_of(engine, records=()):
    async def call(action):
        return action(engine)

    def find(request_id):
        return [record for record in records if record.request_id == request_id]

    worker = SimpleNamespace(thread=SimpleNamespace(engine=engine, call=call))
    return SimpleNamespace(inside=[worker], dispatcher=SimpleNamespace(requests=SimpleNamespace(find=find)))


async def findings(during, engine, answers=(), after=None, records=(), expected=None):
    """Whether what it requires holds when the figures become `after` meanwhile."""
    case = case_of(engine, answers, records, expected)
    async with during(case):
        engine.figures = engine.figures if after is None else after
    return [case.result.ok] if case.result.total else []


def case_of(engine, answers=(), records=(), expected=None):
    return Case(SimpleNamespace(expected=expected), cluster_of(engine, records), RowResult("row"), list(answers))


def answer(name, request_id="", tokens=(5, 6, 7), length=1):
    return ServedAnswer(VerifyPrompt(name, [1] * length), request_id, [list(tokens)], [[]])


@pytest.mark.parametrize(("after", "holds"), [({}, False), ({"tier_hit_tokens": 16}, True)])
async def test_a_counter_must_grow(after, holds):
    during = counted("tier_hit_tokens", note="{} tokens")
    assert await findings(during, FakeEngine(), after=after) == [holds]


@pytest.mark.parametrize(
    ("shares", "after", "holds"),
    [
        (True, {"cascade_saved_tokens": 9}, True),
        (True, {}, False),
        (False, {}, True),
        (False, {"cascade_saved_tokens": 9}, False),
    ],
)
async def test_a_prefix_is_read_once_where_the_backend_can(shares, after, holds):
    engine = FakeEngine(shares=shares)
    assert await findings(prefix_read_once(), engine, after=after) == [holds]
    assert has_native_cascade(case_of(engine)) is shares


@pytest.mark.parametrize(("drafted", "accepted", "holds"), [(9, 4, True), (9, 0, False), (9, 9, False), (0, 0, False)])
async def test_some_drafts_are_accepted_and_some_are_not(drafted, accepted, holds):
    after = {"drafted_tokens": drafted, "accepted_tokens": accepted}
    assert await findings(suites.PARTLY_ACCEPTED, FakeEngine(), after=after) == [holds]


@pytest.mark.parametrize(("figures", "answers", "holds"), [
    ({}, [], True), ({}, [answer("a")], False), ({"preempted": {"swap": 1}}, [answer("a")], False),
])  # fmt: skip
async def test_every_sequence_must_be_preempted(figures, answers, holds):
    assert await findings(preempting("swap"), FakeEngine(), answers, after=figures) == [holds]


def record(request_id, at_s, started_s=0.0):
    return SimpleNamespace(request_id=request_id, started_s=started_s, stages=[{"name": "reserved", "at_s": at_s}])


@pytest.mark.parametrize(("times", "holds"), [((1.0, 2.0), True), ((2.0, 1.0), False)])
async def test_requests_must_be_served_in_this_order(times, holds):
    records = [record("r1", times[0]), record("r2", times[1])]
    answers = [answer("first", "r1"), answer("second", "r2")]
    during = served_in_order("reserved", ("first", "second"))
    assert await findings(during, FakeEngine(), answers, records=records) == [holds]
    assert await findings(served_in_order("else", ("second", "first")), FakeEngine(), answers, records=records) == [
        False
    ]


def item(*, output, tokens, start):
    seq = SimpleNamespace(num_output=output, request=SimpleNamespace(num_prompt_tokens=100))
    return SimpleNamespace(seq=seq, num_tokens=tokens, start=start)


def test_a_step_is_mixed_when_it_decodes_and_computes_a_chunk_of_a_prompt():
    decode, chunk = item(output=3, tokens=1, start=102), item(output=0, tokens=30, start=64)
    last_of_prompt, anew = item(output=0, tokens=1, start=99), item(output=5, tokens=5, start=100)
    found = [
        is_mixed(SimpleNamespace(work=work))
        for work in (
            (decode, chunk),
            (decode,),
            (chunk,),
            (last_of_prompt, chunk),
            (decode, last_of_prompt),
            (decode, anew),
        )
    ]
    assert found == [True, False, False, False, False, False]


async def test_without_a_mixed_step_the_row_and_its_control_fail():
    assert await findings(mixed(all_queued(1)), FakeEngine()) == [False]
    during = corrupt_mixed(all_queued(1), "long")
    assert await findings(during, FakeEngine(), [answer("long")], expected={"long": [5, 6, 7]}) == [False]


async def test_every_steered_engine_is_afterwards_as_it_was():
    engine = FakeEngine()
    case = case_of(engine, expected={})
    steered = (
        always_drafting(), accepting_every_draft(), sharing_unlike_kv(), preempting("swap"), mixed(all_queued(1)),
        served_in_order("reserved", ()),
    )  # fmt: skip
    for during in steered:
        async with during(case):
            pass
    plain = (
        engine.scheduler.schedule,
        engine.scheduler.grant_reservations,
        engine.backend.compiled_kernels.share,
        engine.executor.take_drafted,
        engine.drafts.speculation.begins,
        engine.drafts.speculation.lengths,
    )
    assert all(one == engine.plain for one in plain)
    async with always_drafting()(case):
        assert engine.drafts.speculation.begins(4) and engine.drafts.speculation.lengths(4, [None] * 2) == [3, 3]
