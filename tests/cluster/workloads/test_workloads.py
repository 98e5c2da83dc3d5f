"""Traces and made-up loads: what the files say, what scaling keeps, and what each generator promises."""

import json
import statistics
from collections import defaultdict
from dataclasses import replace
from itertools import islice, pairwise, takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.cluster.commands.cli import run
from kvrelay.cluster.workloads.choose import (
    GENERATORS,
    load_trace,
    make_workload,
    outline,
    parse_azure,
    parse_burstgpt,
    parse_mooncake,
    parse_trace,
)
from kvrelay.cluster.workloads.conversations import AgentSpec, SessionSpec, conversation_entries, requests_per_start
from kvrelay.cluster.workloads.mixes import MIX, gamma_arrivals, mixed_entries, poisson_arrivals, switching_arrivals
from kvrelay.cluster.workloads.trace import (
    GrowingPrompt,
    TraceEntry,
    as_mooncake,
    at_rate,
    is_rounded,
    rate_of,
    scale_entries,
    spread_buckets,
    with_own_blocks,
)
from kvrelay.errors import ConfigError

pytestmark = pytest.mark.pure


MOONCAKE = [
    '{"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1]}\n',
    "\n",
    '{"timestamp": 3000, "input_length": 700, "output_length": 9, "hash_ids": [0, 7]}\n',
]
AZURE = [
    "TIMESTAMP,ContextTokens,GeneratedTokens\n",
    "2023-11-16 18:17:03.9799600,4808,10\n",
    "2023-11-16 18:17:05.4799600,110,27\n",
]
BURSTGPT = [
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n",
    "5,ChatGPT,472,18,490,Conversation log\n",
    "45,GPT-4,1087,230,1317,API log\n",
    "46,GPT-4,1087,0,1087,API log\n",
]
BURSTGPT_SESSIONS = [
    "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n",
    "10.0,a,3,ChatGPT,1100,100,1200,Conversation log\n",
    "40.0,b,3,ChatGPT,1100,100,1200,Conversation log\n",
    "70.5,a,3,ChatGPT,1600,50,1650,Conversation log\n",
    "90.0,a,3,ChatGPT,600,50,650,Conversation log\n",
    "99.0,,3,ChatGPT,600,50,650,API log\n",
]
SEED = 5


def entry(**fields):
    return TraceEntry(**{"arrival_s": 0.0, "input_tokens": 20, "output_tokens": 5, **fields})


def shared_blocks(first, second):
    """How many ids both begin with."""
    same = takewhile(lambda pair: pair[0] == pair[1], zip(first.hash_ids, second.hash_ids, strict=False))
    return sum(1 for _ in same)


# ---- arrivals


def test_poisson_arrivals_repeat_with_their_seed():
    def first(seed):
        return list(islice(poisson_arrivals(5.0, seed=seed), 50))

    assert first(1) == first(1) != first(2)


def test_poisson_arrivals_come_at_their_rate_with_exponential_gaps():
    arrivals = list(takewhile(lambda at: at < 1000, poisson_arrivals(20.0, seed=7)))
    gaps = [later - earlier for earlier, later in pairwise(arrivals)]
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert arrivals == sorted(arrivals)
    assert len(arrivals) == pytest.approx(20_000, rel=0.03)
    assert variance == pytest.approx(mean**2, rel=0.1)  # exponential: deviation = mean


@pytest.mark.parametrize("rate", [0.0, -1.0])
def test_a_rate_must_be_positive(rate):
    with pytest.raises(ConfigError):
        next(poisson_arrivals(rate, seed=0))


# ---- trace files


def test_a_mooncake_line_becomes_an_entry():
    found = list(parse_mooncake(MOONCAKE))
    assert found[0] == TraceEntry(0.0, 6758, 500, (0, 1), 512)
    assert found[1].arrival_s == 3.0


@pytest.mark.parametrize("line", ["{", "[]", '{"timestamp": 0}', '{"timestamp": 0, "input_length": "x"}'])
def test_a_broken_mooncake_line_is_named(line):
    with pytest.raises(ConfigError, match="line 4"):
        list(parse_mooncake([*MOONCAKE, line]))


def test_azure_times_start_at_zero_and_keep_microseconds():
    found = list(parse_azure(AZURE))
    assert [(one.arrival_s, one.input_tokens, one.output_tokens) for one in found] == [(0.0, 4808, 10), (1.5, 110, 27)]


def test_an_azure_file_with_other_columns_is_refused():
    with pytest.raises(ConfigError, match="ContextTokens"):
        list(parse_azure(["a,b\n", "1,2\n"]))


def test_a_broken_azure_row_is_named():
    with pytest.raises(ConfigError, match="line 4"):
        list(parse_azure([*AZURE, "yesterday,1,2\n"]))


def test_no_more_of_a_trace_is_read_than_asked_for():
    assert len(parse_trace([*MOONCAKE, "broken"], is_csv=False, limit=2)) == 2


def test_spreading_stays_inside_the_bucket_and_in_order():
    entries = [entry(arrival_s=at, input_tokens=n) for n, at in enumerate([0.0] * 40 + [3.0] * 40 + [9.0])]
    spread = spread_buckets(entries, bucket_s=3.0, seed=1)
    times = [one.arrival_s for one in spread]
    assert times == sorted(times)
    assert [one.input_tokens for one in spread] == [one.input_tokens for one in entries]
    assert all(old.arrival_s <= new.arrival_s < old.arrival_s + 3 for old, new in zip(entries, spread, strict=True))
    assert sum(times[:40]) / 40 == pytest.approx(1.5, abs=0.5)
    assert len(set(times)) == len(times)


def test_spreading_repeats_with_its_seed():
    entries = [entry()] * 5
    assert spread_buckets(entries, bucket_s=3, seed=1) == spread_buckets(entries, bucket_s=3, seed=1)
    assert spread_buckets(entries, bucket_s=3, seed=1) != spread_buckets(entries, bucket_s=3, seed=2)


def test_scaling_shrinks_lengths_blocks_and_times_alike():
    (found,) = scale_entries(
        [entry(arrival_s=8.0, input_tokens=1024, output_tokens=64)], time_scale=0.5, length_scale=0.25
    )
    assert (found.arrival_s, found.input_tokens, found.output_tokens, found.block_tokens) == (4.0, 256, 16, 128)


def test_scaling_cuts_to_the_limits_and_never_to_nothing():
    (found,) = scale_entries([entry(input_tokens=900, output_tokens=900)], max_input=100, max_output=7)
    assert (found.input_tokens, found.output_tokens) == (100, 7)
    (found,) = scale_entries([entry(input_tokens=3, output_tokens=1)], length_scale=0.01)
    assert (found.input_tokens, found.output_tokens) == (1, 1)


# ---- more of trace files


def test_mooncake_sessions_and_tenants_survive_the_way_through_a_file():
    written = as_mooncake(entry(arrival_s=1.5, hash_ids=(3,), session="s", tenant="t"))
    (found,) = parse_mooncake([written])
    assert (found.arrival_s, found.hash_ids, found.session, found.tenant) == (1.5, (3,), "s", "t")
    assert "session_id" not in json.loads(as_mooncake(entry()))


@pytest.mark.parametrize("field", ["timestamp", "input_length", "output_length"])
def test_negative_numbers_are_no_request(field):
    row = {"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": []}
    assert list(parse_mooncake([json.dumps(row)]))
    with pytest.raises(ConfigError, match="line 1"):
        list(parse_mooncake([json.dumps(row | {field: -1})]))


def test_azure_times_of_2024_carry_a_zone_and_may_have_no_fraction():
    rows = [AZURE[0], "2024-05-10 00:00:00.009930+00:00,2162,5\n", "2024-05-10 00:00:01+00:00,2,5\n"]
    assert [one.arrival_s for one in parse_azure(rows)] == [0.0, pytest.approx(0.99007)]


def test_a_burstgpt_row_becomes_an_entry_and_failures_are_left_out():
    first, second = parse_burstgpt(BURSTGPT)
    assert (first.arrival_s, first.input_tokens, first.output_tokens, first.tenant) == (0.0, 472, 18, "ChatGPT")
    assert (second.arrival_s, second.input_tokens, second.session) == (40.0, 1087, "")
    assert len(second.hash_ids) == 3 and not set(first.hash_ids) & set(second.hash_ids)


def test_a_burstgpt_conversation_that_grows_begins_as_before():
    first, other, longer, shorter, alone = parse_burstgpt(BURSTGPT_SESSIONS)
    assert [one.session for one in (first, other, longer, shorter, alone)] == ["a", "b", "a", "a", ""]
    assert shared_blocks(first, longer) == 2  # 1,100 tokens: two full blocks
    assert shared_blocks(first, other) == shared_blocks(first, shorter) == shared_blocks(shorter, alone) == 0


@pytest.mark.parametrize("row", ["x,GPT-4,1,1,2,API log", "50,GPT-4,1.5,1,2,API log", "50", "4,GPT-4,1,1,2,API log"])
def test_a_broken_burstgpt_row_is_named(row):
    with pytest.raises(ConfigError, match="line 5 is not a BurstGPT request"):
        list(parse_burstgpt([*BURSTGPT, row + "\n"]))


def test_a_burstgpt_file_without_a_column_is_refused():
    with pytest.raises(ConfigError, match="Log Type"):
        list(parse_burstgpt([BURSTGPT[0].replace(",Log Type", "")]))


def test_the_kind_of_csv_is_told_by_its_first_line():
    assert parse_trace(BURSTGPT, is_csv=True, limit=9)[0].input_tokens == 472
    assert parse_trace(["\ufeff" + AZURE[0], *AZURE[1:]], is_csv=True, limit=9)[0].input_tokens == 4808


# ---- whole traces


def test_a_rate_keeps_the_rhythm():
    slow = [entry(arrival_s=at) for at in (10.0, 11.0, 15.0)]
    fast = at_rate(slow, 4.0)
    assert [one.arrival_s for one in fast] == [0.0, pytest.approx(0.1), pytest.approx(0.5)]
    assert rate_of(fast) == pytest.approx(4.0)


@pytest.mark.parametrize("times", [(), (1.0,), (1.0, 1.0)])
def test_what_has_no_two_times_has_no_rate(times):
    with pytest.raises(ConfigError, match="two requests"):
        at_rate([entry(arrival_s=at) for at in times], 1.0)


@given(st.lists(st.tuples(st.integers(0, 5000), st.lists(st.integers(0, 40), max_size=3)), max_size=12))
def test_own_blocks_fill_what_is_missing_and_are_nobody_elses(shapes):
    entries = [entry(input_tokens=tokens, hash_ids=tuple(ids)) for tokens, ids in shapes]
    named = with_own_blocks(entries)
    given_ids = {block for one in entries for block in one.hash_ids}
    added = [block for old, new in zip(entries, named, strict=True) for block in new.hash_ids[len(old.hash_ids) :]]
    assert len(added) == len(set(added)) and not given_ids & set(added)
    for old, new in zip(entries, named, strict=True):
        assert new.hash_ids[: len(old.hash_ids)] == old.hash_ids
        assert len(new.hash_ids) == max(len(old.hash_ids), -(-new.input_tokens // 512))


def test_only_whole_buckets_are_spread(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text("".join(MOONCAKE))
    assert is_rounded(list(parse_mooncake(MOONCAKE)))
    first, second = load_trace(path, seed=1)
    assert 0 < first.arrival_s < 3 < second.arrival_s < 6
    assert load_trace(path, seed=1) == [first, second] != load_trace(path, seed=2)
    path.write_text("".join(MOONCAKE).replace("3000", "3004"))
    assert [one.arrival_s for one in load_trace(path, seed=1)] == [0.0, 3.004]


def test_buckets_that_are_milliseconds_off_are_spread_all_the_same():
    """As in Mooncake's own conversation trace."""
    entries = [entry(arrival_s=at) for at in (0.0, 2.999, 3.0, 3.001, 5.997, 6.003)]
    assert is_rounded(entries) and not is_rounded([*entries, entry(arrival_s=9.004)])
    times = [one.arrival_s for one in spread_buckets(entries, bucket_s=3.0, seed=1)]
    assert [int(time_s // 3) for time_s in times] == [0, 1, 1, 1, 2, 2]


# ---- prompts that grow


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=6))
def test_a_growing_prompt_keeps_its_full_blocks_and_nothing_else(growths):
    prompt, length, before = GrowingPrompt(iter(range(10_000))), 0, ()
    for growth in growths:
        was_full = length // 512
        length += growth
        ids = prompt.ids(length)
        assert len(ids) == -(-length // 512)
        assert ids[:was_full] == before[:was_full]
        assert not set(ids[was_full:]) & set(before[was_full:])
        before = ids


def test_forks_share_what_was_said_and_part_then():
    prompt = GrowingPrompt(iter(range(100)), shared=(70, 71))
    prompt.ids(4 * 512)
    first, second = prompt.branch().ids(6 * 512), prompt.branch().ids(6 * 512)
    assert first[:4] == second[:4] == prompt.ids(4 * 512) and first[:2] == (70, 71)
    assert not set(first[4:]) & set(second[4:])


# ---- generators


@pytest.mark.parametrize("name", GENERATORS)
def test_a_generator_repeats_with_its_seed_and_keeps_its_promises(name):
    made = make_workload(name, rate_per_s=5.0, limit=600, seed=1)
    assert made == make_workload(name, rate_per_s=5.0, limit=600, seed=1)
    assert made != make_workload(name, rate_per_s=5.0, limit=600, seed=2)
    assert len(made) == 600
    assert [one.arrival_s for one in made] == sorted(one.arrival_s for one in made)
    for one in made:
        assert one.output_tokens >= 1 and one.input_tokens >= 1
        assert len(one.hash_ids) == -(-one.input_tokens // 512) == len(set(one.hash_ids))


@pytest.mark.parametrize("name", GENERATORS)
def test_equal_blocks_stand_behind_equal_prefixes(name):
    """A block's id says all that comes before it, as a chained hash does."""
    before: dict[int, tuple[int, ...]] = {}
    for one in make_workload(name, rate_per_s=5.0, limit=600, seed=3):
        for index, block in enumerate(one.hash_ids):
            assert before.setdefault(block, one.hash_ids[:index]) == one.hash_ids[:index]


@pytest.mark.parametrize("name", ["agents", "bursty", "gamma", "poisson"])
def test_a_generator_has_its_rate_in_the_long_run(name):
    assert rate_of(make_workload(name, rate_per_s=5.0, limit=12_000, seed=4)) == pytest.approx(5.0, rel=0.12)


@pytest.mark.parametrize("name", GENERATORS)
@pytest.mark.parametrize("count", [500, 2000])
def test_a_made_trace_has_its_rate_from_its_first_request_to_its_last(name, count):
    """`kvrelay trace chat --rate 5` made 2.59 requests per second: conversations take minutes to grow."""
    made = make_workload(name, rate_per_s=5.0, limit=count)
    # chance and bursts move the rate of single requests; that of conversations is set
    assert rate_of(made) == pytest.approx(5.0, rel=1e-3 if name in ("chat", "agents") else 0.35)


def test_readers_pauses_keep_their_length_in_a_short_trace():
    """More conversations begin; none is hurried."""

    def pause_s(entries):
        before, pauses = {}, []
        for one in entries:
            if one.session in before:
                pauses.append(one.arrival_s - before[one.session])
            before[one.session] = one.arrival_s
        return statistics.median(pauses)

    spec = SessionSpec(starts_per_s=5.0)
    span_s = 600 / 5.0
    natural = [one for one in conversation_entries(spec, 3000) if one.arrival_s < span_s]
    assert pause_s(make_workload("chat", rate_per_s=5.0, limit=600)) == pytest.approx(pause_s(natural), rel=0.25)


def test_chat_comes_to_its_rate_when_sessions_have_grown():
    spec = SessionSpec(seed=SEED, think_s=(2.0, 0.5), tokens_per_s=400.0)
    made = conversation_entries(replace(spec, starts_per_s=10.0 / requests_per_start(spec)), 6000)
    assert rate_of(made[2000:]) == pytest.approx(10.0, rel=0.1)


def test_bursts_are_bursts():
    def variation(arrivals):
        gaps = [later - earlier for earlier, later in pairwise(islice(arrivals, 20_000))]
        mean = sum(gaps) / len(gaps)
        return (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5 / mean

    assert variation(poisson_arrivals(3.0, seed=SEED)) == pytest.approx(1.0, abs=0.05)
    assert variation(gamma_arrivals(3.0, variation=3.0, seed=SEED)) == pytest.approx(3.0, rel=0.1)
    assert variation(switching_arrivals(3.0, seed=SEED)) > 1.25


def test_siblings_arrive_together_with_their_parents_prompt():
    spec = AgentSpec(seed=SEED, fan_out_chance=0.5)
    families = defaultdict(list)
    for one in conversation_entries(spec, 800):
        task, _, sibling = one.session.removeprefix("task-").partition("-")
        families[task].append((sibling, one))
    pairs = 0
    for family in families.values():
        first_calls = {}
        for sibling, one in family:
            first_calls.setdefault(sibling, one)
        siblings = [one for name, one in first_calls.items() if name]
        for earlier, later in pairwise(siblings):
            if 0 < later.arrival_s - earlier.arrival_s <= 1.5 * spec.sibling_gap_s:
                pairs += 1
                assert shared_blocks(earlier, later) >= min(earlier.input_tokens, later.input_tokens) // 512 - 6
                assert shared_blocks(earlier, later) > 0
    assert pairs > 50
    assert not any("-" in one.session[5:] for one in conversation_entries(replace(spec, fan_out_chance=0.0), 800))


def test_tenants_share_no_block():
    owners = {}
    for one in make_workload("agents", rate_per_s=5.0, limit=1000, seed=SEED):
        for block in one.hash_ids:
            assert owners.setdefault(block, one.tenant) == one.tenant
    assert len(set(owners.values())) == 4


def test_a_mix_has_its_kinds_in_their_shares():
    made = mixed_entries(poisson_arrivals(1.0, seed=SEED), 8000, seed=SEED)
    for kind in MIX:
        share = sum(one.tenant == kind.name for one in made) / len(made)
        assert share == pytest.approx(kind.weight, abs=0.02)


def test_counting_what_comes_of_a_session_or_task():
    assert requests_per_start(SessionSpec(one_off_share=1.0)) == 1.0
    assert requests_per_start(SessionSpec()) > 1.5
    assert requests_per_start(AgentSpec(mean_steps=1.0, fan_out_chance=0.0)) == 1.0
    assert len({one.session for one in conversation_entries(SessionSpec(seed=1), 200)}) < 200


# ---- choosing


def test_a_workload_is_a_name_or_a_file(tmp_path):
    path = tmp_path / "azure.csv"
    path.write_text("".join(AZURE))
    first, second = make_workload(str(path), rate_per_s=10.0)
    assert second.arrival_s == pytest.approx(0.1)
    assert len(first.hash_ids) == 10 and not set(first.hash_ids) & set(second.hash_ids)
    assert len(make_workload(str(path), limit=1)) == 1


@pytest.mark.parametrize(
    ("source", "options", "problem"),
    [
        ("nothing", {}, "nor one of chat, agents"),
        ("chat", {}, "number of requests"),
        ("chat", {"limit": 0}, "at least one"),
        ("chat", {"limit": 5, "rate_per_s": 0.0}, "positive"),
    ],
)
def test_what_is_no_workload_is_refused(source, options, problem):
    with pytest.raises(ConfigError, match=problem):
        make_workload(source, **options)


def test_a_bad_file_is_named_with_its_line(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text(MOONCAKE[0] + "oops\n")
    with pytest.raises(ConfigError, match=r"t\.jsonl: trace line 2"):
        load_trace(path)
    path.write_text("")
    with pytest.raises(ConfigError, match="holds no requests"):
        load_trace(path)
    with pytest.raises(ConfigError, match="directory"):
        load_trace(tmp_path)


def test_an_outline_counts_what_an_endless_cache_would_hold():
    made = [
        entry(input_tokens=1000, hash_ids=(1, 2), tenant="a"),
        entry(arrival_s=1.0, input_tokens=1000, hash_ids=(1, 3), session="s"),
        entry(arrival_s=2.0, input_tokens=1000, hash_ids=(9, 2)),  # 2 is not behind 1 here
    ]
    about = outline(made)
    assert about["repeated_share"] == pytest.approx(512 / 3000)
    assert [about[name] for name in ("num_requests", "span_s", "num_sessions", "num_tenants")] == [3, 2.0, 1, 1]
    assert about["gap_variation"] == 0.0


def test_the_command_writes_a_trace_that_reads_back(tmp_path, capsys):
    def said(*arguments):
        code = run(["trace", *arguments])
        return code, capsys.readouterr().out

    code, text = said("bursty", "--requests", "30", "--rate", "4", "--seed", "2")
    assert code == 0
    path = tmp_path / "made.jsonl"
    path.write_text(text)
    made = make_workload("bursty", rate_per_s=4.0, limit=30, seed=2)
    again = make_workload(str(path))
    assert [(one.hash_ids, one.input_tokens, one.tenant) for one in again] == [
        (one.hash_ids, one.input_tokens, one.tenant) for one in made
    ]
    assert "30 in" in said(str(path), "--summary")[1]
    assert said("no-such-load")[0] == 2
