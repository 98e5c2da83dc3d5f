"""The planner: what a load needs, how counts are damped, and that they do not swing."""

import heapq
import math
import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.errors import ConfigError
from kvrelay.router.planning import capacity, split
from kvrelay.router.planning.capacity import aggregated_fits, decode_fits, prefill_fits, rate_of, workers_for
from kvrelay.router.planning.damping import Damper
from kvrelay.router.planning.demand import Demand, RequestShape, SeasonalPattern
from kvrelay.router.planning.planner import BOTH_SHARE, MOST_STRAIN, Planner, PlannerRules, PlannerState, ScalingPlan
from kvrelay.router.planning.types import (
    CountLimits,
    Interval,
    PlanningTarget,
    SpeedCurve,
    WorkerCounts,
    WorkerModel,
    Workload,
)

pytestmark = pytest.mark.pure


CURVE = SpeedCurve(overhead_s=0.002, weights_s=0.02, token_s=2e-4, pair_s=1e-9, context_s=2e-8, sequence_s=1e-5)
MODEL = WorkerModel(CURVE, CURVE, pool_tokens=200_000, token_budget=512, max_running=64)
TARGET = PlanningTarget(ttft_s=3.0, tpot_s=0.06, share=0.9)
LOAD = Workload(rate=4.0, input_tokens=2000, output_tokens=200, input_cv2=0.5)
RULES = PlannerRules(horizon_s=30.0, hold_s=120.0, period_s=0.0)
LOOK_S = 10.0
WANTED = TARGET.share + BOTH_SHARE  # of each target


def turns(counts: list[int]) -> list[int]:
    """Indices at which the count changes the other way than at its last change."""
    changes = [(index, b - a) for index, (a, b) in enumerate(pairwise(counts), start=1) if a != b]
    return [index for (_, old), (index, new) in pairwise(changes) if (old > 0) != (new > 0)]


def most_turns(span_s: float, hold_s: float) -> int:
    """The bound: see damping.py."""
    return 2 * math.floor(span_s / hold_s) + 3


def most_in_a_span(times: list[float], span_s: float) -> int:
    return max((sum(start <= time <= start + span_s for time in times) for start in times), default=0)


def seen(number: int, rate: float, **others: object) -> Interval:
    """Interval `number` of LOOK_S seconds with requests as in LOAD."""
    arrivals = round(rate * LOOK_S)
    facts = {
        "arrivals": arrivals, "input_tokens": 2000 * arrivals, "input_squares": 1.5 * 2000.0**2 * arrivals,
        "ended": arrivals, "output_tokens": 200 * arrivals, **others,
    }  # fmt: skip
    return Interval(number * LOOK_S, (number + 1) * LOOK_S, **facts)  # type: ignore[arg-type]


def planner(**limits: int) -> Planner:
    return Planner(MODEL, TARGET, CountLimits(**limits), RULES, WorkerCounts(1, 1))


def watch(it: Planner, rates: list[float], start: int = 0) -> list[ScalingPlan]:
    return [it.observe(seen(start + number, rate)) for number, rate in enumerate(rates)]


# ---- capacity


@given(
    rate=st.floats(0.05, 30),
    tokens=st.floats(1, 20_000),
    output=st.floats(1, 2000),
    cached=st.floats(0, 0.95),
    burst=st.floats(0.25, 16),
    workers=st.integers(1, 40),
)
def test_more_workers_and_fewer_requests_never_carry_less(rate, tokens, output, cached, burst, workers):
    load = Workload(rate, tokens, output, cached, burstiness=burst)
    for fits in (prefill_fits, decode_fits, aggregated_fits):
        if fits(load, MODEL, TARGET, workers):
            assert fits(load, MODEL, TARGET, workers + 1), fits
            assert fits(load.at(rate * 0.8), MODEL, TARGET, workers), fits


@given(workers=st.integers(1, 20), cached=st.floats(0, 0.9))
@settings(max_examples=25, deadline=None)
def test_the_workers_for_a_rate_and_the_rate_of_workers_agree(workers, cached):
    load = replace(LOAD, cached_share=cached)
    for fits in (prefill_fits, decode_fits, aggregated_fits):
        rate = rate_of(fits, load, MODEL, TARGET, workers)
        assert rate > 0
        assert workers_for(fits, load.at(rate * 0.999), MODEL, TARGET, 64) == workers
        assert workers_for(fits, load.at(rate * 1.001), MODEL, TARGET, 64) == workers + 1


def simulated_misses(load: Workload, servers: int, ttft_s: float, seed: int) -> float:
    """Share of late first tokens of a real queue: Poisson arrivals, lengths as `spread` has them, first come, first
    served.
    """
    draw = random.Random(seed)
    times = capacity.prompts_of(load, CURVE, MODEL.token_budget).alone_s
    free, now, late = [0.0] * servers, 0.0, 0
    for _ in range(20_000):
        now += draw.expovariate(load.rate)
        at = min(range(servers), key=free.__getitem__)
        free[at] = max(free[at], now) + draw.choice(times)
        late += free[at] - now > ttft_s
    return late / 20_000


@pytest.mark.parametrize("servers", [1, 3, 8])
@pytest.mark.parametrize("cv2", [0.3, 1.5])
def test_the_rate_of_prefill_workers_is_that_of_a_simulated_queue(servers, cv2):
    load = replace(LOAD, input_cv2=cv2)
    rate = rate_of(prefill_fits, load, MODEL, TARGET, servers)
    assert simulated_misses(load.at(0.8 * rate), servers, TARGET.ttft_s, seed=1) < 0.1
    assert simulated_misses(load.at(1.25 * rate), servers, TARGET.ttft_s, seed=1) > 0.1


def test_a_decode_worker_is_full_when_a_step_takes_the_target_or_its_pool_is():
    rate = rate_of(decode_fits, LOAD, MODEL, TARGET, 1)
    batch = capacity.batch_of(LOAD.at(rate), MODEL, TARGET, 1)
    assert batch is not None and batch.peak <= 64.0
    small = replace(MODEL, pool_tokens=20_000)
    assert rate_of(decode_fits, LOAD, small, TARGET, 1) < rate / 3
    slow = MODEL.slowed(1.0, 2.4)  # a step of one sequence takes 0.053 s
    assert 0 < rate_of(decode_fits, LOAD, slow, TARGET, 1) < rate / 2
    assert rate_of(decode_fits, LOAD, MODEL.slowed(1.0, 3.0), TARGET, 4) == 0.0


def test_bursts_and_uncached_tokens_need_more_prefill_workers():
    def need(load: Workload) -> int:
        return workers_for(prefill_fits, load, MODEL, TARGET, 64) or 99

    assert need(replace(LOAD, cached_share=0.6)) < need(LOAD) < need(replace(LOAD, burstiness=16.0))


def test_prompts_that_are_late_alone_do_not_ask_for_ever_more_workers():
    load = replace(LOAD, input_tokens=30_000, rate=0.5)
    assert capacity.hopeless_share(capacity.prompts_of(load, CURVE, 512).alone_s, TARGET.ttft_s) > 0.5
    assert workers_for(prefill_fits, load, MODEL, TARGET, 64) is not None


def test_the_network_bounds_what_a_split_carries():
    slow = replace(MODEL, kv_bytes_per_token=100_000, link_bytes_per_s=2e8)  # 1 prompt per s, 80 % of it planned for
    assert rate_of(prefill_fits, LOAD, slow, TARGET, 1) == pytest.approx(0.8, rel=0.01)
    assert rate_of(aggregated_fits, LOAD, slow, TARGET, 1) == rate_of(aggregated_fits, LOAD, MODEL, TARGET, 1)


# ---- workers that slow each other

CROWDED = replace(
    MODEL, workers_per_node=4, prefill_slowdown=(1.0, 1.3, 1.6, 2.0), decode_slowdown=(1.0, 1.1, 1.2, 1.3)
)


def test_a_crowded_worker_is_as_slow_as_its_machine_makes_it():
    assert CROWDED.crowded(1).prefill == CURVE and MODEL.crowded(9) == MODEL
    assert CROWDED.crowded(3).prefill.token_s == pytest.approx(1.6 * CURVE.token_s)
    assert CROWDED.crowded(3).decode.weights_s == pytest.approx(1.2 * CURVE.weights_s)
    assert CROWDED.crowded(50) == CROWDED.crowded(4) == CROWDED.crowded(4).crowded(4)  # once, not twice


def test_workers_that_slow_each_other_are_needed_in_greater_numbers():
    limits = CountLimits()
    much = LOAD.at(12.0)
    alone, crowded = (split.needs(much, much, model, TARGET, limits) for model in (MODEL, CROWDED))
    assert crowded == split.needs(much, much, MODEL.slowed(2.0, 1.3), TARGET, limits)
    assert crowded.counts(limits).total > alone.counts(limits).total > 4
    small = LOAD.at(0.1)
    assert split.needs(small, small, CROWDED, TARGET, limits) == (found := split.Needs(1, 1))
    assert found == split.needs(small, small, MODEL.slowed(1.3, 1.1), TARGET, limits)
    together = [split.needed_aggregated(much, model, TARGET, 64) or 99 for model in (MODEL, CROWDED)]
    assert together[1] > together[0]
    assert split.compared(much, CROWDED, TARGET, 6) == split.compared(much, MODEL.slowed(2.0, 1.3), TARGET, 6)


# ---- whether to disaggregate


@given(workers=st.integers(2, 12), tokens=st.floats(50, 8000), output=st.floats(5, 800))
@settings(max_examples=30, deadline=None)
def test_no_split_carries_more_than_the_best(workers, tokens, output):
    load = Workload(1.0, tokens, output)
    best, prefill_rate, decode_rate = split.best_split(load, MODEL, TARGET, workers)
    others = [
        min(rate_of(prefill_fits, load, MODEL, TARGET, p), rate_of(decode_fits, load, MODEL, TARGET, workers - p))
        for p in range(1, workers)
    ]
    assert best.total == workers
    assert min(prefill_rate, decode_rate) >= max(others) * (1 - 1e-6)


def test_it_says_no_where_aggregated_workers_carry_more_and_yes_where_decoding_must_not_be_held_up():
    chat = replace(LOAD, input_tokens=60, output_tokens=300)
    no = split.compared(chat, MODEL, replace(TARGET, tpot_s=0.2), 4)
    assert not no.disaggregate and no.aggregated_rate > no.split_rate > 0
    yes = split.compared(LOAD, MODEL, replace(TARGET, tpot_s=0.025), 4)
    assert yes.disaggregate and yes.split_rate > 1.2 * yes.aggregated_rate


def test_aggregated_workers_are_compared_at_their_best_token_budget():
    rates = {
        budget: rate_of(aggregated_fits, LOAD, replace(MODEL, token_budget=budget), TARGET, 4) for budget in (512, 64)
    }
    assert split.compared(LOAD, MODEL, TARGET, 4).aggregated_rate >= max(rates.values())


# ---- demand


def test_the_level_follows_and_a_jump_is_believed_at_once():
    demand = Demand(horizon_s=30.0, period_s=0.0)
    for number in range(20):
        demand.observe(seen(number, 4.0))
    assert demand.expected() == pytest.approx(4.0, rel=0.05)
    demand.observe(seen(20, 20.0))
    assert demand.expected() == pytest.approx(20.0, rel=0.05)


def poisson(draw: random.Random, mean: float) -> int:
    count, product = 0, draw.random()
    while product > math.exp(-mean):
        count, product = count + 1, product * draw.random()
    return count


def test_a_few_arrivals_a_minute_are_averaged_and_many_followed():
    told = {}
    for rate in (0.1, 10.0):
        draw, demand, levels = random.Random(11), Demand(horizon_s=180.0, period_s=0.0), []
        for number in range(2000):
            arrivals = poisson(draw, rate * LOOK_S)
            demand.observe(Interval(number * LOOK_S, (number + 1) * LOOK_S, arrivals, 100 * arrivals))
            levels.append(demand.expected() / rate)
        told[rate] = levels[200:]
    for levels in told.values():
        assert 0.9 < sum(levels) / len(levels) < 1.35
        assert max(levels) < 4.0  # one look of four arrivals instead of one is no jump, however rare
    deviation = {rate: max(levels) - min(levels) for rate, levels in told.items()}
    assert deviation[10.0] < deviation[0.1] < 1.5


def test_a_doubled_rate_is_believed_within_a_minute_though_no_single_look_shows_it():
    demand = Demand(horizon_s=30.0, period_s=0.0)
    for number in range(60):
        demand.observe(seen(number, 1.0))
    assert demand.expected() == pytest.approx(1.0, rel=0.05)
    told = []
    for number in range(60, 70):
        demand.observe(seen(number, 2.0))  # 20 instead of 10 in a look: 2.6 deviations
        told.append(demand.expected())
    assert told[0] < 1.5 and told[5] == pytest.approx(2.0, rel=0.15)


def test_room_is_made_for_what_is_not_known_of_the_rate_and_more_where_little_is():
    def room(rate: float) -> float:
        demand = Demand(horizon_s=60.0, period_s=0.0)
        for number in range(200):
            demand.observe(seen(number, rate))
        assert demand.expected(0.5) == demand.expected() == pytest.approx(rate, rel=0.05)
        return demand.expected(0.9) / rate

    assert 1.05 < room(50.0) < room(1.0) < room(0.1) < 1.6


def test_a_growing_load_is_foreseen():
    demand = Demand(horizon_s=30.0, period_s=0.0)
    for number in range(40):
        demand.observe(seen(number, 10.0 + 0.3 * number))
    assert 22.0 < demand.expected() < 24.0  # 21.7 now, 22.6 in 30 s


def test_noise_is_no_growth():
    draw, demand = random.Random(3), Demand(horizon_s=30.0, period_s=0.0)
    told = []
    for number in range(400):
        arrivals = sum(draw.random() < 0.04 for _ in range(1000))  # 4.0/s
        demand.observe(seen(number, arrivals / LOOK_S))
        told.append(demand.expected())
    assert 3.8 < sum(told[50:]) / 350 < 4.8


def of_the_day(hour: float) -> float:
    return 10.0 - 8.0 * math.cos(hour / 24 * 2 * math.pi) + (20.0 if 9 <= hour % 24 < 10 else 0.0)


def seasonal(days: float, step_s: float = 300.0) -> Demand:
    demand = Demand(horizon_s=600.0, period_s=86400.0)
    for number in range(int(days * 86400 / step_s)):
        arrivals = round(of_the_day(number * step_s / 3600) * step_s)
        demand.observe(Interval(number * step_s, (number + 1) * step_s, arrivals, 100 * arrivals))
    return demand


def test_the_second_day_is_foreseen_from_the_first():
    first, second = seasonal(8.9 / 24), seasonal(1 + 8.9 / 24)
    assert is_seasonal(second) and not is_seasonal(first)
    assert first.expected() < 20.0  # it knows of no rush at nine
    assert second.expected() > 30.0


def past_days(*rates_at_nine: float) -> SeasonalPattern:
    """Days alike but for the hour from nine on; now it is five minutes to nine of the next."""
    hours = [of_the_day(number / 12) for number in range(9 * 12)]
    days = [rate for nine in rates_at_nine for rate in (*hours, *[nine] * 15 * 12)]
    return SeasonalPattern([*days, *hours[:-1]])


def test_what_comes_is_the_mean_of_the_days_and_by_their_deviation_more_for_a_larger_share():
    season = past_days(20.0, 30.0, 40.0)
    assert season.ahead(600.0, 86400.0) == pytest.approx(30.0)
    assert season.ahead(600.0, 86400.0, 0.9) == pytest.approx(30.0 + 1.2816 * math.sqrt(200 / 3), rel=1e-4)


def test_days_that_went_otherwise_so_far_say_nothing():
    assert past_days(90.0, 20.0).ahead(600.0, 86400.0) == pytest.approx(55.0)
    other = SeasonalPattern([*past_days(90.0).bins[: 9 * 12][::-1], *past_days(90.0, 20.0).bins[9 * 12 :]])
    assert other.ahead(600.0, 86400.0) == pytest.approx(20.0)  # the first day's morning went the other way


def is_seasonal(demand):
    return demand.season.ahead(demand.horizon_s, demand.period_s) is not None


def test_a_level_load_shows_no_season():
    draw, demand = random.Random(5), Demand(horizon_s=600.0, period_s=86400.0)
    for number in range(2 * 288):
        arrivals = round(draw.gauss(1000, 32))
        demand.observe(Interval(number * 300.0, number * 300.0 + 300.0, arrivals, 100 * arrivals))
    assert not is_seasonal(demand)


def test_what_requests_are_like_is_learnt():
    demand = Demand(horizon_s=30.0, period_s=0.0)
    for number in range(10):
        demand.observe(seen(number, 4.0, cached_tokens=20_000))
    load = demand.shape.workload(4.0)
    assert load is not None
    assert (round(load.input_tokens), round(load.output_tokens)) == (2000, 200)
    assert load.input_cv2 == pytest.approx(0.5) and load.cached_share == pytest.approx(0.25)


def test_bursts_are_told_from_poisson():
    draw = random.Random(7)
    told = []
    for size in (1, 12):  # requests that come together
        demand = Demand(horizon_s=30.0, period_s=0.0)
        for number in range(300):
            groups = sum(draw.random() < 0.12 / size for _ in range(1000))
            demand.observe(seen(number, groups * size / LOOK_S))
        load = demand.shape.workload(12.0)
        assert load is not None
        told.append(load.burstiness)
    assert told[0] < 2.0 and 8.0 < told[1] < 20.0


def test_prompts_in_line_do_not_make_hits_look_rarer():
    demand = Demand(horizon_s=30.0, period_s=0.0)
    for number in range(10):
        demand.observe(seen(number, 4.0, cached_tokens=60_000))
    demand.observe(seen(10, 12.0, cached_tokens=60_000, ended=40, output_tokens=8000))  # 80 of the 120 wait still
    load = demand.shape.workload(4.0)
    assert load is not None and load.cached_share == pytest.approx(0.75)


def requests(number: int, count: int, prompt: int, output: int) -> Interval:
    start_s, tokens = number * LOOK_S, prompt * count
    return Interval(start_s, start_s + LOOK_S, count, tokens, prompt * tokens, 0, count, output * count)


def test_other_requests_make_the_lengths_of_the_last_ones_forgotten_at_once():
    shape = RequestShape()
    for number in range(60):
        shape.observe(requests(number, 60, 600, 2))
    shape.observe(requests(60, 40, 16, 150))
    load = shape.workload(4.0)
    assert load is not None and (load.input_tokens, load.output_tokens) == (16.0, 150.0)


@pytest.mark.parametrize(("prompt", "output"), [(16, 2), (600, 150)])
def test_other_prompts_or_other_answers_alone_are_enough(prompt, output):
    shape = RequestShape()
    for number in range(6):
        shape.observe(requests(number, 60, 600, 2))
    shape.observe(requests(6, 60, prompt, output))
    load = shape.workload(4.0)
    assert load is not None and (load.input_tokens, load.output_tokens) == (prompt, output)


def test_so_does_a_load_of_few_requests_in_an_interval_once_they_are_enough():
    shape = RequestShape()
    for number in range(60):
        shape.observe(requests(number, 40, 16, 150))
    shape.observe(requests(60, 5, 16, 8))
    assert shape.workload(1.0).output_tokens > 140
    shape.observe(requests(61, 5, 16, 8))
    assert shape.workload(1.0).output_tokens == 8.0


def test_a_few_odd_requests_or_a_mean_within_noise_make_nothing_forgotten():
    for odd in (requests(20, 9, 16, 150), requests(20, 40, 1300, 240)):
        shape = RequestShape()
        for number in range(20):
            shape.observe(requests(number, 60, 1000, 200))
        shape.observe(odd)
        load = shape.workload(4.0)
        assert load is not None and 900 < load.input_tokens < 1050 and 195 < load.output_tokens < 205


# ---- bursts


def after_bursts(bursts: int, *, length: int, every: int = 60) -> Demand:
    """One request per s, and now and then for `length` looks seven, a worker's start taking 18 looks."""
    demand = Demand(horizon_s=180.0, period_s=0.0)
    for number in range(60 + bursts * every):
        is_burst = number >= 60 and (number - 60) % every < length
        demand.observe(seen(number, 7.0 if is_burst else 1.0))
    return demand


def then(demand: Demand, start: int, rate: float, looks: int) -> list[float]:
    told = []
    for number in range(start, start + looks):
        demand.observe(seen(number, rate))
        told.append(demand.expected())
    return told


def test_bursts_that_are_over_before_a_worker_could_start_are_learnt_to_be():
    told = [then(after_bursts(bursts, length=6), 60 + 60 * bursts, 7.0, 1)[0] for bursts in (0, 1, 4)]
    assert told[0] == pytest.approx(7.0, rel=0.05)  # none seen: believed
    assert told[0] > told[1] > told[2] and told[2] < 3.0


def test_excesses_that_stay_are_believed_again_and_again():
    demand = after_bursts(6, length=40)
    assert then(demand, 420, 7.0, 1)[0] > 6.0


def test_a_step_after_bursts_is_followed_within_two_starts():
    told = then(after_bursts(4, length=6), 300, 7.0, 40)
    assert told[0] < 3.0 and told[35] > 6.0
    assert all(after >= before - 0.05 for before, after in pairwise(told))


def test_a_fall_is_followed_whatever_bursts_there_were():
    assert then(after_bursts(4, length=6), 300, 0.25, 30)[-1] == pytest.approx(0.25, abs=0.1)


# ---- damping: the bound


@given(
    needs=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=300),
    gaps=st.lists(st.floats(0.1, 60), min_size=300, max_size=300),
    hold_s=st.floats(20, 300),
)
def test_no_input_turns_a_count_more_often_than_the_bound(needs, gaps, hold_s):
    damper, now_s, counts, times = Damper(3, hold_s), 0.0, [3], [0.0]
    for (need, low), gap in zip(needs, gaps, strict=False):
        now_s += gap
        counts.append(damper.step(need, low, now_s, most=10))
        times.append(now_s)
    at = [times[index] for index in turns(counts)]
    assert most_in_a_span(at, 3600.0) <= most_turns(3600.0, hold_s)
    assert most_in_a_span(at, hold_s) <= most_turns(hold_s, hold_s)
    assert max(counts) <= 10


@pytest.mark.slow
def test_the_bound_is_nearly_reached_so_the_property_can_fail():
    """Need that swings as fast as it can: without the doubled holds, two turns in each hold; and a bare follower turns
    always.
    """
    damper, counts, hold_s = Damper(1, 100.0), [1], 100.0
    for second in range(7200):
        need = 2 if damper.count == 1 else 1
        counts.append(damper.step(need, need, float(second), most=10))
        damper.hold_s = hold_s  # what rule 3 adds is taken away
    at = [float(index) for index in turns(counts)]
    assert 0.9 * most_turns(3600.0, hold_s) <= most_in_a_span(at, 3600.0) <= most_turns(3600.0, hold_s)
    bare = [5 if second % 2 else 1 for second in range(7200)]
    assert most_in_a_span([float(index) for index in turns(bare)], 3600.0) > most_turns(3600.0, hold_s)


def test_downs_that_are_taken_back_come_more_rarely():
    damper, counts = Damper(1, 100.0), [1]
    for second in range(14400):
        need = 5 if damper.count == 1 else 1
        counts.append(damper.step(need, need, float(second), most=10))
    late = [index for index in turns(counts) if index > 7200]
    assert len(late) <= 2 * 7200 / 200 + 3


def test_up_at_once_down_only_after_the_hold_and_by_half_at_most():
    damper = Damper(2, 60.0)
    assert damper.step(8, 9, 0.0, most=20) == 8
    assert [damper.step(1, 1, 5.0 * step, most=20) for step in range(1, 12)] == [8] * 11
    assert damper.step(1, 1, 60.0, most=20) == 8  # the window still has the nine
    assert damper.step(1, 1, 66.0, most=20) == 4


def test_a_spike_that_is_over_before_a_worker_could_start_starts_none():
    damper = Damper(2, 60.0, rise_s=20.0)
    needs = [2, 2, 2, 9, 2, 2, 9, 9, 2, 4, 5, 6, 6]
    counts = [damper.step(need, need, 10.0 * number, most=20) for number, need in enumerate(needs)]
    assert counts == [2] * 11 + [4, 5]


def test_downs_follow_one_another_sooner_than_an_up():
    damper, counts = Damper(8, 100.0), []
    for number in range(40):
        counts.append(damper.step(1, 1, 5.0 * number, most=20))
    at = [5.0 * index for index, (a, b) in enumerate(pairwise(counts), start=1) if b < a]
    assert counts[-1] == 1 and at == [100.0, 125.0, 150.0]
    assert damper.step(8, 8, 200.0, most=20) == 8
    assert [damper.step(1, 1, 200.0 + 5.0 * number, most=20) for number in range(1, 20)] == [8] * 19


@pytest.mark.parametrize("hold_s", [10.0, 20.0, 39.0])
def test_a_count_follows_needs_of_every_ten_seconds_however_short_the_hold_is(hold_s):
    """A quarter of such a hold is shorter than the time between two needs, which are no gap all the same."""
    damper = Damper(1, hold_s, rise_s=15.0)
    needs = [1] + [3] * 6 + [1] * 12
    counts = [damper.step(need, need, LOOK_S * number, most=5) for number, need in enumerate(needs)]
    up = math.ceil(15.0 / LOOK_S)  # the first need is out of the window of rise_s
    assert counts[up:7] == [3] * (7 - up) and counts[1:up] == [1] * (up - 1)
    assert counts[-1] == 1 and counts[7 + math.floor(hold_s / LOOK_S) - 1] == 3


def test_silence_is_no_reason_to_go_down():
    damper = Damper(4, 60.0)
    damper.step(1, 1, 0.0, most=20)
    assert damper.step(1, 1, 1000.0, most=20) == 4


# ---- the planner


@pytest.mark.slow
@given(
    rates=st.lists(st.floats(0, 60), min_size=5, max_size=60),
    kept=st.lists(st.sampled_from([None, 0.0, 0.5, 0.95, 1.0]), min_size=60, max_size=60),
    slow=st.lists(st.sampled_from([None, 0.1, 1.0, 5.0, math.inf]), min_size=60, max_size=60),
    queued=st.lists(st.integers(0, 500), min_size=60, max_size=60),
    total=st.integers(2, 12),
)
@settings(max_examples=60, deadline=None)
def test_whatever_is_seen_the_counts_stay_in_bounds_and_turn_no_more_than_the_bound(rates, kept, slow, queued, total):
    it = planner(min_prefill=1, max_prefill=8, min_decode=1, max_decode=6, total=total)
    counts = [it.counts]
    for number, rate in enumerate(rates):
        interval = seen(
            number,
            rate,
            queued=queued[number],
            ttft_kept=kept[number],
            tpot_kept=kept[-number],
            judged=50,
            prefill_slowness=slow[number],
            decode_slowness=slow[-number],
        )
        counts.append(it.observe(interval).counts)
    for each in counts:
        assert 1 <= each.prefill <= 8 and 1 <= each.decode <= 6 and each.total <= total
    for role in range(2):
        at = [index * LOOK_S for index in turns([each[role] for each in counts])]
        assert most_in_a_span(at, 600.0) <= most_turns(600.0, RULES.hold_s)


@pytest.mark.slow
@given(
    rate=st.floats(0.0, 40),
    start=st.floats(0.0, 40),
    kept=st.sampled_from([None, 0.0, WANTED, 0.95]),
    slow=st.sampled_from([None, 0.5, 1.0, 1.7]),
    first=st.tuples(st.integers(1, 30), st.integers(1, 30)),
)
@settings(max_examples=25, deadline=None)
def test_a_constant_load_leads_to_constant_counts(rate, start, kept, slow, first):
    it = Planner(MODEL, TARGET, CountLimits(), RULES, WorkerCounts(*first))
    others = {"ttft_kept": kept, "tpot_kept": kept, "judged": 50, "prefill_slowness": slow, "decode_slowness": slow}
    for number in range(10):
        it.observe(seen(number, start, **others))
    settled = (
        10 + 6 * int(RULES.hold_s / LOOK_S) + 150
    )  # five halvings from 30 to 1; strain and what requests are like learnt
    counts = [it.observe(seen(number, rate, **others)).counts for number in range(10, settled + 150)]
    assert len(set(counts[settled - 10 :])) == 1


@given(
    rates=st.lists(st.floats(0, 60), min_size=5, max_size=80),
    kept=st.lists(st.sampled_from([None, 0.5, 0.95]), min_size=80, max_size=80),
    cuts=st.sets(st.integers(0, 79), min_size=1, max_size=8),
)
@settings(max_examples=40, deadline=None)
def test_a_planner_that_goes_on_from_another_ones_state_decides_as_that_one_would(rates, kept, cuts):
    rules = replace(RULES, period_s=600.0)
    one = Planner(MODEL, TARGET, CountLimits(), rules, WorkerCounts(1, 1))
    other = Planner(MODEL, TARGET, CountLimits(), rules, WorkerCounts(1, 1))
    for number, rate in enumerate(rates):
        interval = seen(number, rate, ttft_kept=kept[number], judged=50, prefill_slowness=1.3)
        assert one.observe(interval) == other.observe(interval)
        if number in cuts:
            learned = msgspec.msgpack.decode(msgspec.msgpack.encode(other.state), type=PlannerState)
            counts, other = other.counts, Planner(MODEL, TARGET, CountLimits(), rules, other.counts, learned)
            assert other.counts == counts


@pytest.mark.slow
def test_a_queue_that_answers_to_its_workers_settles():
    """Closed loop: TTFT is kept where there are enough workers by another account than the planner's own."""
    for enough in range(1, 12):
        it = planner()
        counts = [it.counts]
        for number in range(400):
            kept = 0.97 if it.counts.prefill >= enough else 0.4
            counts.append(it.observe(seen(number, 4.0, ttft_kept=kept, tpot_kept=1.0, judged=40)).counts)
        assert len(set(counts[150:])) == 1, enough
        assert not turns([each.prefill for each in counts])


def test_both_roles_follow_the_load_up_at_once_and_down_late():
    it = planner()
    low = watch(it, [2.0] * 20)[-1].counts
    high = watch(it, [12.0] * 3, start=20)[-1].counts
    assert high.prefill > low.prefill and high.decode > low.decode
    falling = [plan.counts for plan in watch(it, [2.0] * 80, start=23)]
    hold = int(RULES.hold_s / LOOK_S)
    assert set(falling[: hold - 1]) == {high}
    assert falling[-1] == low


def test_more_prompt_than_output_needs_prefill_and_the_other_way_round():
    prompts, outputs = planner(), planner()
    for number in range(10):
        some = seen(number, 4.0)
        prompts.observe(replace(some, output_tokens=5 * some.arrivals))
        outputs.observe(
            replace(some, input_tokens=50 * some.arrivals, input_squares=0, output_tokens=900 * some.arrivals)
        )
    assert prompts.counts.prefill > outputs.counts.prefill
    assert prompts.counts.decode < outputs.counts.decode


def test_within_a_total_the_split_that_carries_most_is_taken():
    it = planner(total=6)
    plan = watch(it, [30.0] * 60)[-1]
    assert plan.load is not None
    best, _, _ = split.best_split(plan.load, MODEL, TARGET, 6)
    assert plan.counts == best
    assert "both roles together may have 6" in plan.reasons


def test_slow_workers_are_believed_to_be_slow():
    it, fine = planner(), planner()
    for number in range(30):
        it.observe(seen(number, 4.0, prefill_slowness=2.0))
        fine.observe(seen(number, 4.0, prefill_slowness=1.0))
    assert it.counts.prefill > fine.counts.prefill and it.counts.decode == fine.counts.decode


def test_a_tpot_out_of_reach_does_not_ask_for_all_workers_for_ever():
    it = planner()
    for number in range(120):
        plan = it.observe(seen(number, 1.0, decode_slowness=4.0, tpot_kept=0.0, judged=50))
    assert it.counts.decode < 10
    assert any("out of reach" in reason for reason in plan.reasons)
    for number in range(120, 160):
        it.observe(seen(number, 0.0))
    assert it.counts == WorkerCounts(1, 1)


def test_prompts_that_wait_already_are_planned_for():
    it, fine = planner(), planner()
    for number in range(3):
        it.observe(seen(number, 4.0, queued=200))
        fine.observe(seen(number, 4.0, queued=4))
    assert it.counts.prefill > fine.counts.prefill


def test_every_plan_says_why():
    it = planner()
    plan = next(plan for plan in watch(it, [8.0] * 3) if plan.counts != WorkerCounts(1, 1))
    assert any("requests/s expected" in reason for reason in plan.reasons)
    assert any(reason.startswith("prefill 1 -> ") for reason in plan.reasons)
    assert planner().observe(Interval(0.0, 10.0)).reasons == ("no request has been seen yet",)


def test_before_any_request_the_counts_stay():
    it = Planner(MODEL, TARGET, CountLimits(), RULES, WorkerCounts(3, 2))
    assert {it.observe(Interval(n * 10.0, n * 10.0 + 10.0)).counts for n in range(100)} == {WorkerCounts(3, 2)}


@pytest.mark.parametrize("wrong", [{"min_prefill": 3, "max_prefill": 2}, {"min_decode": 0}, {"total": 1}])
def test_limits_that_contradict_each_other_are_refused(wrong):
    with pytest.raises(ConfigError):
        CountLimits(**wrong)


def test_too_many_at_the_start_are_cut_to_the_total():
    assert Planner(MODEL, TARGET, CountLimits(total=5), RULES, WorkerCounts(9, 9)).counts.total <= 5


# ---- workers that do both


BOTH = {"min_prefill": 0, "max_prefill": 0}


def aggregated(**limits: int) -> Planner:
    return Planner(MODEL, TARGET, CountLimits(**BOTH, **limits), RULES, WorkerCounts(0, 1))


def test_aggregated_workers_are_one_count_that_carries_prompts_and_outputs():
    limits = CountLimits(**BOTH)
    for rate in (0.1, 2.0, 8.0):
        load = LOAD.at(rate)
        found = split.needs(load, load.at(rate / 2), MODEL, TARGET, limits)
        assert found == split.Needs(0, split.needed_aggregated(load, MODEL, TARGET, limits.max_decode))
    assert found.decode is not None and found.decode > 2
    assert split.needs(LOAD.at(900.0), LOAD, MODEL, TARGET, limits).counts(limits) == WorkerCounts(0, 64)


def test_the_count_of_aggregated_workers_follows_the_load_within_the_total_and_turns_no_more_than_the_bound():
    it, course = aggregated(total=9), []
    for number, rate in enumerate([2.0] * 20 + [30.0] * 9 + [2.0] * 60 + [12.0] * 9 + [0.5] * 60):
        course.append(it.observe(seen(number, rate)).counts)
    counts = [one.decode for one in course]
    assert {one.prefill for one in course} == {0} and max(counts) == 9 and counts[-1] == 1
    assert 1 < counts[19] < 9 and counts[88] == counts[19] < counts[97]
    at = [index * LOOK_S for index in turns(counts)]
    assert 2 <= most_in_a_span(at, 600.0) <= most_turns(600.0, RULES.hold_s)


# ---- where late requests are refused


def refused_in_a_queue(rate: float, workers: int, ttft_s: float, number: int = 30_000) -> float:
    """Share of Poisson arrivals, with exponential work of one second, that a first-come queue would not have ended in
    time.
    """
    rng, free_s, now_s, refused = random.Random(1), [0.0] * workers, 0.0, 0
    for _ in range(number):
        now_s += rng.expovariate(rate)
        begin_s = max(free_s[0], now_s)
        if begin_s + 1.0 - now_s > ttft_s:
            refused += 1
        else:
            heapq.heapreplace(free_s, begin_s + rng.expovariate(1.0))
    return refused / number


@pytest.mark.parametrize("workers", [1, 3, 8])
@pytest.mark.parametrize("busy", [0.6, 0.8, 0.9, 1.0, 1.1, 1.3])
def test_the_refused_share_is_that_of_a_queue_that_refuses(workers, busy):
    load, own = Workload(busy * workers, 1000, 100), capacity.Prompts((1.0,) * 8, 1.0, 1.0, 1000, 1)
    for ttft_s in (5.0, 10.0):
        share = capacity.refused_share(own, load, PlanningTarget(ttft_s, 0.1), workers)
        assert share == pytest.approx(refused_in_a_queue(load.rate, workers, ttft_s), abs=0.06)


def test_what_an_idle_worker_misses_is_refused_whatever_the_number_of_workers():
    own = capacity.Prompts((1.0, 1.0, 8.0, 8.0), 4.5, 1.0, 1000, 1)
    shares = [capacity.refused_share(own, LOAD.at(rate), TARGET, 100) for rate in (0.0, 1e-6, 1.0)]
    assert shares == pytest.approx([0.5] * 3)
    assert capacity.refused_share(own, LOAD, replace(TARGET, ttft_s=0.5), 100) == 1.0


def test_fewer_workers_are_enough_where_late_requests_are_refused_and_twice_the_load_needs_more():
    refusing = replace(TARGET, refuses_late=True)
    for rate in (4.0, 12.0, 40.0):
        waits, refuses, twice = (
            workers_for(prefill_fits, LOAD.at(load), MODEL, target, 500)
            for load, target in ((rate, TARGET), (rate, refusing), (2 * rate, refusing))
        )
        assert refuses <= waits and refuses < twice <= 2 * refuses
    assert refuses < waits
    it, other = planner(), planner()
    for number in range(30):
        it.observe(seen(number, 12.0, refuses_late=True))
        other.observe(seen(number, 12.0))
    assert it.counts.prefill < other.counts.prefill and it.counts.decode == other.counts.decode


@pytest.mark.parametrize("missed", ["ttft_kept", "tpot_kept"])
def test_a_target_that_too_few_requests_keep_is_planned_for_with_more_aggregated_workers(missed):
    it, fine = aggregated(), aggregated()
    kept = {"ttft_kept": WANTED, "tpot_kept": WANTED, "judged": 50}
    for number in range(30):
        plan = it.observe(seen(number, 12.0, **{**kept, missed: 0.5}))
        fine.observe(seen(number, 12.0, **kept))
    assert it.counts.decode > fine.counts.decode and list(fine.state.strain.values()) == pytest.approx([1.0, 1.0])
    assert any(reason.startswith("too few requests keep the") for reason in plan.reasons)
    assert not any(reason.startswith("prefill") for reason in plan.reasons)


def test_where_late_requests_are_refused_workers_start_later():
    first = {}
    for refuses_late in (False, True):
        it = Planner(MODEL, TARGET, CountLimits(), replace(RULES, horizon_s=200.0), WorkerCounts(1, 1))
        counts = [it.observe(seen(number, 20.0, refuses_late=refuses_late)).counts.total for number in range(30)]
        first[refuses_late] = next(index for index, count in enumerate(counts) if count > 2) * LOOK_S
    assert first[False] < 0.3 * 200.0 < 0.5 * 200.0 <= first[True] < 0.6 * 200.0


def test_where_decode_workers_compute_prompts_both_roles_are_no_more_than_aggregated_workers():
    fewer = 0
    for rate, tokens in ((2.0, 2000), (8.0, 2000), (30.0, 2000), (8.0, 6000), (30.0, 200)):
        load = replace(LOAD, rate=rate, input_tokens=tokens)
        apart = split.needs(load, load, MODEL, TARGET, CountLimits())
        shared = split.needs(load, load, MODEL, TARGET, CountLimits(), prefills_on_decode=True)
        both = split.needed_aggregated(load, MODEL, TARGET, 100)
        assert shared.decode == apart.decode and 1 <= shared.prefill <= apart.prefill
        assert shared.prefill + shared.decode == max(min(apart.prefill + apart.decode, both), apart.decode + 1)
        fewer += shared.prefill < apart.prefill
    assert fewer >= 2
    it, other, queued = planner(), planner(), planner()
    for number in range(30):
        it.observe(seen(number, 5.0, prefills_on_decode=True, refuses_late=True))
        other.observe(seen(number, 5.0, refuses_late=True))
        queued.observe(seen(number, 5.0, prefills_on_decode=True))
    assert it.counts.prefill < other.counts.prefill <= queued.counts.prefill
    assert it.counts.decode == other.counts.decode == queued.counts.decode


# ---- what requests that keep their targets say of the model


def after(kept: float, rate: float = 4.0, number: int = 300, **others: Any) -> Planner:
    """A planner that has seen so many intervals in which this share kept both targets."""
    it, judged = planner(), {"ttft_kept": kept, "tpot_kept": kept, "judged": 40}
    for index in range(number):
        it.observe(seen(index, rate, **{**judged, **others}))
    return it


def test_more_requests_than_wanted_change_nothing():
    fine, exact = after(1.0), after(WANTED)
    assert fine.counts == exact.counts
    assert list(fine.state.strain.values()) == pytest.approx([1.0, 1.0])


def test_while_workers_start_what_queues_is_late_and_no_reason_for_more_but_what_is_refused_is():
    assert set(after(0.5, is_changing=True).state.strain.values()) == {1.0}
    assert min(after(0.5, is_changing=True, refuses_late=True).state.strain.values()) > 1.5


def test_misses_where_there_may_be_no_more_workers_say_nothing_of_the_model():
    for limits in ({"max_prefill": 2, "max_decode": 2}, {"total": 4}):
        it, missed = planner(**limits), {"ttft_kept": 0.2, "tpot_kept": 0.2, "judged": 60}
        for number in range(100):
            it.observe(seen(number, 40.0, **missed, refuses_late=True))
        assert it.counts.total == 4
        assert max(it.state.strain.values()) < 1.2  # from before the counts were reached
    assert min(after(0.2, 40.0, 100, refuses_late=True).state.strain.values()) == MOST_STRAIN  # control


def test_few_requests_say_little():
    many, few = after(0.5, number=12), after(0.5, number=12, judged=1)
    assert min(many.state.strain.values()) > 1.1 > 1.04 > max(few.state.strain.values()) > 1.0


def test_prompts_that_are_late_on_an_idle_worker_are_no_reason_for_more():
    lengths = {
        "input_tokens": 40 * 10_000,
        "input_squares": 40 * 3.0 * 10_000.0**2,
        "ttft_kept": 0.75,
        "tpot_kept": 0.91,
    }
    hopeless = after(WANTED, **lengths)
    late = capacity.prompts_of(hopeless.state.demand.shape.workload(4.0), hopeless.corrected.prefill, 512).alone_s
    assert 0.2 < capacity.hopeless_share(late, TARGET.ttft_s) < 0.3  # of those lengths
    assert hopeless.state.strain["prefill"] == 1.0
    assert after(0.75).state.strain["prefill"] == MOST_STRAIN  # control: shorter ones are late for want of workers


# ---- roles that change


def swinging(*, may_switch: bool) -> tuple[Planner, list[WorkerCounts]]:
    """A load of prompts for 100 s, one of outputs for 100 s, and so on; hold 50 s."""
    rules = replace(RULES, hold_s=50.0, switch_roles=may_switch)
    it, course = Planner(MODEL, TARGET, CountLimits(), rules, WorkerCounts(1, 1)), []
    for number in range(80):
        facts = {"arrivals": 100, "ended": 100}
        if number // 10 % 2 == 0:
            facts |= {"input_tokens": 200_000, "input_squares": 4e8, "output_tokens": 300}
        else:
            facts |= {"input_tokens": 10_000, "input_squares": 1e6, "output_tokens": 60_000}
        it.observe(Interval(number * LOOK_S, (number + 1) * LOOK_S, **facts))
        course.append(it.counts)
    return it, course


def started(course: list[WorkerCounts]) -> int:
    return sum(max(0, after.total - before.total) for before, after in pairwise(course))


def test_a_load_that_swings_switches_workers_instead_of_starting_and_stopping_them():
    _, switched = swinging(may_switch=True)
    _, apart = swinging(may_switch=False)
    trades = [
        (before, after)
        for before, after in pairwise(switched)
        if (after.prefill - before.prefill) * (after.decode - before.decode) < 0
    ]
    assert len(trades) >= 4, switched
    assert started(switched) <= started(apart) / 2
    assert sum(one.total for one in switched) < sum(one.total for one in apart)
    for role in ("prefill", "decode"):
        times = [index * LOOK_S for index in turns([getattr(one, role) for one in switched])]
        assert most_in_a_span(times, 200.0) <= most_turns(200.0, 50.0)


def test_the_total_is_no_limit_for_a_role_that_takes_what_the_other_has_to_spare():
    it = planner(total=4)
    for number in range(10):
        it.observe(seen(number, 8.0, input_tokens=100_000, input_squares=2e8, output_tokens=300))
    full = it.counts
    for number in range(10, 30):
        plan = it.observe(seen(number, 8.0, input_tokens=8_000, input_squares=1e6, output_tokens=60_000))
        if it.counts != full:
            break
    assert it.counts.total <= 4 and it.counts.decode > full.decode, (full, plan.reasons)


@pytest.mark.parametrize("hold_s", [10.0, 40.0])
@pytest.mark.parametrize("interval_s", [5.0, 5.1, 6.0])
@pytest.mark.parametrize("share", [0.1, 0.4, 0.7])
def test_a_worker_switches_although_one_roles_need_falls_sooner_or_later_than_the_others_rises(
    hold_s, interval_s, share
):
    """`share`: of the interval in which the requests change that is still of the old ones: both roles may need more in
    it. A need must last 15 s, so that with the shorter hold the other count could fall before.
    """
    rules = PlannerRules(horizon_s=60.0, hold_s=hold_s, period_s=0.0)
    it = Planner(MODEL, TARGET, CountLimits(1, 2, 1, 2), rules, WorkerCounts(1, 1))
    course = []
    for number in range(40):
        long = 80 if number < 20 else round(80 * share) if number == 20 else 0
        new = 60 - round(60 * share) if number == 20 else 60 if number > 20 else 0
        tokens, squares = 2000 * long + 50 * new, 4e6 * long + 2500.0 * new
        facts = {"arrivals": long + new, "ended": long + new, "input_tokens": tokens, "input_squares": squares}
        it.observe(
            Interval(number * interval_s, (number + 1) * interval_s, output_tokens=2 * long + 300 * new, **facts)
        )
        course.append(it.counts)
    assert course[19] == WorkerCounts(2, 1) and course[-1] == WorkerCounts(1, 2), course
    assert set(course[19:]) == {WorkerCounts(2, 1), WorkerCounts(1, 2)}, course
