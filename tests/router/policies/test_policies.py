"""Each policy against numbers worked out by hand; then what holds for all of them."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.errors import ConfigError
from kvrelay.router.policies.base import MAX_CANDIDATES, Candidate, CostModel, RoutingContext, RoutingPolicy
from kvrelay.router.policies.selection import POLICIES as REGISTERED
from kvrelay.router.policies.selection import (
    LeastLoaded,
    PowerOfTwo,
    PrefixAffinity,
    RoundRobin,
    Session,
    best_rows,
    build_policy,
    draws,
    two_by_two,
    unit,
)
from kvrelay.router.types import RouteRequest
from kvrelay.settings.router import RouterSettings
from tests.router.policies.policy_cases import (
    ask,
    best,
    check_a_better_worker_wins,
    check_contract,
    check_keeps_the_contract,
    check_order,
    check_row_order_decides_between_equals_only,
    check_serves_through_the_router,
    decode_of,
    prefill_of,
    side,
)

pytestmark = pytest.mark.pure


POLICIES = {policy.name: policy for policy in (RoundRobin, LeastLoaded, PowerOfTwo, Session, PrefixAffinity)}


# ---- one rule each


def test_round_robin_takes_whoever_was_chosen_longest_ago():
    way = best(RoundRobin({}), side(turn=[7, 3, 9], queued_tokens=[0, 5000, 0]), side(turn=[4, 8, 2]))
    assert (way.prefill, way.decode) == (1, 2)


def test_round_robin_goes_around():
    turns, chosen = [0, 0, 0], []
    for number in range(1, 7):
        row = prefill_of(RoundRobin({}), side(turn=turns))
        chosen.append(row)
        turns[row] = number
    assert chosen == [0, 1, 2, 0, 1, 2]


def test_least_loaded_counts_prompt_tokens_or_requests_on_the_prefill_side():
    loads = side(queued_tokens=[300, 100], sequences=[1, 5])
    assert prefill_of(LeastLoaded({}), loads) == 1
    assert prefill_of(LeastLoaded({"by": "requests"}), loads) == 0
    assert decode_of(LeastLoaded({}), side(sequences=[3, 2])) == 1
    assert prefill_of(LeastLoaded({}), side(turn=[2, 1])) == 1


def test_power_of_two_takes_the_less_loaded_of_each_two_that_chance_names():
    load = np.arange(10)
    for number in range(50):
        request = ask(draw=number / 50)
        keys = draws(request.draw, 10, 1)
        named = np.argsort(keys).reshape(5, 2)
        rows = two_by_two(request, load, 1).reshape(5, 2)
        assert (np.sort(rows) == np.sort(named)).all()
        assert (load[rows[:, 0]] < load[rows[:, 1]]).all()


def test_power_of_two_never_takes_the_most_loaded_but_often_not_the_least():
    chosen = {prefill_of(PowerOfTwo({}), side(sequences=[0, 1, 2, 9]), draw=n / 100) for n in range(100)}
    assert chosen == {0, 1, 2}
    by_tokens = PowerOfTwo({"by": "tokens"})
    assert {prefill_of(by_tokens, side(queued_tokens=[9, 0], sequences=[0, 9]), draw=n / 20) for n in range(20)} == {1}


def test_a_session_stays_where_it_was_whatever_its_workers_have_to_do():
    workers = side(sequences=[0, 1, 2, 3, 4])
    first = prefill_of(Session({}), workers, session="s", draw=0.1)
    busy = replace(workers, sequences=np.array([90] * 5))
    assert prefill_of(Session({}), busy, session="s", draw=0.9) == first


def test_a_lost_worker_moves_its_own_sessions_only():
    before, after = side(8), side(7)  # the last one is gone
    moved = 0
    for number in range(400):
        was = prefill_of(Session({}), before, session=f"s{number}")
        now = prefill_of(Session({}), after, session=f"s{number}")
        assert now == was or was == 7
        moved += was != now
    assert 20 < moved < 90


def test_a_request_without_a_session_goes_by_its_own_id():
    def chosen(request_id):
        request = RouteRequest(request_id=request_id, block_hashes=(), num_tokens=10, max_tokens=2)
        return Session({}).rank(RoutingContext(request, 0.5, 0.0), side(8), side(8))[0].prefill

    assert len({chosen(f"r{n}") for n in range(60)}) == 8


def test_ray_takes_the_longest_prefix_from_a_tenth_of_the_prompt_on_and_of_equals_the_less_loaded():
    policy = PrefixAffinity({})
    assert prefill_of(policy, side(held=[16, 0], sequences=[900, 0]), tokens=160) == 0
    assert (
        prefill_of(policy, side(held=[16, 0], turn=[2, 1]), tokens=161) == 1
    )  # below a tenth: whoever was chosen longest ago
    assert prefill_of(policy, side(held=[32, 64, 64], sequences=[0, 5, 4])) == 2
    assert prefill_of(policy, side(held=[0, 0], turn=[3, 3], sequences=[2, 1])) == 1
    assert prefill_of(policy, side(held=[0, 0], turn=[2, 1], sequences=[0, 5])) == 1
    assert prefill_of(policy, side(held=[0, 0], turn=[2, 1], sequences=[0, 5]), needs_decode=False) == 1
    assert decode_of(policy, side(held=[0, 64])) == 1


def test_ray_falls_back_to_two_random_ones_beyond_the_threshold_that_it_has_none_of_by_default():
    policy = PrefixAffinity({"imbalanced_threshold": 10})
    uneven = side(held=[0, 160, 0], sequences=[0, 11, 0])
    assert {prefill_of(policy, uneven, draw=n / 50) for n in range(50)} == {0, 2}
    assert prefill_of(policy, side(held=[0, 160, 0], sequences=[0, 10, 0])) == 1


# ---- settings


@pytest.mark.parametrize("name", POLICIES)
def test_unknown_options_are_refused(name):
    with pytest.raises(ConfigError, match=f"router.policy_options of {name}: there is no option nonsense"):
        POLICIES[name]({"nonsense": 1})


def test_wrong_options_are_named():
    with pytest.raises(ConfigError, match="by: "):
        LeastLoaded({"by": "luck"})


class FirstPair(RoutingPolicy):
    """A policy of one's own."""

    name, term_names = "first_pair", ()

    def __init__(self, options):
        self.options = options

    def rank(self, context, prefills, decodes):
        return [Candidate(0, 0, 0.0, ())]


def test_a_policy_of_ones_own_is_named_by_its_path():
    settings = RouterSettings(policy=f"{__name__}:FirstPair", policy_options={"colour": 1})
    built = build_policy(settings, CostModel())
    assert type(built).__name__ == "FirstPair" and built.options == {"colour": 1}
    assert built.latency_targets(ask().request) is None


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("rund_robin", "did you mean round_robin"),
        ("no.such.module:Policy", "cannot be imported"),
        (f"{__name__}:NoSuchClass", "cannot be imported"),
        (":FirstPair", "cannot be imported"),
        ("kvrelay.config:RouterSettings", "no subclass"),
    ],
)
def test_an_unknown_policy_is_refused(policy, message):
    with pytest.raises(ConfigError, match=message):
        build_policy(RouterSettings(policy=policy), CostModel())


# ---- what holds for all of them


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_keeps_the_contract(name):
    check_keeps_the_contract(POLICIES[name]({}))


@pytest.mark.parametrize("name", sorted(set(POLICIES) - {"power_of_two"}))
def test_the_order_of_the_rows_decides_between_equals_only(name):
    check_row_order_decides_between_equals_only(POLICIES[name]({}))


@pytest.mark.parametrize("name", sorted(set(POLICIES) - {"power_of_two", "session"}))
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_worker_that_is_better_in_everything_wins(name, role):
    check_a_better_worker_wins(POLICIES[name]({}), role)


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_serves_through_the_router(name):
    assert REGISTERED[name] is POLICIES[name]
    check_serves_through_the_router(name, POLICIES[name])


@given(st.lists(st.integers(0, 5), min_size=1, max_size=60), st.integers(0, 9))
def test_the_best_rows_are_those_of_a_full_sort(score, seed):
    score, tie = np.array(score), draws(seed / 10, len(score), 1)
    assert best_rows(score, tie).tolist() == np.lexsort((tie, score))[:MAX_CANDIDATES].tolist()


def test_numbers_of_one_draw_are_spread_evenly():
    numbers = unit(draws(0.25, 10_000, 1))
    assert numbers.min() > 0 and numbers.max() < 1
    assert unit(np.array([0], dtype=np.uint64))[0] > 0 and unit(np.array([2**64 - 1], dtype=np.uint64))[0] < 1
    assert np.histogram(numbers, bins=10, range=(0, 1))[0] == pytest.approx([1000] * 10, abs=130)
    assert len(set(draws(0.25, 1000, 1)) & set(draws(0.25, 1000, 2))) == 0
    assert len(set(draws(0.25, 1000, 1)) & set(draws(0.2500001, 1000, 1))) == 0


# ---- controls: the checks above can fail


class Stubborn:
    """Always the first pair."""

    name, term_names = "stubborn", ()

    def __init__(self, options):
        self.calls = 0

    def rank(self, request, prefills, decodes):
        return [Candidate(0, 0, 0.0, ())]


class Forgetful(Stubborn):
    """Another pair each time."""

    def rank(self, request, prefills, decodes):
        self.calls += 1
        return [Candidate(self.calls % 2, 0, 0.0, ())]


class ByRow(Stubborn):
    """The queue, but of the first row as if it were empty."""

    def rank(self, request, prefills, decodes):
        queue = np.array(prefills.queued_tokens, dtype=float)
        queue[0] = -1.0
        return [Candidate(int(row), 0, float(queue[row]), ()) for row in np.argsort(queue)]


def test_the_contracts_check_sees_a_forced_request_that_goes_elsewhere():
    with pytest.raises(AssertionError):
        check_contract(Stubborn({}), ask(force="local"), side(2), side(2))


def test_the_contracts_check_sees_a_policy_that_remembers():
    with pytest.raises(AssertionError, match="told again"):
        check_contract(Forgetful({}), ask(), side(2), side(2))


def test_the_orders_check_sees_a_policy_that_prefers_a_row():
    with pytest.raises(AssertionError):
        check_order(ByRow({}), ask(), side(queued_tokens=[50, 10, 30]), np.array([1, 2, 0]))
