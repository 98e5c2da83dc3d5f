"""Samples for a speed curve: what a step computes is counted right, every kind comes, and the engine is left as it
was.
"""

import time
from types import SimpleNamespace

import pytest
import torch

from kvrelay.cluster.profiles import neighbours
from kvrelay.cluster.profiles.fit import (
    PASSES,
    REPEATS,
    ROUNDS,
    StepSampler,
    add_prompt,
    copy_bytes_per_s,
    profile_of,
    step_clock_of,
    work_of,
)
from kvrelay.cluster.profiles.profile import parse_profile
from kvrelay.engine.checkpoints.tiny import tiny_checkpoint
from kvrelay.engine.step.build import load_engine
from kvrelay.engine.step.config import EngineConfig
from kvrelay.errors import ConfigError
from kvrelay.kernels.select import select_backend
from kvrelay.router.planning.speed_fit import fit_curve
from kvrelay.router.planning.types import SpeedCurve, StepWork

CURVE = SpeedCurve(overhead_s=1e-3, weights_s=8e-3, token_s=2e-4, pair_s=3e-7, context_s=4e-7, sequence_s=1e-4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def engine(folder):
    config = EngineConfig(kv_memory_bytes=4 << 20, token_budget=96, max_running=16)
    engine = load_engine(folder, select_backend("cpu", "cpu", 1), torch.float32, config)
    yield engine
    engine.close()


class CurveClock:
    """Each step takes what a curve says of its plan."""

    def __init__(self, engine):
        self.now_s = 0.0
        self.disturbed = (0.0, 0.0)  # from when until when steps take three times as long
        step, schedule = engine.step, engine.scheduler.schedule

        def planned():
            plan = schedule()
            if plan.work:
                is_disturbed = self.disturbed[0] <= self.now_s < self.disturbed[1]
                self.now_s += CURVE.step_s(work_of(plan)) * (3 if is_disturbed else 1)
            return plan

        engine.scheduler.schedule = planned
        self.restore = lambda: setattr(engine.scheduler, "schedule", schedule)
        assert step is not None

    def __call__(self):
        return self.now_s


def test_the_work_of_a_step_is_what_its_rows_attend_to(engine):
    add_prompt(engine, 1, 40, max_tokens=8)
    plans = []
    schedule = engine.scheduler.schedule

    def noting():
        plans.append(schedule())
        return plans[-1]

    engine.scheduler.schedule = noting
    engine.step()
    engine.step()
    add_prompt(engine, 2, 120, max_tokens=1)
    engine.step()
    engine.step()
    works = [work_of(plan) for plan in plans]
    assert works[0] == StepWork(prompt_tokens=40, prompt_pairs=40 * 41 // 2)
    assert works[1] == StepWork(sequences=1, context_tokens=41)
    assert works[2] == StepWork(95, 95 * 96 // 2, 1, 42)  # the budget of 96, and one that decodes
    assert works[3] == StepWork(25, 25 * 95 + 25 * 26 // 2, 1, 43)


def test_all_kinds_of_steps_are_sampled_and_the_engine_is_left_clean(engine):
    before = vars(engine).keys() | vars(engine.scheduler).keys()
    samples = StepSampler(engine, budget_s=120.0).run()
    assert {sample.kind for sample in samples} == {"prefill", "decode", "mixed"}
    decoding = {sample.work.sequences for sample in samples if sample.kind == "decode"}
    assert {1, 2, 4, 8} <= decoding and max(decoding) <= 16
    assert max(sample.work.prompt_tokens for sample in samples) == 96
    assert any(sample.work.prompt_pairs > 96 * 97 // 2 for sample in samples)  # a chunk behind others
    assert len({sample.work for sample in samples}) == len(samples) and all(sample.seconds > 0 for sample in samples)
    assert not engine.scheduler.has_work and engine.pool.counts().used == 0
    assert vars(engine).keys() | vars(engine.scheduler).keys() == before


def test_the_curve_that_the_steps_follow_is_found(engine):
    clock = CurveClock(engine)
    samples = StepSampler(engine, budget_s=1e9, clock=clock).run()
    clock.restore()
    found = fit_curve(samples)
    assert max(error.p90 for error in found.errors.values()) < 0.04
    assert found.curve.token_s == pytest.approx(CURVE.token_s, rel=0.15)
    assert found.curve.weights_s + found.curve.overhead_s == pytest.approx(9e-3, rel=0.1)


def test_when_the_time_is_over_what_came_so_far_counts(engine):
    clock = CurveClock(engine)
    some = StepSampler(engine, budget_s=0.5, clock=clock).run()
    spent_s = clock.now_s
    clock.restore()
    assert len(some) > 0 and spent_s < 2.0
    assert not engine.scheduler.has_work and engine.pool.counts().used == 0
    assert len(StepSampler(engine, budget_s=120.0).run()) > len(some)


def test_a_sample_is_the_median_of_its_steps(engine):
    """One step in each cell that takes a hundred times as long changes nothing."""
    clock = CurveClock(engine)
    sampler = StepSampler(engine, budget_s=1e9, clock=clock)
    plain = {sample.work: sample.seconds for sample in sampler.run()}
    cell = next(steps for steps in sampler._cells.values() if len(steps) >= ROUNDS * PASSES)
    cell[0] = (cell[0][0], 100 * cell[0][1])
    again = [sample for sample in sampler.samples() if sample.work.sequences == cell[0][0].sequences]
    clock.restore()
    assert REPEATS * PASSES >= 3 and plain
    assert all(sample.seconds < 10 * CURVE.step_s(sample.work) for sample in again)


def test_what_happens_for_a_while_is_outvoted_and_told(engine):
    """A quarter of the time every step takes three times as long."""
    clock = CurveClock(engine)
    sampler = StepSampler(engine, budget_s=1e9, clock=clock)
    quiet = fit_curve(sampler.run()).curve
    quiet_spread, whole_s = sampler.spread(), clock()
    engine.reset_cache()
    clock = CurveClock(engine)
    clock.disturbed = (whole_s / 2, 0.75 * whole_s)
    sampler = StepSampler(engine, budget_s=1e9, clock=clock)
    disturbed = fit_curve(sampler.run()).curve
    clock.restore()
    assert sampler.spread() > quiet_spread + 0.05
    for sequences in (1, 8):
        assert disturbed.decode_step_s(sequences, 512) == pytest.approx(quiet.decode_step_s(sequences, 512), rel=0.1)
    assert disturbed.prefill_s(512, 0, 96) == pytest.approx(quiet.prefill_s(512, 0, 96), rel=0.1)


def test_a_fitted_profile_is_a_file_that_reads_back(engine):
    fitted = fit_curve(StepSampler(engine, budget_s=60.0).run())
    profile = profile_of(engine, fitted, model="tiny", num_threads=1, date="2026-11-22")
    assert parse_profile(profile.text(), "tiny") == profile
    assert profile.pool_tokens == engine.pool.num_blocks * engine.config.block_size
    assert profile.kv_bytes_per_token * profile.pool_tokens <= 4 << 20
    assert profile.kv_bytes_per_token * profile.pool_tokens > 3 << 20
    assert profile.fit is not None and set(profile.fit.errors) == {"prefill", "decode", "mixed"}
    assert profile.fit.dtype == "float32"


def test_too_short_a_time_is_refused_by_the_fit(engine):
    with pytest.raises(ConfigError, match="at least"):
        fit_curve(StepSampler(engine, budget_s=0.0).run())


def test_copying_has_a_speed():
    assert copy_bytes_per_s() > 1e8


def test_what_others_take_of_the_core_is_not_counted_where_one_thread_computes(engine):
    """Steps that sleep for 20 ms are as long as those that do not; on a clock of the wall they would be far longer."""
    clock = step_clock_of(engine)
    sampler = StepSampler(engine, budget_s=60.0, step_clock=clock)
    plain = sampler.reference_s(1)
    step = engine.step

    def held_up():
        time.sleep(0.02)
        return step()

    engine.step = held_up
    held, wall = (StepSampler(engine, budget_s=60.0, step_clock=one).reference_s(1) for one in (clock, None))
    assert clock is time.thread_time and min(wall.values()) > 0.02
    assert all(held[kind] < plain[kind] + 0.01 for kind in ("prefill", "decode"))


def test_what_comes_between_steps_counts_what_is_done_there_and_not_the_steps(engine, monkeypatch):
    """On a clock that a step moves by 1 s and the news that follow it by 0.25 s."""
    clock, step, drain = SimpleNamespace(now_s=0.0), engine.step, engine.reports.drain_events
    monkeypatch.setattr(neighbours, "time", SimpleNamespace(perf_counter=lambda: clock.now_s))

    def long_step(*on_reserved):
        clock.now_s += 1.0
        return step(*on_reserved)

    def long_news():
        clock.now_s += 0.25
        return drain()

    engine.step, engine.reports.drain_events = long_step, long_news
    assert neighbours.between_steps_s(engine) == 0.25
    assert engine.step is long_step and not engine.scheduler.has_work
    engine.check()


def test_what_comes_between_steps_is_part_of_each(engine):
    fitted = fit_curve(StepSampler(engine, budget_s=60.0).run())
    profile = profile_of(engine, fitted, model="tiny", num_threads=1, date="2026-11-22", between_s=0.004)
    assert profile.prefill == profile.decode
    assert profile.decode.overhead_s == pytest.approx(fitted.curve.overhead_s + 0.004)
