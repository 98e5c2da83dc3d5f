"""The planner inside Serve: what replicas report, the policy that Serve calls, and how workers are given up."""

import asyncio
import pickle
from copy import deepcopy
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.cluster.autoscaling import feed
from kvrelay.cluster.autoscaling.policies import LOAD_TIMEOUT_S, PlannerPolicy, worker_name
from kvrelay.cluster.autoscaling.retirement import GRACE_S, RetirementCandidate, Retiring, victims
from kvrelay.cluster.autoscaling.room import RETRY_S, WAIT_S, Room
from kvrelay.cluster.autoscaling.start_times import GAIN, StartTimes
from kvrelay.cluster.autoscaling.worker_model import LearnedModel, model_of, planner_settings
from kvrelay.cluster.deployments.app import replica_arguments
from kvrelay.cluster.deployments.serve_config import PLANNER_POLICY_PATH, scaled, serve_config
from kvrelay.cluster.deployments.worker import DecodeReplica
from kvrelay.cluster.errors import WorkerRetired
from kvrelay.cluster.profiles.profile import find_profile
from kvrelay.cluster.registry.members import TIMEOUT_S, Order, Orders
from kvrelay.config import settings_from
from kvrelay.errors import ConfigError
from kvrelay.plane.reports import LoadReport, WorkerInfo
from kvrelay.router.index.prefix_index import PrefixIndex
from kvrelay.router.planning.planner import PlannerRules
from kvrelay.router.planning.types import PlanningTarget, SpeedCurve, StepWork, WorkerModel, Workload
from kvrelay.serve.telemetry.observer import ServeStats
from kvrelay.settings.cluster import PlannerSettings
from kvrelay.types import Fingerprint, Role
from tests.router.index.index_cases import kv_events, kv_snapshot

pytestmark = pytest.mark.pure


TARGET = PlanningTarget(ttft_s=1.0, tpot_s=0.1)


def stats(requests: int, *, late: int = 0, overloaded: int = 0, read: int = 0) -> ServeStats:
    """An ingress that has served `requests` of 100 + 10 tokens, `late` of them late, and turned others away, of which
    it had `read` some.
    """
    taken = requests + read
    made = ServeStats(
        taken=taken, prompt_tokens=100 * taken, prompt_squares=10_000 * taken, output_tokens=10 * requests
    )
    made.outcomes["stop"] += requests
    made.outcomes["overloaded"] += overloaded + read
    made.ttft_s.observe(0.2, requests - late)
    made.ttft_s.observe(3.0, late)
    made.tpot_s.observe(0.01, requests)
    return made


def look(at_s: float, *ingresses: ServeStats, **others: Any) -> feed.Observation:
    reports = {f"ingress-{number}": feed.ingress_report(each) for number, each in enumerate(ingresses)}
    return feed.Observation(
        at_s, reports, others.get("prefills", {}), others.get("decodes", {}), others.get("is_changing", False)
    )


# ---- what replicas report


def test_an_interval_is_what_the_sums_of_all_ingresses_grew_by():
    it = feed.Feed(TARGET)
    assert it.interval(look(0.0, stats(50), stats(7)), None, None) is None
    seen = it.interval(look(10.0, stats(80, late=6), stats(17)), None, None)
    assert seen is not None
    assert (seen.arrivals, seen.input_tokens, seen.output_tokens, seen.judged) == (40, 4000, 400, 40)
    assert seen.input_squares == 400_000
    assert seen.ttft_kept == pytest.approx(34 / 40) and seen.tpot_kept == 1.0


def test_a_steady_load_is_one_however_old_the_reports_are():
    it, seen = feed.Feed(TARGET), []
    for at_s, reported_s in ((0.0, 0.0), (5.0, 4.0), (10.0, 10.0), (15.0, 14.0)):  # one request a second
        report = feed.ingress_report(stats(50 + int(reported_s)), at_s=1000.0 + reported_s)
        seen.append(it.interval(feed.Observation(at_s, {"i": report}, {}, {}, is_changing=False), None, None))
    assert [(one.arrivals, one.output_tokens, one.ttft_kept) for one in seen[1:]] == [(5, 50, 1.0)] * 3


def test_requests_that_were_turned_away_unread_count_as_load_like_the_others():
    it = feed.Feed(TARGET)
    it.interval(look(0.0, stats(10)), None, None)
    seen = it.interval(look(10.0, stats(20, overloaded=30)), None, None)
    assert seen is not None and (seen.arrivals, seen.input_tokens) == (40, 4000)


def test_requests_that_were_read_and_then_turned_away_do_not_make_prompts_look_longer():
    it = feed.Feed(TARGET)
    it.interval(look(0.0, stats(10)), None, None)
    seen = it.interval(look(10.0, stats(20, read=30)), None, None)
    assert seen is not None and (seen.arrivals, seen.input_tokens) == (40, 4000)


@pytest.mark.parametrize("outcome", ["slo", "deadline", "overloaded"])
def test_a_refused_request_kept_no_target(outcome: str):
    it, after = feed.Feed(TARGET), stats(40, late=2)
    it.interval(look(0.0, stats(10)), None, None)
    fine = replace(it).interval(look(10.0, after), None, None)
    after.outcomes[outcome] += 10
    seen = it.interval(look(10.0, after), None, None)
    assert fine is not None and (fine.judged, fine.tpot_kept) == (30, 1.0) and fine.ttft_kept == pytest.approx(28 / 30)
    assert seen is not None and (seen.judged, seen.ttft_kept, seen.tpot_kept) == (40, 28 / 40, 30 / 40)


def test_a_request_that_idle_workers_would_miss_too_is_no_reason_for_more_workers():
    it, after = feed.Feed(TARGET), stats(40, late=2)
    it.interval(look(0.0, stats(10)), None, None)
    after.outcomes["slo"], after.hopeless = 10, 9
    seen = it.interval(look(10.0, after), None, None)
    assert seen is not None and (seen.judged, seen.ttft_kept, seen.tpot_kept) == (31, 28 / 31, 30 / 31)


def test_where_all_are_refused_none_kept_its_targets():
    it, after = feed.Feed(TARGET), stats(10, overloaded=20)
    it.interval(look(0.0, stats(10)), None, None)
    seen = it.interval(look(10.0, after), None, None)
    assert seen is not None and (seen.judged, seen.ttft_kept, seen.tpot_kept) == (20, 0.0, 0.0)


def test_an_ingress_that_restarts_or_comes_late_adds_only_what_was_seen_to_grow():
    it = feed.Feed(TARGET)
    it.interval(look(0.0, stats(100)), None, None)
    restarted = it.interval(look(10.0, stats(3)), None, None)
    assert restarted is not None and restarted.arrivals == 0
    joined = it.interval(look(20.0, stats(5), stats(1000)), None, None)
    assert joined is not None and joined.arrivals == 2


@given(st.lists(st.floats(0.0, 70.0), min_size=1, max_size=60), st.sampled_from([0.1, 0.5, 1.0, 5.0, 60.0]))
def test_the_kept_share_is_exact_at_a_bound_of_the_histogram(values: list[float], limit_s: float):
    made = ServeStats()
    for value in values:
        made.ttft_s.observe(value)
    share = feed.kept_share(feed.ingress_report(made), feed.TTFT, limit_s, 0.9)
    assert share == pytest.approx(sum(value <= limit_s for value in values) / len(values))


@given(st.lists(st.floats(0.0, 70.0), min_size=1, max_size=60), st.floats(0.001, 80.0), st.booleans())
def test_the_kept_share_of_a_target_in_the_settings_is_exact(values: list[float], limit_s: float, is_slo: bool):
    limit_s = float(f"{limit_s:.9g}")
    targets = {"ttft_s": limit_s, "tpot_s": limit_s}
    made = ServeStats.with_targets(settings_from({"slo" if is_slo else "planner": targets}))
    for value in (*values, limit_s):
        made.ttft_s.observe(value)
        made.tpot_s.observe(value)
    kept = sum(value <= limit_s for value in (*values, limit_s)) / (len(values) + 1)
    for name in (feed.TTFT, feed.TPOT):
        assert feed.kept_share(feed.ingress_report(made), name, limit_s, 0.9) == pytest.approx(kept)


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({}, (False, True)),
        ({"slo": {"ttft_s": 2.0}}, (True, True)),
        ({"slo": {"tpot_s": 0.1}, "router": {"policy": "round_robin"}}, (False, False)),
        ({"router": {"local_prefill_tokens": 0}}, (False, False)),
        ({"planner": {"ttft_s": 2.0}}, (False, True)),
    ],
)
def test_the_planner_knows_what_the_ingresses_do_with_late_requests_and_with_prompts(settings, wanted):
    it, made = feed.Feed(TARGET), ServeStats.with_targets(settings_from(settings))
    it.interval(look(0.0, made), None, None)
    for ingresses in ([made], [ServeStats(), made]):
        seen = it.interval(look(it.at_s + 10.0, *ingresses), None, None)
        assert (seen.refuses_late, seen.prefills_on_decode) == wanted


@given(
    st.lists(st.floats(0.0, 70.0), min_size=1, max_size=60), st.floats(0.001, 80.0), st.sampled_from([0.5, 0.9, 0.99])
)
def test_between_bounds_a_target_is_called_kept_or_missed_only_where_it_surely_was(values, limit_s, wanted):
    made = ServeStats()
    for value in values:
        made.ttft_s.observe(value)
    share = feed.kept_share(feed.ingress_report(made), feed.TTFT, limit_s, wanted)
    if share is not None:
        assert (share >= wanted) == (sum(value <= limit_s for value in values) / len(values) >= wanted)


def test_between_bounds_it_is_told_where_the_bounds_agree_and_without_requests_there_is_nothing_to_tell():
    grown = feed.ingress_report(stats(10, late=4))  # six within 0.2 s, four take 3 s
    assert feed.kept_share(grown, feed.TTFT, 1.7, 0.9) == 0.6 and feed.kept_share(grown, feed.TTFT, 4.5, 0.9) == 1.0
    assert feed.kept_share(grown, feed.TTFT, 2.7, 0.9) is None  # between 2.5 and 3 s
    assert feed.kept_share({}, feed.TTFT, 1.0, 0.9) is None
    assert feed.kept_share(feed.ingress_report(ServeStats()), feed.TTFT, 1.0, 0.9) is None


CURVE = SpeedCurve(0.0, 0.01, 1e-3, 0.0, 0.0, 0.001)
MODEL = WorkerModel(CURVE, CURVE, 10_000, 512, 64)
INFO = WorkerInfo(
    worker_id="decode-a",
    role="decode",
    epoch="1",
    host="h",
    port=1,
    node_id="n",
    model="m",
    fingerprint=Fingerprint(1, "m", "bfloat16", 16, 2, 2, 8, "seed"),
    block_size=16,
    num_blocks=100,
    max_model_len=1024,
    max_running=8,
    kv_bytes_per_token=64,
    device="cpu",
    transports=[],
)


def test_speeds_are_compared_with_the_curves():
    it = feed.Feed(TARGET)
    prefills = {"a": {feed.PREFILL_SPEED: 500.0}, "b": {feed.PREFILL_SPEED: 0.0}}
    decodes = {"c": {feed.STEP_S: 0.045, feed.DECODING: 5.0}, "d": {feed.STEP_S: 9.0, feed.DECODING: 0.0}}
    it.interval(look(0.0, stats(1)), MODEL, None)
    seen = it.interval(look(10.0, stats(2), prefills=prefills, decodes=decodes), MODEL, Workload(1.0, 100.0, 10.0))
    assert seen is not None
    assert seen.prefill_slowness == pytest.approx(2.0)
    assert seen.decode_slowness == pytest.approx(3.0)  # the curve says 15 ms for 5; who decodes nothing says nothing


def test_workers_that_slow_each_other_as_the_profile_says_are_as_fast_as_expected():
    crowded = replace(MODEL, workers_per_node=2, prefill_slowdown=(1.0, 2.0), decode_slowdown=(1.0, 3.0))
    it = feed.Feed(TARGET)
    prefills, decodes = {"a": {feed.PREFILL_SPEED: 500.0}}, {"c": {feed.STEP_S: 0.045, feed.DECODING: 5.0}}
    it.interval(look(0.0, stats(1)), crowded, None)
    load = Workload(1.0, 100.0, 10.0)
    seen = it.interval(look(10.0, stats(2), prefills=prefills, decodes=decodes), crowded, load)
    assert seen is not None
    assert (seen.prefill_slowness, seen.decode_slowness) == (pytest.approx(1.0), pytest.approx(1.0))
    alone = it.interval(look(20.0, stats(2), decodes=decodes), crowded, load)
    assert alone is not None and alone.decode_slowness == pytest.approx(3.0)


def test_a_profiles_neighbours_are_the_models():
    profile = find_profile("llama-3.1-8b-h100-bf16")
    assert model_of(profile).most_crowded == 1
    slowdown = {"prefill": (1.0, 1.5), "decode": (1.0, 1.2, 1.4)}
    model = model_of(profile.model_copy(update={"slowdown": slowdown, "workers_per_node": 8}))
    assert model.most_crowded == 3  # beyond what was measured, as with the most that were
    assert model.crowded(8).prefill.token_s == pytest.approx(1.5 * profile.prefill.token_s)
    assert model.crowded(8).decode.weights_s == pytest.approx(1.4 * profile.decode.weights_s)


def test_a_worker_with_prompts_in_hand_says_nothing_of_its_decode_steps():
    busy, free = (LoadReport(seq=1, running=5, queued_tokens=tokens, decode_step_s=0.1) for tokens in (300, 0))
    assert feed.worker_report(busy, INFO, "decode")[feed.DECODING] == 0.0
    assert feed.worker_report(free, INFO, "decode")[feed.DECODING] == 5.0


def test_a_model_is_learnt_from_reports():
    it = LearnedModel()
    reports = [
        {
            feed.PREFILL_SPEED: 2000.0,
            feed.STEP_S: 0.02 + 0.001 * batch,
            feed.RUNNING: float(batch),
            feed.POOL_TOKENS: 5000.0,
            feed.MAX_RUNNING: 32.0,
        }
        for batch in range(1, 25)
    ]
    assert it.model(reports, 0.0) is None
    for number, report in enumerate(reports * 4):
        it.observe([report], float(number))
    model = it.model(reports, 96.0)
    assert model is not None and (model.pool_tokens, model.max_running) == (5000, 32)
    assert model.prefill.prefill_s(1000) == pytest.approx(0.5)
    assert model.decode.decode_step_s(40, 0) == pytest.approx(0.06, rel=0.05)
    beside = model.decode.step_s(StepWork(prompt_tokens=500, sequences=40))  # a chunk lengthens the step by its tokens
    assert beside == pytest.approx(model.decode.decode_step_s(40, 0) + model.prefill.prefill_s(500))


def test_one_batch_seen_says_no_more_of_larger_ones_than_what_a_token_costs():
    it = LearnedModel()
    report = {feed.PREFILL_SPEED: 1000.0, feed.STEP_S: 0.02, feed.RUNNING: 4.0, feed.POOL_TOKENS: 1.0}
    it.observe([report], 0.0)
    model = it.model([report], 0.0)
    assert model is not None
    assert 0.02 < model.decode.decode_step_s(24, 0) < 0.06


# ---- giving workers up


def candidate(name: str, **facts: float) -> RetirementCandidate:
    blank = {"sequences": 0.0, "context_tokens": 0.0, "cached_tokens": 0.0, "hit_share": 0.0}
    return RetirementCandidate(name, **{**blank, **facts})  # type: ignore[arg-type]


def test_the_victim_costs_least():
    busy = candidate("busy", sequences=9.0, context_tokens=90_000.0)
    warm = candidate("warm", cached_tokens=100_000.0, hit_share=0.5)
    shared = candidate("shared", cached_tokens=100_000.0, hit_share=0.5, alone_share=0.05)
    cold = candidate("cold", cached_tokens=100_000.0, hit_share=0.001)
    assert victims([busy, warm, shared, cold], 4) == ("cold", "shared", "warm", "busy")
    assert victims([busy, warm], 0) == victims([busy], -2) == ()


def test_the_index_knows_what_would_be_lost_with_a_worker():
    index = PrefixIndex()
    names = [bytes([number]) * 16 for number in range(100)]
    for worker_id, held in (("a", names[:80]), ("b", names[60:]), ("c", ())):
        index.add_worker(worker_id, max_blocks=1000)
        index.apply_snapshot(worker_id, kv_snapshot(0, held))
    assert index.alone_share("a") == pytest.approx(60 / 80, abs=0.02)
    assert index.alone_share("b", num_samples=1000) == 20 / 40
    index.apply_events("a", kv_events(1, (), names[60:80]))
    assert index.alone_share("a") == index.alone_share("b") == 1.0
    assert index.alone_share("c") is None and index.alone_share("nobody") is None
    index.mark_stale("b")
    assert index.alone_share("b") is None


def group(*names: str) -> dict[str, RetirementCandidate]:
    return {name: candidate(name, sequences=float(index)) for index, name in enumerate(names)}


def test_a_worker_that_retires_counts_until_it_is_gone():
    it = Retiring(30.0)
    assert it.replicas(2, group("a", "b", "c"), 0.0, ["a"]) == 3
    assert it.names == ("a",)
    assert it.replicas(2, group("a", "b", "c"), 10.0, []) == 3
    assert it.replicas(2, group("b", "c"), 20.0, []) == 2
    assert it.names == ()


def test_more_are_wanted_while_one_retires():
    it = Retiring(30.0)
    it.replicas(1, group("a", "b"), 0.0, ["a"])
    assert it.replicas(3, group("a", "b"), 5.0, []) == 4  # a goes all the same
    assert it.names == ("a",)


def test_who_does_not_go_in_time_is_left_to_serve():
    it = Retiring(30.0)
    it.replicas(1, group("a", "b"), 0.0, ["a"])
    assert it.replicas(1, group("a", "b"), 30.0 + GRACE_S, []) == 1
    assert it.names == ()
    assert it.replicas(1, group("a", "b"), 500.0, []) == 1
    assert it.replicas(1, group("b"), 501.0, []) == 1
    assert it.names == ()


def test_workers_that_only_start_are_given_up_without_a_victim():
    it = Retiring(30.0)
    assert it.replicas(2, group("a", "b"), 0.0, []) == 2  # three were wanted, the third has not come up
    assert it.names == ()


def test_the_registry_asks_while_it_is_told_to_and_then_forgets():
    it = Orders()
    it.give({"a": Order(40.0), "c": Order(40.0, "decode")}, 0.0)
    assert it.of("a", 5.0) == Order(40.0) and it.of("b", 5.0) is None and it.of("c", 5.0) == Order(40.0, "decode")
    it.give({"a": Order(40.0), "c": Order(40.0, "prefill")}, 10.0)
    assert it.of("a", 10.0 + TIMEOUT_S - 1) == Order(40.0)
    assert it.of("a", 10.0 + TIMEOUT_S) is None
    assert it.of("c", 11.0) == Order(40.0, "prefill")  # the last one alone


def test_the_error_of_a_retired_worker_survives_pickle():
    assert (
        str(pickle.loads(pickle.dumps(WorkerRetired("decode-x"))))
        == "worker decode-x has retired: the planner wants fewer"
    )


class Remote:
    """An actor's method, as far as a replica calls one."""

    def __init__(self, note: list[str], name: str) -> None:
        self.note, self.name = note, name

    async def remote(self, *arguments: object) -> None:
        self.note.append(self.name)


class Leaving:
    """Registry and worker of a replica that is told to go: notes what is asked of them, in order."""

    worker_id, epoch = "decode-a", "e"

    def __init__(self) -> None:
        self.note: list[str] = []
        self.leave = Remote(self.note, "leave")
        self.is_empty = asyncio.Event()

    async def drain(self, timeout_s: float) -> None:
        self.note.append(f"drain {timeout_s:g}")
        await self.is_empty.wait()

    async def aclose(self) -> None:
        self.note.append("close")


class Replicated(DecodeReplica):
    """One that Serve does not own: nobody awaits what Python calls when it goes."""

    def __del__(self) -> None:  # type: ignore[override]
        self._registry = None


def note_exits(monkeypatch: pytest.MonkeyPatch, note: list[str]) -> None:
    """Have an actor that kills itself note that instead."""
    context = SimpleNamespace(current_actor=None)
    own = SimpleNamespace(get_runtime_context=lambda: context, kill=lambda *_, **__: note.append("exit"))
    monkeypatch.setattr("kvrelay.cluster.deployments.worker.ray", own)

    async def all_of_it(wanted_s: float) -> float:
        return wanted_s

    monkeypatch.setattr("kvrelay.cluster.deployments.worker.time_to_stop_s", all_of_it)


async def test_who_retires_leaves_drains_closes_and_only_then_fails_its_health_check(monkeypatch):
    replica: Any = object.__new__(Replicated)
    facts = Leaving()
    replica._registry = replica._worker = replica._record = facts
    replica._ending = replica._following = replica._lease = None
    note_exits(monkeypatch, facts.note)
    replica._listing = asyncio.create_task(asyncio.sleep(60))
    replica._background = [replica._listing]
    replica._retire(45.0)
    replica._retire(45.0)  # told again with every heartbeat
    for _ in range(5):
        await asyncio.sleep(0)
    assert facts.note == ["leave", "drain 45"]
    await replica.check_health()  # it is no fault to have gone from the registry
    facts.is_empty.set()
    await replica._ending
    assert facts.note == ["leave", "drain 45", "close", "exit"]  # Serve sees that its process has gone
    with pytest.raises(WorkerRetired):  # should it still be there
        await replica.check_health()
    await DecodeReplica.__del__(replica)  # Serve's own end finds nothing left to do
    assert facts.note == ["leave", "drain 45", "close", "exit"]


async def test_who_is_ended_by_serve_does_not_end_its_process_itself(monkeypatch):
    replica: Any = object.__new__(Replicated)
    facts = Leaving()
    facts.is_empty.set()
    replica._registry = replica._worker = replica._record = facts
    replica._settings = settings_from({"cluster": {"drain_timeout_s": 30}})
    replica._ending = replica._following = replica._lease = None
    note_exits(monkeypatch, facts.note)
    replica._listing = asyncio.create_task(asyncio.sleep(60))
    replica._background = [replica._listing]
    await DecodeReplica.__del__(replica)
    assert facts.note == ["leave", "drain 30", "close"]


# ---- the policy


@dataclass(frozen=True)
class Replica:
    unique_id: str


@dataclass
class Value:
    value: float


@dataclass
class Context:
    """What Serve hands to a policy, as far as ours looks."""

    deployment_name: str
    target_num_replicas: int
    reports: dict[str, dict[str, float]]
    current_time: float = 0.0
    capacity_adjusted_min_replicas: int = 1
    capacity_adjusted_max_replicas: int = 6
    app_name: str = "kvrelay"
    raw_metrics: dict[str, dict[Replica, list[Value]]] = field(init=False)

    def __post_init__(self) -> None:
        self.raw_metrics = {}
        for replica, values in self.reports.items():
            for name, value in values.items():
                self.raw_metrics.setdefault(name, {})[Replica(replica)] = [Value(0.0), Value(value)]

    @property
    def deployment_id(self) -> str:
        return f"kvrelay_{self.deployment_name}"

    @property
    def current_num_replicas(self) -> int:
        return len(self.reports)

    @property
    def running_replicas(self) -> list[Replica]:
        return [Replica(name) for name in self.reports]


class Shelf:
    """Keeps what the policy tells it, as the registry does."""

    def __init__(self) -> None:
        self.data = b""
        self.answers = True
        self.warming: set[str] = set()
        self.cluster, self.notices = {"CPU": 8.0}, list[str]()

    def save(self, data: bytes) -> None:
        self.data = data

    def load(self) -> bytes | None:
        return self.data if self.answers else None

    def members(self) -> frozenset[str]:
        return frozenset(self.warming)

    def resources(self) -> dict[str, float]:
        return dict(self.cluster)

    def notice(self, lines: list[str]) -> None:
        self.notices = lines


class World:
    """Serve as the policy sees it: counts that follow at once, workers that report and retire."""

    def __init__(self, policy: PlannerPolicy, **counts: int) -> None:
        self.shelf, self.now_s, self.served = Shelf(), 0.0, 0
        self.workers = {role: [f"{role[0]}{n}" for n in range(counts.get(role, 1))] for role in ("prefill", "decode")}
        self.told: list[str] = []
        self.alone: dict[str, float] = {}
        self.take(policy)
        self.fresh, self.fewest = 100, 1
        self.places: dict[str, int] = {}  # of a role, where the cluster has not enough for all
        self.targets: dict[str, int] = {}
        if not counts.get("prefill", 1):
            del self.workers["prefill"]

    def take(self, policy: PlannerPolicy) -> None:
        """Serve's controller has begun anew, with this policy."""
        self.policy = policy
        policy.store = self.shelf
        policy._retire = self.told.extend  # type: ignore[method-assign]

    def report(self, name: str) -> dict[str, float]:
        return {
            feed.ROLES: sum(feed.ROLE_BITS[role] for role in Role if name in self.workers.get(role, [name])),
            feed.PREFILL_SPEED: 1000.0,
            feed.STEP_S: 0.09,
            feed.RUNNING: 4.0,
            feed.POOL_TOKENS: 50_000.0,
            feed.MAX_RUNNING: 64.0,
            feed.CACHED: float(sum(map(ord, name))),
            feed.BLOCK_SIZE: 16.0,
            feed.HIT_SHARE: 0.3,
        }

    def tick(self, rate: float, seconds: float = 10.0) -> dict[str, int]:
        self.now_s += seconds
        self.served += round(rate * seconds)
        report = feed.ingress_report(stats(self.served), self.alone)
        contexts = [Context("ingress", 1, {"i": report}, self.now_s)]
        for role, names in self.workers.items():
            reports = {name: self.report(name) for name in names}
            target = self.targets.get(role, len(names)) if role in self.places else len(names)
            contexts.append(Context(role, target, reports, self.now_s, self.fewest))
        decided, _ = self.policy({each.deployment_id: each for each in contexts})
        for role, names in self.workers.items():
            for name in list(names):  # who is told to retire is gone by the next tick
                if worker_name(role, name) in self.told:
                    names.remove(name)
            self.targets[role] = target = decided.get(f"kvrelay_{role}", len(names))
            target = min(target, self.places.get(role, target))
            while len(names) < target - sum(name.startswith(role) for name in self.told):
                names.append(f"{role[0]}{self.fresh}")
                self.fresh += 1
        self.told.clear()
        return {role: decided.get(f"kvrelay_{role}", len(names)) for role, names in self.workers.items()}


def test_the_policy_plans_both_roles_from_what_replicas_report():
    world = World(PlannerPolicy(scale_down_delay_s=60.0, ttft_s=1.0))
    for _ in range(5):
        few = world.tick(1.0)
    for _ in range(3):
        many = world.tick(30.0)
    assert few == {"prefill": 1, "decode": 1}
    assert many["prefill"] > 3 and many["decode"] > 1
    for _ in range(40):
        after = world.tick(1.0)
    assert after == few and [len(names) for names in world.workers.values()] == [1, 1]


def test_aggregated_workers_are_one_count_that_goes_up_and_down_again():
    world = World(PlannerPolicy(scale_down_delay_s=60.0, ttft_s=1.0, tpot_s=0.3), prefill=0)
    few = [world.tick(1.0) for _ in range(5)][-1]
    many = [world.tick(30.0) for _ in range(3)][-1]
    assert few == {"decode": 1} and 3 < many["decode"] <= 6
    world.take(PlannerPolicy(scale_down_delay_s=60.0, ttft_s=1.0, tpot_s=0.3))  # the controller has restarted
    assert world.tick(30.0) == many
    assert [world.tick(1.0) for _ in range(40)][-1] == few and len(world.workers["decode"]) == 1


def test_a_start_takes_what_starts_took():
    it = StartTimes()
    it.observe(1, ["a"], 0.0)
    assert it.mean_s is None  # it ran before anything was seen
    it.observe(3, ["a"], 10.0)
    it.observe(4, ["a"], 20.0)
    it.observe(4, ["a", "b"], 100.0)
    assert it.mean_s == 90.0
    it.observe(4, ["a", "b", "c"], 130.0)
    assert it.mean_s == pytest.approx(90.0 + GAIN * 30.0)
    it.observe(3, ["a", "b", "c"], 140.0)  # the fourth is no longer wanted
    it.observe(4, ["a", "b", "c"], 200.0)
    it.observe(4, ["a", "b", "c", "e"], 299.0)
    assert it.mean_s == pytest.approx(99.0)
    it.observe(4, ["a", "b", "c"], 300.0)  # one has crashed, another comes in its place
    it.observe(4, ["a", "b", "c", "f"], 399.0)
    assert it.mean_s == pytest.approx(99.0)


def test_the_planner_looks_as_far_ahead_as_starts_take_and_a_restarted_one_still_does():
    world = World(PlannerPolicy(scale_down_delay_s=60.0, ttft_s=1.0))
    world.tick(1.0)
    world.tick(1.0)
    assert world.policy.planner is not None and world.policy.planner.rules.horizon_s == PlannerRules().horizon_s
    level = world.policy.planner.state.demand.trend.level
    world.policy._starts.mean_s = 240.0
    world.tick(1.0)
    planner = world.policy.planner
    assert planner.rules.horizon_s == planner.state.demand.horizon_s == 240.0
    assert planner.state.demand.trend.level == pytest.approx(level)  # nothing else is forgotten
    world.take(PlannerPolicy(scale_down_delay_s=60.0, ttft_s=1.0))
    world.tick(1.0)
    assert world.policy.planner is not None and world.policy.planner.state.demand.horizon_s == 240.0


def test_down_goes_by_retirement_of_the_worker_with_the_least_to_lose():
    world = World(PlannerPolicy(scale_down_delay_s=60.0, ttft_s=1.0), prefill=3)
    world.workers["prefill"] = ["zz", "aa", "mm"]  # 'aa' has the fewest cached blocks
    world.alone = {"prefill-mm": 0.5}  # the others have half of what it holds
    retired: list[str] = []
    for _ in range(30):
        world.tick(1.0)
        retired += [name for name in ("zz", "aa", "mm") if name not in world.workers["prefill"] and name not in retired]
    assert retired == ["mm", "aa"] and len(world.workers["prefill"]) == 1


def test_the_policy_stays_within_serves_bounds_and_leaves_alone_what_it_does_not_know():
    world = World(PlannerPolicy(scale_down_delay_s=60.0))
    for _ in range(6):
        most = world.tick(500.0)
    assert most == {"prefill": 6, "decode": 6}
    blind = World(PlannerPolicy(), prefill=2, decode=3)
    blind.report = lambda name: {}  # type: ignore[method-assign]
    assert blind.tick(5.0) == blind.tick(5.0) == {"prefill": 2, "decode": 3}


def test_a_file_that_leaves_out_prefills_bounds_plans_nothing_and_one_line_says_why(caplog: pytest.LogCaptureFixture):
    """`serve deploy` of a file without an autoscaling_config of prefill, which `kvrelay deploy` refuses."""
    policy = PlannerPolicy()
    with caplog.at_level("WARNING", "ray.serve"):
        assert policy({}) == ({}, {}) and not caplog.messages  # the application has not been deployed yet
        contexts = {name: Context(name, 1, {}) for name in ("ingress", "decode")}
        assert policy(contexts) == ({}, {}) and not caplog.messages  # perhaps its workers do both
        contexts["decode"] = Context("decode", 1, {"d": {feed.ROLES: feed.ROLE_BITS[Role.DECODE]}})
        assert [policy(contexts) for _ in range(3)] == [({}, {})] * 3
    (line,) = caplog.messages
    assert line.startswith("kvrelay planner: plans nothing") and "no autoscaling_config of prefill;" in line


def test_bounds_of_zero_that_reached_serve_unchecked_keep_one_worker_of_each_role():
    """`serve deploy` of a file with min_replicas: 0, which Serve itself allows."""
    world = World(PlannerPolicy(scale_down_delay_s=60.0, ttft_s=1.0), prefill=2, decode=2)
    world.fewest = 0
    rates = [5.0] * 3 + [0.0] * 60
    assert [world.tick(rate) for rate in rates][-1] == {"prefill": 1, "decode": 1}


def test_between_looks_the_policy_repeats_itself():
    world = World(PlannerPolicy(scale_down_delay_s=60.0))
    world.tick(1.0)
    world.tick(1.0)
    assert world.policy.planner is not None
    looked_s = world.policy.planner.state.dampers["decode"].now_s
    assert [world.tick(100.0, seconds=0.1) for _ in range(5)] == [{"prefill": 1, "decode": 1}] * 5
    assert world.policy.planner.state.dampers["decode"].now_s == looked_s


SWINGS = [1.0] * 4 + [30.0] * 3 + [1.0] * 9 + [8.0] * 6 + [20.0] * 2 + [2.0] * 16


@pytest.mark.parametrize("every", [1, 3, 7])
def test_a_policy_whose_controller_restarts_goes_on_as_if_nothing_had_happened(every: int):
    worlds = [World(PlannerPolicy(scale_down_delay_s=60.0, ttft_s=1.0)) for _ in range(3)]
    courses: list[list[dict[str, int]]] = [[], [], []]
    for number, rate in enumerate(SWINGS):
        for world, course in zip(worlds, courses, strict=True):
            course.append(world.tick(rate))
        if number % every == every - 1:
            worlds[1].take(PlannerPolicy(scale_down_delay_s=60.0, ttft_s=1.0))
            worlds[2].shelf.data = b""  # and one who forgets
            worlds[2].take(PlannerPolicy(scale_down_delay_s=60.0, ttft_s=1.0))
    assert courses[1] == courses[0]
    assert courses[2] != courses[0]


def test_what_came_while_the_controller_was_down_is_seen():
    world = World(PlannerPolicy(scale_down_delay_s=60.0, ttft_s=1.0))
    for _ in range(4):
        few = world.tick(1.0)
    world.take(PlannerPolicy(scale_down_delay_s=60.0, ttft_s=1.0))
    world.tick(30.0, seconds=40.0)
    planner = world.policy.planner
    assert planner is not None and planner.state.demand.trend.level == pytest.approx(30.0, rel=0.1)
    assert few == {"prefill": 1, "decode": 1}


def test_who_retires_still_retires_after_a_restart_and_nobody_else_with_it():
    world = World(PlannerPolicy(scale_down_delay_s=60.0, ttft_s=1.0), prefill=3)
    told: list[str] = []
    world.told = []
    while not told:
        world.now_s += 10.0
        told = first_told(world)
    world.take(PlannerPolicy(scale_down_delay_s=60.0, ttft_s=1.0))
    world.now_s += 1.0
    assert first_told(world) == told
    assert world.policy.retiring == told


def first_told(world: World) -> list[str]:
    """One tick at which nobody goes yet; whom the registry is told of."""
    world.served += 10
    contexts = [Context("ingress", 1, {"i": feed.ingress_report(stats(world.served))}, world.now_s)]
    for role, names in world.workers.items():
        contexts.append(Context(role, len(names), {name: world.report(name) for name in names}, world.now_s))
    decided, _ = world.policy({each.deployment_id: each for each in contexts})
    assert decided["kvrelay_prefill"] == 3  # it counts until it is gone
    told, world.told = list(world.told), []
    world.policy._retire = world.told.extend  # type: ignore[method-assign]
    return told


def test_what_cannot_be_read_is_learnt_anew():
    world = World(PlannerPolicy())
    for data in (b"", b"\xff\x00", msgspec.msgpack.encode({"version": 1})):
        world.shelf.data = data
        world.take(PlannerPolicy())
        assert world.tick(1.0) == {"prefill": 1, "decode": 1}
        assert world.policy.resumed is None


def test_a_registry_that_does_not_answer_is_waited_for_and_then_not():
    world = World(PlannerPolicy())
    world.shelf.answers = False
    contexts = [Context(role, 2, {}, 0.0) for role in ("prefill", "decode")]
    assert world.policy({each.deployment_id: each for each in contexts}) == ({}, {})
    late = [replace(each, current_time=LOAD_TIMEOUT_S) for each in contexts]
    decided, _ = world.policy({each.deployment_id: each for each in late})
    assert decided == {"kvrelay_prefill": 2, "kvrelay_decode": 2}


def test_other_bounds_make_the_planner_forget_nothing():
    world = World(PlannerPolicy(scale_down_delay_s=60.0, ttft_s=1.0))
    for _ in range(6):
        world.tick(30.0)
    before = world.policy.planner
    assert before is not None
    learnt = deepcopy(before.state)
    contexts = {role: Context(role, len(names), {name: {} for name in names}) for role, names in world.workers.items()}
    bounded = {role: replace(one, capacity_adjusted_max_replicas=3) for role, one in contexts.items()}
    after = world.policy._planner_with(before.model, bounded)
    assert after is not before and after.state == learnt
    assert before.counts.prefill > 3 and after.counts.prefill == 3


def crowded(rate: float = 30.0, ticks: int = 30) -> tuple[World, list[int]]:
    """A cluster with places for two prefill workers, under a load that needs more; the targets, tick by tick."""
    world = World(PlannerPolicy(scale_down_delay_s=60.0, ttft_s=1.0))
    world.places = {"prefill": 2, "decode": 6}
    return world, [world.tick(rate)["prefill"] for _ in range(ticks)]


def test_workers_without_a_place_for_a_minute_are_no_longer_wanted_and_the_reason_is_named():
    world, targets = crowded()
    up = next(number for number, target in enumerate(targets) if target > 2)
    down = next(number for number, target in enumerate(targets) if number > up and target == 2)
    assert WAIT_S <= 10.0 * (down - up) <= WAIT_S + 20.0
    assert targets[down:] == [2] * (len(targets) - down) and len(world.workers["prefill"]) == 2
    (line,) = world.shelf.notices
    assert line.startswith(f"prefill stays at 2: {max(targets) - 2} more had no place in the cluster for 60 s")


def test_more_are_wanted_again_after_a_while_and_at_once_when_the_cluster_has_grown():
    world, _ = crowded()
    tight = []
    while len(tight) < RETRY_S / 10 and world.shelf.notices:
        tight.append(world.tick(30.0)["prefill"])
    assert set(tight) == {2} and 0.5 * RETRY_S < 10.0 * len(tight) < RETRY_S
    assert [world.tick(30.0)["prefill"] for _ in range(3)][-1] > 2
    world, _ = crowded()
    world.shelf.cluster = {"CPU": 16.0}
    world.places = {"prefill": 6, "decode": 6}
    assert [world.tick(30.0)["prefill"] for _ in range(4)][-1] > 2
    assert world.shelf.notices == [] and len(world.workers["prefill"]) > 2


def test_workers_that_warm_up_have_a_place_however_long_that_takes():
    world = World(PlannerPolicy(scale_down_delay_s=60.0, ttft_s=1.0))
    world.places = {"prefill": 2, "decode": 6}
    world.shelf.warming = {f"prefill-w{number}" for number in range(4)}  # they load their model for minutes
    assert [world.tick(30.0)["prefill"] for _ in range(60)][-1] > 2
    assert world.shelf.notices == []


def test_a_restarted_controller_knows_how_much_room_there_is():
    world, targets = crowded()
    world.take(PlannerPolicy(scale_down_delay_s=60.0, ttft_s=1.0))
    assert [world.tick(30.0)["prefill"] for _ in range(3)] == [targets[-1]] * 3


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=60))
def test_room_is_never_less_than_what_has_a_place_and_none_is_missed_while_all_have_one(seen: list[tuple[int, int]]):
    room = Room()
    for number, (wanted, placed) in enumerate(seen):
        had = room.most
        room.observe(wanted, placed, {"CPU": 8.0}, 10.0 * number, RETRY_S)
        assert room.most is None or room.most >= placed
        if wanted <= placed:
            assert room.most in (None, had)


def test_the_policy_can_be_sent_as_serve_sends_it():
    """By value, its own module's names with it."""
    from ray import cloudpickle

    from kvrelay.cluster.autoscaling import policies as autoscaling

    cloudpickle.register_pickle_by_value(autoscaling)
    try:
        sent = cloudpickle.dumps(PlannerPolicy)
    finally:
        cloudpickle.unregister_pickle_by_value(autoscaling)
    assert len(sent) > len(cloudpickle.dumps(PlannerPolicy))
    world = World(cloudpickle.loads(sent)(scale_down_delay_s=60.0))
    assert [world.tick(1.0) for _ in range(3)][-1] == {"prefill": 1, "decode": 1}


def test_wrong_settings_of_the_policy_name_the_key():
    with pytest.raises(ConfigError, match=r"planner\.hold"):
        PlannerPolicy(hold=3)
    with pytest.raises(ConfigError, match="profile"):
        PlannerPolicy(profile="/nowhere.json")


# ---- settings


def test_targets_are_the_slos_where_the_planner_has_none():
    own = planner_settings(settings_from({"slo": {"ttft_s": 2.0}, "planner": {"tpot_s": 0.05}}))
    assert (own.ttft_s, own.tpot_s) == (2.0, 0.05)
    assert planner_settings(settings_from({})).tpot_s == 0.1


def test_a_planned_cluster_is_deployed_with_the_policy_and_its_bounds():
    from ray.serve.schema import ServeDeploySchema

    settings = settings_from(
        {"planner": {"mode": "auto", "max_decode": 5, "scale_down_delay_s": 90}, "cluster": {"decode": 2}}
    )
    config = serve_config(settings, http_port=1)
    (app,) = config["applications"]
    ServeDeploySchema.model_validate(config)
    assert app["autoscaling_policy"]["policy_function"] == PLANNER_POLICY_PATH
    assert PlannerPolicy(**app["autoscaling_policy"]["policy_kwargs"])._settings.scale_down_delay_s == 90
    scaling = {entry["name"]: entry["autoscaling_config"] for entry in app["deployments"]}
    assert (scaling["decode"]["max_replicas"], scaling["decode"]["initial_replicas"]) == (5, 2)
    assert (scaling["ingress"]["min_replicas"], scaling["ingress"]["max_replicas"]) == (1, 1)
    assert all(each["downscale_delay_s"] == each["upscale_delay_s"] == 0 for each in scaling.values())
    assert "planner" not in replica_arguments(settings)


def test_without_a_planner_nothing_is_scaled_by_load():
    (app,) = serve_config(settings_from({}), http_port=1)["applications"]
    assert "autoscaling_policy" not in app
    assert all("autoscaling_config" not in entry for entry in app["deployments"])


def test_a_planner_without_prefill_workers_has_bounds_of_decode_alone():
    settings = settings_from({"planner": {"mode": "auto", "max_decode": 7}, "cluster": {"prefill": 0, "decode": 2}})
    (app,) = serve_config(settings, http_port=1)["applications"]
    bounds = {entry["name"]: entry["autoscaling_config"] for entry in app["deployments"]}
    assert bounds.keys() == {"ingress", "decode"} and bounds["decode"]["max_replicas"] == 7
    assert app["autoscaling_policy"]["policy_function"] == PLANNER_POLICY_PATH


def test_scaling_by_hand_ends_planning_for_both_roles():
    (app,) = serve_config(settings_from({"planner": {"mode": "auto"}}), http_port=1)["applications"]
    known = {
        "prefill": {"target_num_replicas": 3},
        "decode": {"target_num_replicas": 2},
        "ingress": {"target_num_replicas": 1},
    }
    after = scaled({"applications": {"kvrelay": {"deployed_app_config": app, "deployments": known}}}, {"decode": 4})
    (changed,) = after["applications"]
    assert "autoscaling_policy" not in changed
    assert {entry["name"]: entry for entry in changed["deployments"]} == {
        "ingress": {"name": "ingress", "num_replicas": 1, "max_surge_percent": 0},
        "prefill": {"name": "prefill", "num_replicas": 3},
        "decode": {"name": "decode", "num_replicas": 4},
    }


@pytest.mark.parametrize("wrong", [{"min_prefill": 5}, {"max_workers": 2, "min_decode": 2}, {"mode": "maybe"}])
def test_settings_that_contradict_each_other_are_refused(wrong: dict[str, Any]):
    with pytest.raises(ConfigError, match="planner"):
        settings_from({"planner": wrong})


@pytest.mark.parametrize(
    ("key", "why"),
    {
        "planner.min_decode": "without a decode worker no request can be answered",
        "planner.max_decode": "without a decode worker",
        "planner.min_prefill": "requests that are on their way to a prefill worker would fail",
        "cluster.decode": "without a decode worker",
    }.items(),
)
@pytest.mark.parametrize("zero", [0, "0"])
def test_no_role_may_go_to_zero_and_the_reason_is_named(key: str, why: str, zero: object):
    section, name = key.split(".")
    with pytest.raises(ConfigError, match=f"^{key}: cannot be 0: {why}"):
        settings_from({section: {name: zero}})


def test_off_needs_no_quotes():
    assert settings_from({"planner": {"mode": False}}).planner == PlannerSettings()


def test_a_worker_reports_what_the_planner_reads():
    load = LoadReport(seq=1, running=3, held=1, waiting=2, used_blocks=5, decode_step_s=0.02)
    report = feed.worker_report(load, INFO, "decode")
    assert (report[feed.CONTEXT], report[feed.POOL_TOKENS]) == (80.0, 1600.0)
    assert (report[feed.RUNNING], report[feed.QUEUED], report[feed.STEP_S]) == (4.0, 2.0, 0.02)
    assert all(isinstance(value, float) for value in report.values())
