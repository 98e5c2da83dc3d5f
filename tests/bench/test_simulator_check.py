"""bench/simulator/check.py: what it compares is the same load, its errors are what they say, and a wrong profile makes
them large.
"""

import math
from dataclasses import replace

import pytest

from bench.simulator import check as bench
from bench.simulator.check_real import Answer, Outcome, Ways, as_markdown, compare, per_request, stated, worst
from kvrelay.cluster.profiles.fit import StepSampler
from kvrelay.cluster.profiles.neighbours import profiled_engine, slowdowns
from kvrelay.config import settings_from
from kvrelay.engine.checkpoints.tiny import tiny_checkpoint
from kvrelay.router.planning.speed_fit import fit_curve
from kvrelay.router.planning.types import SpeedCurve
from tests.cluster.simulator.simulator_cases import profile

pytestmark = pytest.mark.alone


TIMES = [f"{what} p{cut}" for what in ("TTFT", "TPOT") for cut in (50, 90, 99)]
WAYS = Ways(message_s=0.001, kv_bytes_per_s=1e9)


def answer(index, ttft_s, tpot_s=0.02, **fields):
    given = {"prompt_tokens": 100, "output_tokens": 5, "outcome": "done", "path": "disaggregated"} | fields
    return Answer(index=index, arrival_s=float(index), ttft_s=ttft_s, tpot_s=tpot_s, **given)


def outcome(answers, moved_bytes=1e6):
    return Outcome(tuple(answers), moved_bytes)


def by_name(real, simulated, ttft_s=1.0, tpot_s=0.05):
    return {one.name: one for one in compare(real, simulated, ttft_s=ttft_s, tpot_s=tpot_s)}


def test_a_time_is_off_by_a_share_of_itself_and_a_share_by_points():
    real = outcome([answer(0, 0.4, cached_tokens=50), answer(1, 0.4)])
    simulated = outcome([answer(0, 0.5, cached_tokens=20), answer(1, 0.5)], moved_bytes=3e6)
    found = by_name(real, simulated)
    assert found["TTFT p50"].error == pytest.approx(0.25) and found["TPOT p99"].error == 0.0
    assert found["hits"].error == pytest.approx(-0.15) and found["KV moved"].error == pytest.approx(2.0)
    assert found["TTFT p50"].row() == {"figure": "TTFT p50, ms", "real": "400", "simulated": "500", "error": "+25.0 %"}
    assert found["hits"].row()["error"] == "-15.0 points"


def test_goodput_counts_what_was_answered_within_both_limits():
    kept, late, slow = answer(0, 0.4), answer(1, 1.4), answer(2, 0.4, tpot_s=0.06)
    failed = answer(3, math.nan, math.nan, outcome="late")
    found = by_name(outcome([kept, late, slow, failed]), outcome([kept, replace(late, ttft_s=0.9), slow, failed]))
    assert (found["goodput"].real, found["goodput"].simulated) == (pytest.approx(1 / 3), pytest.approx(2 / 3))
    assert found["answered"].real == 0.75 and found["within the SLO"].error == pytest.approx(0.25)


def test_single_requests_are_compared_where_both_sides_answered():
    real = outcome([answer(0, 0.4, workers=("p",)), answer(1, 0.2), answer(2, 0.1)])
    simulated = outcome([answer(0, 0.2, workers=("d",)), answer(1, 0.3), answer(2, math.nan, outcome="error")])
    found = per_request(real, simulated)
    assert found.ttft_median == pytest.approx(0.5) and found.same_workers == 0.5
    figures = compare(real, simulated, ttft_s=1, tpot_s=1)
    assert "50% went to the same workers" in as_markdown("a run", figures, stated(found))


def test_both_sides_get_prompts_that_begin_alike_after_a_warm_up():
    entries = bench.load_of(40, 4.0, seed=1)
    warm, load = entries[: bench.WARM_UP], entries[bench.WARM_UP :]
    assert len(load) == 40 and load[0].arrival_s == bench.WARM_UP_S > warm[-1].arrival_s
    assert not {i for one in warm for i in one.hash_ids} & {i for one in load for i in one.hash_ids}
    first_blocks = [one.hash_ids[0] for one in load]
    assert len(set(first_blocks)) < len(first_blocks) / 2
    assert all(len(one.hash_ids) * bench.BLOCK >= one.input_tokens and not one.session for one in load)
    assert entries == bench.load_of(40, 4.0, seed=1)


def simulated(options, workers, entries, speed=1.0, ways=WAYS):
    return bench.measured_only(bench.simulate(options, workers, entries, ways, speed))


def test_the_simulator_against_itself_is_exact_and_a_profile_that_is_wrong_is_seen():
    options, workers = bench.options_of(["--tiny"]), profile(max_model_len=4096, num_blocks=1024)
    entries = bench.load_of(60, 4.0, seed=0)
    real = simulated(options, workers, entries)
    assert len(real.done()) == 60
    again = compare(real, simulated(options, workers, entries), ttft_s=1.0, tpot_s=0.05)
    assert all(one.error == 0.0 for one in again if one.real)
    off = compare(real, simulated(options, workers, entries, 0.5), ttft_s=1.0, tpot_s=0.05)
    assert worst(off, ["TPOT p50"]) == pytest.approx(1.0, abs=0.3)
    assert worst(off, TIMES) > 0.7


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("tiny") / "tiny-llama")


@pytest.fixture(scope="module")
def fitted(folder):
    options = bench.options_of(["--tiny", "--kv-memory", "16MiB"])
    engine = profiled_engine(settings_from(bench.sections_of(options)), folder)
    try:
        curve = fit_curve(StepSampler(engine, budget_s=6.0).run()).curve
        config = engine.config
        return profile(
            prefill=curve,
            decode=curve,
            num_blocks=engine.pool.num_blocks,
            token_budget=config.token_budget,
            max_running=engine.config.max_running,
            max_model_len=engine.max_model_len,
            kv_bytes_per_token=round(engine.cache.memory.layout.block_bytes / engine.config.block_size),
        )
    finally:
        engine.close()


def test_a_real_cluster_is_simulated_and_a_slow_profile_makes_the_error_large(folder, fitted, monkeypatch):
    """The right profile is held to nothing but what a busy machine allows: to being much closer than the wrong one."""
    import asyncio

    options = bench.options_of(["--tiny", "--kv-memory", "16MiB", "--rates", "8", "--seconds", "3"])
    monkeypatch.setattr(bench, "WARM_UP_S", 3.0)
    ways, [(came, real)] = asyncio.run(bench.real_runs(options, folder))
    assert 0 < ways.message_s < 1 and ways.kv_bytes_per_s > 0
    real = bench.measured_only(real)
    assert [one.outcome for one in real.answers] == ["done"] * 24
    assert [one.output_tokens for one in real.answers] == [one.output_tokens for one in came[bench.WARM_UP :]]
    assert 0 < sum(one.cached_tokens for one in real.answers) < sum(one.prompt_tokens for one in real.answers)

    def errors(speed):
        run = simulated(options, fitted, came, speed, ways)
        assert len(run.done()) == 24
        return per_request(real, run), compare(real, run, ttft_s=1.0, tpot_s=0.05)

    (right, _), (wrong, figures) = errors(1.0), errors(1 / 20)
    assert wrong.tpot_median > 3 * right.tpot_median and wrong.ttft_median > 2 * right.ttft_median
    assert worst(figures, TIMES) > 2.0


def test_neighbours_slow_a_worker_down_and_are_gone_afterwards(folder):
    options = bench.options_of(["--tiny", "--kv-memory", "16MiB"])
    settings = settings_from(bench.sections_of(options))
    engine = profiled_engine(settings, folder)
    try:
        found = slowdowns(engine, settings, folder, 2)
        engine.check()
    finally:
        engine.close()
    assert {kind: len(ratios) for kind, ratios in found.items()} == {"prefill": 2, "decode": 2}
    assert all(ratios[0] == 1.0 <= ratios[1] < 100 for ratios in found.values())


def test_a_curve_that_is_faster_is_so_in_every_constant():
    curve = SpeedCurve(1e-3, 2e-3, 3e-4, 4e-8, 5e-7, 6e-5)
    twice = bench.faster(profile(prefill=curve, decode=curve), 2.0)
    assert twice.prefill == SpeedCurve(5e-4, 1e-3, 1.5e-4, 2e-8, 2.5e-7, 3e-5) == twice.decode
