"""`kvrelay plan`: a trace as a load, and what is said of it."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from kvrelay.cluster.autoscaling.worker_model import model_of
from kvrelay.cluster.commands.plan import burstiness, busy_rate, cached_tokens, measured, planned
from kvrelay.cluster.profiles.profile import PUBLISHED, load_profile
from kvrelay.cluster.workloads.trace import TraceEntry
from kvrelay.errors import ConfigError
from kvrelay.router.planning.types import CountLimits, PlanningTarget

pytestmark = pytest.mark.pure


PROFILE = PUBLISHED / "llama-3.1-8b-h100-bf16.json"
TARGET = PlanningTarget(2.0, 0.05)


def entry(at_s: float, *blocks: int, tokens: int = 0, output: int = 10) -> TraceEntry:
    return TraceEntry(at_s, tokens or 16 * len(blocks) or 16, output, tuple(blocks), block_tokens=16)


def invoked(*arguments: object) -> dict:
    import typer

    from kvrelay.cluster.commands.plan import command

    app = typer.Typer()
    app.command()(command)
    result = CliRunner().invoke(app, [str(each) for each in (*arguments, "--json")])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return dict(json.loads(result.stdout))


# ---- a trace as a load


def test_hits_are_leading_blocks_and_never_the_whole_prompt():
    entries = [entry(0, 1, 2, 3), entry(1, 1, 2, 9), entry(2, 9, 8), entry(3, 1, 2, 3)]
    assert cached_tokens(entries, 10_000) == [0, 32, 16, 47]


def test_what_was_not_used_for_longest_is_forgotten_first_and_the_end_before_the_beginning():
    entries = [entry(0, 1, 2, 3), entry(1, 7), entry(2, 1, 2, 3)]
    assert cached_tokens(entries, 64) == [0, 0, 47]
    assert cached_tokens(entries, 48) == [0, 0, 32]  # block 3 has gone for block 7
    assert cached_tokens(entries, 0) == [0, 0, 0]


@given(st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=5, unique=True), min_size=1, max_size=30))
def test_a_larger_cache_never_hits_less(prompts: list[list[int]]):
    """LRU has no anomaly; a prompt's blocks are used from its last to its first."""
    entries = [entry(float(index), *blocks) for index, blocks in enumerate(prompts)]
    hits = [sum(cached_tokens(entries, size)) for size in (0, 64, 128, 1000)]
    assert hits == sorted(hits)


def test_the_busy_rate_is_of_a_minute_that_one_in_twenty_is_busier_than():
    steady = [entry(float(second)) for second in range(6001)]
    assert busy_rate(steady) == pytest.approx(1.0)
    rush = sorted(
        steady + [entry(second / 10) for second in range(6000)], key=lambda each: each.arrival_s
    )  # 10 minutes
    assert busy_rate(rush) == pytest.approx(11.0)
    one_minute = sorted(steady + [entry(second / 10) for second in range(600)], key=lambda each: each.arrival_s)
    assert busy_rate(one_minute) == pytest.approx(1.0)
    assert busy_rate(steady[:61]) == pytest.approx(61 / 60)


def test_pairs_are_burstier_than_an_even_stream():
    even = [entry(float(second)) for second in range(200)]
    tens = [entry(10.0 * (second // 10)) for second in range(200)]
    assert burstiness(even, 2.0) == 0.25  # its floor
    assert burstiness(tens, 2.0) > 4.0


def test_prefill_workers_and_the_hits_of_their_pools_fit_each_other():
    entries = [
        TraceEntry(index / 40, 1600, 5, tuple(range(index % 50 * 100, index % 50 * 100 + 100)), block_tokens=16)
        for index in range(3000)
    ]
    model = model_of(load_profile(PROFILE))
    cache_tokens, load, wanted = planned(entries, model, TARGET, CountLimits())
    assert wanted.prefill is not None
    assert cache_tokens == wanted.prefill * model.pool_tokens
    assert load.cached_share == measured(entries, cache_tokens, TARGET).cached_share > 0.9


# ---- the command


def test_a_stated_load_is_planned_for():
    few = invoked(PROFILE, "--rate", 5, "--input", 2000, "--output", 200)
    many = invoked(PROFILE, "--rate", 500, "--input", 2000, "--output", 200)
    assert few["prefill"] == few["decode"] == 1
    assert many["prefill"] > 10 and many["decode"] > 3
    assert many["comparison"]["workers"] == many["prefill"] + many["decode"]
    assert many["comparison"]["split_rate"] >= 500


def test_more_is_cached_and_fewer_compute():
    stated = (PROFILE, "--rate", 300, "--input", 4000, "--output", 50)
    assert invoked(*stated, "--cached", 0.8)["prefill"] < invoked(*stated)["prefill"]


def test_it_says_no_where_a_chat_has_all_the_time_and_yes_where_tokens_must_come_fast():
    no = invoked(PROFILE, "--rate", 200, "--input", 200, "--output", 300, "--tpot", 0.1)
    assert no["verdict"].startswith("do not disaggregate")
    assert no["aggregated"] <= no["prefill"] + no["decode"]
    yes = invoked(PROFILE, "--rate", 10, "--input", 12000, "--output", 300, "--tpot", 0.0084)
    assert yes["verdict"].startswith("disaggregate")
    assert yes["aggregated"] is None or yes["aggregated"] > yes["prefill"] + yes["decode"]


def test_where_no_number_helps_it_says_so():
    never = invoked(PROFILE, "--rate", 5, "--input", 2000, "--output", 200, "--tpot", 0.001)
    assert (never["decode"], never["aggregated"], never["batch"]) == (None, None, None)
    assert never["verdict"].startswith("no number of workers")


def test_a_generated_load_is_planned_for():
    report = invoked(PROFILE, "agents", "--rate", 20, "--requests", 400)
    assert report["load"]["cached_share"] > 0.3
    assert "400 requests" in report["notes"][0]


def test_prompts_that_are_always_late_are_counted():
    report = invoked(PROFILE, "--rate", 1, "--input", 60_000, "--output", 20, "--ttft", 1)
    assert report["hopeless_share"] > 0.4


@pytest.mark.parametrize(
    "arguments",
    [
        (PROFILE,),
        (PROFILE, "--rate", 1),
        (PROFILE, "agents", "--input", 5),
        (PROFILE, "/nowhere.jsonl"),
        ("/nowhere.json",),
    ],
)
def test_what_cannot_be_planned_is_refused(arguments: tuple[object, ...]):
    with pytest.raises(ConfigError):
        invoked(*arguments)


@pytest.mark.parametrize("profile", sorted(PUBLISHED.glob("*.json")), ids=lambda path: path.stem)
def test_every_ready_profile_can_be_planned_with(profile: Path):
    report = invoked(profile, "--rate", 1, "--input", 1000, "--output", 100)
    assert report["prefill"] and report["decode"] and report["aggregated"]


def test_the_table_holds_what_json_does():
    import typer

    from kvrelay.cluster.commands.plan import command

    app = typer.Typer()
    app.command()(command)
    result = CliRunner().invoke(app, [str(PROFILE), "--rate", "5", "--input", "2000", "--output", "200"])
    assert result.exit_code == 0
    assert "aggregated" in result.stdout and "disaggregate" in result.stdout
