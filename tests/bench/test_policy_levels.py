"""bench/router/policies.py: the levels are what they say, loads are counted right, and searches find the best."""

import json
import re
from dataclasses import replace

import pytest

from bench.router import policies
from bench.router.levels import CONTENDERS, LEVELS, PEERS, Contender, Targets, scenario_of
from bench.router.search import LengthTally, Results, Search, highest, simulated
from kvrelay.cluster.simulator.engine import SimulatedEngine
from kvrelay.cluster.simulator.ingress import SimulatedIngress
from kvrelay.cluster.simulator.requests import SimulatedRequest
from kvrelay.cluster.simulator.simulation import Simulation
from tests.cluster.simulator.simulator_cases import chats, entry, profile

pytestmark = [pytest.mark.pure, pytest.mark.slow]

WORKERS = profile(tier_blocks={"host": 4096}, load_bytes_per_s={"host": 1e9}, num_blocks=2048)
TIGHT = Targets(0.2, 0.02, False)  # of which most prompts of `overload()` are beyond
PEER = next(one for one in CONTENDERS.values() if one.policy.startswith(PEERS))


def overload():
    """Long prompts, then short ones, all at once: more than the workers compute in time."""
    long = [entry(index * 0.001, 600) for index in range(40)]
    return long + [entry(0.5 + index * 0.001, 60) for index in range(200)]


def scenario(level, contender, *, prefill=2, workers=4, variant=None, wanted=TIGHT, pairs=()):
    of = CONTENDERS[contender] if isinstance(contender, str) else contender
    return scenario_of(
        LEVELS[level], of, variant or {}, wanted, WORKERS, prefill=prefill, workers=workers, pairs=tuple(pairs)
    )


@pytest.fixture
def watched(monkeypatch):
    """(paths of all decisions; by worker, the requests whose first token came, in order), as they happen."""
    paths, firsts = [], {}
    route, sample = SimulatedIngress.route, SimulatedEngine._sample

    def watch(self, request):
        choice = route(self, request)
        paths.append(getattr(choice, "path", type(choice).__name__))
        return choice

    def watch_sample(self, plan, events):
        seen = firsts.setdefault(id(self), [])
        seen += [item.seq for item in plan.work if item.samples and item.seq.num_output == 0]
        sample(self, plan, events)

    monkeypatch.setattr(SimulatedIngress, "route", watch)
    monkeypatch.setattr(SimulatedEngine, "_sample", watch_sample)
    return paths, firsts


def run_whole(made, entries):
    """The simulation, not ended early."""
    return Simulation(made, WORKERS, entries).run()


# ---- level a


@pytest.mark.parametrize("has_slo", [False, True])
@pytest.mark.parametrize("contender", ["joint", "dynamo", "llm_d", "mooncake, no store", "least_loaded"])
def test_placement_alone_defers_refuses_and_computes_locally_nothing(watched, contender, has_slo):
    paths, _ = watched
    made = scenario("a", contender, wanted=TIGHT._replace(has_slo=has_slo))
    simulation = run_whole(made, overload())
    assert set(paths) == {"disaggregated"} and len(paths) == 240
    assert simulation.tally.outcomes == {"done": 240}
    assert sum(one.stats.deferred for one in simulation.ingresses) == 0


@pytest.mark.parametrize("contender", ["joint", "queue + 16 x prefill"])
def test_placement_alone_is_first_come_first_served_at_every_worker(watched, contender):
    _, firsts = watched
    run_whole(scenario("a", contender), overload())
    served = [[seq.arrival for seq in seqs] for seqs in firsts.values()]
    assert sum(map(len, served)) >= 240
    assert all(arrivals == sorted(arrivals) for arrivals in served)


def test_with_the_rules_short_prompts_pass_overdue_ones_whoever_places_them(watched):
    _, firsts = watched
    run_whole(scenario("b", PEER, wanted=Targets(1.0, 0.1, True), pairs=["slo.on_miss=queue"]), overload())
    served = [[seq.arrival for seq in seqs] for seqs in firsts.values()]
    assert any(arrivals != sorted(arrivals) for arrivals in served)


# ---- levels b and c


@pytest.mark.parametrize("contender", ["joint", "queue + 16 x prefill"])
def test_with_the_rules_overdue_requests_are_deferred_whoever_places_them(contender):
    entries = [entry(index * 0.001, 600, 200) for index in range(300)]
    made = scenario("b", contender, wanted=Targets(0.2, 0.02, True), pairs=["slo.on_miss=queue"])
    assert sum(one.stats.deferred for one in run_whole(made, entries).ingresses) > 0


def test_a_cluster_that_knows_targets_refuses_for_whoever_places():
    made = scenario("b", "least_loaded", wanted=TIGHT._replace(has_slo=True))
    assert run_whole(made, overload()).tally.outcomes["slo"] > 0


@pytest.mark.parametrize(
    ("level", "contender", "expected"),
    [
        ("a", "joint", {"disaggregated"}),
        ("b", "joint", {"disaggregated", "local"}),
        ("b", "llm_d", {"disaggregated"}),
        ("c", "llm_d", {"disaggregated", "local"}),
        ("b", "dynamo", {"disaggregated"}),
        ("c", "dynamo", {"disaggregated", "local"}),
        ("c", "sglang", {"disaggregated"}),
    ],
)
def test_who_computes_prompts_where_they_are_decoded(watched, level, contender, expected):
    paths, _ = watched
    variant = LEVELS[level].variants(CONTENDERS[contender])[0]
    again = [
        entry(index * 0.5, 200, ids=range(12)) for index in range(12)
    ]  # one prompt; the last 8 tokens are no block
    run_whole(scenario(level, contender, variant=variant), again)
    assert set(paths) == expected


def test_aggregated_workers_are_the_split_without_prefill_workers(watched):
    paths, _ = watched
    for level, contender in (("b", "least_loaded"), ("c", "dynamo"), ("b", "joint")):
        run_whole(scenario(level, contender, prefill=0), chats(40))
    assert set(paths) == {"local"}


def test_a_contender_without_mechanisms_of_its_own_is_the_same_at_b_and_c():
    assert scenario("b", "sglang") == scenario("c", "sglang")
    assert scenario("b", "dynamo") != scenario("c", "dynamo", variant=CONTENDERS["dynamo"].own[0])


def test_mooncakes_rejection_has_the_targets_as_limits_at_c_alone(watched):
    paths, _ = watched
    run_whole(scenario("b", "mooncake, no store", wanted=Targets(5.0, 0.1, False)), overload())
    assert "RoutingRefusal" not in paths
    simulation = run_whole(scenario("c", "mooncake, no store", wanted=Targets(0.3, 0.1, False)), overload())
    assert simulation.tally.outcomes["overloaded"] == paths.count("RoutingRefusal") > 20


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("contender", CONTENDERS)
def test_all_have_the_same_memory_and_stores_only_where_fetches_are_assumed(level, contender):
    made = scenario(level, contender)
    assert made.prefill_pool_tokens is made.decode_pool_tokens is None  # the profile's
    settings = made.product_settings()
    assert settings.cache.is_shared == CONTENDERS[contender].has_store == (contender in ("mooncake", "joint, store"))


def test_what_others_hold_is_fetched_where_there_is_a_store(watched):
    entries = chats(120, every_s=0.02)
    with_store, without = (run_whole(scenario("a", name), entries) for name in ("mooncake", "mooncake, no store"))
    assert with_store.tally.tier_tokens > 0 == without.tally.tier_tokens


# ---- figures


def test_figures_are_shares_of_all_requests_and_by_length():
    made = scenario("a", Contender("round_robin"), wanted=Targets(1.0, 1.0, False))
    stopped: list[int] = []
    tally = LengthTally(made, 20, lambda: stopped.append(1))
    jobs = [SimulatedRequest(index, 0.0, 100 * (20 - index), 1, ()) for index in range(20)]
    for index, job in enumerate(jobs):  # the longest first; it is late, and the second one is refused
        times = {"first_s": 2.0 if index == 0 else 0.5, "end_s": 2.0, "outcome": "overloaded" if index == 1 else "done"}
        tally.add(replace(job, **times))
    found = tally.figures()
    assert found["holds"] and not stopped and found["in_time"] == 0.9
    assert found["tokens_in_time"] == pytest.approx((21_000 - 3900) / 21_000)
    assert found["in_time_by_length"] == [1.0] * 9 + [0.0]
    assert found["ttft_s"]["p50"] == 0.5
    tally.add(replace(jobs[0], outcome="error"))
    assert stopped and not tally.holds


def test_a_load_that_misses_too_much_is_not_run_to_its_end():
    made = scenario("a", "least_loaded", wanted=Targets(0.2, 0.001, False))
    _, tally = simulated(made, WORKERS, chats(2000, every_s=1.0), is_whole=False)
    assert not tally.holds and len(tally.lengths) == 201


# ---- searches


@pytest.mark.parametrize("most", [-40, -9, -1, 0, 1, 7, 8, 30])
def test_the_highest_step_that_holds_is_found(most):
    assert highest(lambda step: step <= most, 0) == most


def test_nothing_is_found_where_nothing_holds():
    assert highest(lambda step: False, 0) is None


@pytest.mark.parametrize("best_split", [0, 1, 3, 8, 11, 15])
def test_the_best_split_is_found_and_most_others_dismissed_by_one_simulation(best_split):
    ran = []

    def holds(split, variant, step):
        ran.append((split, variant, step))
        return step <= 20 - abs(split - best_split) + 3 * (variant == 1)

    search = Search(lambda *at: holds(*at))
    search.over_splits(range(2), 8, 16, None)
    assert search.best == (best_split, 1, 23)
    assert len({at[:2] for at in ran}) < 24 and len(set(ran)) < 80


def test_given_splits_are_the_only_ones_tried():
    tried = set()
    search = Search(lambda split, variant, step: tried.add(split) or step <= split)
    search.over_splits([0], 8, 16, [2, 6])
    assert (search.best, tried) == ((6, 0, 6), {2, 6})


def test_what_was_found_is_not_run_again(tmp_path):
    path = tmp_path / "found.json"
    assert Results(path).get(["a", 1], lambda: {"x": 1.5}) == {"x": 1.5}
    again = Results(path)
    assert again.get(["a", 1], lambda: pytest.fail("it is there")) == {"x": 1.5}
    assert again.get(["a", 2], lambda: 3) == 3
    assert [json.loads(line)[1] for line in path.read_text().splitlines()] == [{"x": 1.5}, 3]


def test_a_whole_comparison_prints_a_table_for_each_level(monkeypatch, capsys, tmp_path):
    made = tmp_path / "tiny.json"
    made.write_text(WORKERS.text())
    trace = tmp_path / "lengths.csv"
    rows = [f"2023-11-16 18:00:{second:02}.0000000,{300 + 10 * second},5" for second in range(60)]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    arguments = [str(trace), "--profile", str(made), "--workers", "2", "--split", "1", "--seeds", "0"]
    arguments += [
        "--levels",
        "a",
        "b",
        "--targets",
        "0.3/0.1",
        "--precision",
        "0.5",
        "--start",
        "2",
        "--json",
        str(tmp_path / "found.json"),
    ]
    monkeypatch.setattr("sys.argv", ["policies", *arguments, "--contenders", "joint", "least_loaded"])
    policies.main()
    first = capsys.readouterr()
    headings = [line for line in first.out.splitlines() if line.startswith("## ")]
    assert [heading.split("(")[1][0] for heading in headings] == ["a", "b", "b"]
    assert "| joint, SLO |" in first.out and "x least_loaded's capacity" in first.out
    placed, *under_rules = first.out.split("\n## ")[1:]
    assert not re.search(r"\d%, [\d.]+ s \|", placed)  # at 1.5 times the capacity
    assert all(len(re.findall(r"\d%, [\d.]+ s \|", table)) == 2 for table in under_rules)
    policies.main()
    again = capsys.readouterr()
    assert again.out == first.out and not again.err
