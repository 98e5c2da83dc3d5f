"""How fast the memory of each kind of process rises in the second half of a run."""

import pytest

from kvrelay.cluster.chaos.growth import MOST_POINTS, STEADY_S, WARM_S, kind_of, memory_trends, theil_sen
from kvrelay.cluster.chaos.run import ProcessSample

pytestmark = pytest.mark.pure


def life(mib_of, *, start_s=0, end_s=1200, pid=1, name="ray::x", step_s=5, shared_of=lambda at: 0):
    return [
        ProcessSample(at, pid, name, int(mib_of(at) * (1 << 20)), 10, int(shared_of(at) * (1 << 20)))
        for at in range(int(start_s), end_s + 1, step_s)
    ]


def trend(samples):
    (found,) = memory_trends(samples)
    return found


def test_what_fills_in_the_first_half_is_no_growth():
    found = trend(life(lambda at: min(at, 600)))
    assert (found.first, found.last, found.peak, found.per_hour) == (0, 600, 600, 0)


def test_a_steady_rise_is_found_in_mib_per_hour():
    assert trend(life(lambda at: 300 + at / 60)).per_hour == pytest.approx(60.0, rel=0.01)


def test_pages_that_others_map_too_are_told_apart():
    found = trend(life(lambda at: 300 + at / 60, shared_of=lambda at: 100 + at / 60))
    assert found.per_hour == pytest.approx(60.0, rel=0.01)
    assert found.private_per_hour == pytest.approx(0.0, abs=0.01)


def test_a_step_and_some_wild_samples_do_not_hide_that_the_rest_is_flat():
    found = trend(life(lambda at: 5000 if at % 250 == 0 else 300 if at < 1150 else 340))
    assert found.per_hour == pytest.approx(0.0, abs=0.1)
    assert found.peak == 5000


def test_a_young_process_is_warming_up_and_not_judged():
    young = life(lambda at: at, start_s=1200 - WARM_S - STEADY_S + 5, pid=2)
    assert trend(young).per_hour is None
    assert trend(life(lambda at: 300) + young).per_hour == 0
    assert trend(life(lambda at: at, start_s=1000)).per_hour == pytest.approx(3600, rel=0.01)


def test_of_several_processes_of_a_kind_the_one_that_grows_fastest_counts():
    flat, rising = life(lambda at: 500), life(lambda at: 100 + at / 60, pid=2)
    found = trend(flat + rising)
    assert (found.num_processes, found.first, found.last) == (2, 500, 500)
    assert found.per_hour == pytest.approx(60.0, rel=0.01)


def test_a_process_that_replaces_another_is_no_growth_of_the_first():
    assert trend(life(lambda at: 300, end_s=800) + life(lambda at: 400, start_s=805, pid=2)).per_hour == 0


def test_kinds_come_by_how_fast_they_grow():
    samples = life(lambda at: 9, name="a", end_s=20, pid=3) + life(lambda at: 1, name="b") + life(lambda at: at, pid=2)
    assert [one.kind for one in memory_trends(samples)] == ["ray::x", "b", "a"]
    assert memory_trends([]) == []


def test_an_actor_in_a_call_is_of_the_same_kind():
    assert kind_of("ray::RegistryActor.beat()") == kind_of("ray::RegistryActor") == "ray::RegistryActor"
    assert kind_of("ray::ServeReplica:kvrelay:decode.handle_request") == "ray::ServeReplica:kvrelay:decode"
    starting = "ray::SERVE_REPLICA::kvrelay#decode#9xuqv4fo:ServeReplica:kvrelay:decode"
    assert kind_of(starting) == "ray::ServeReplica:kvrelay:decode"
    assert kind_of("haproxy c 12197") == "haproxy c"
    assert kind_of("redis-server 6.2") == "redis-server 6.2"


def test_a_long_run_is_thinned_and_keeps_its_slope():
    assert trend(life(lambda at: at / 60, end_s=5 * 4 * MOST_POINTS)).per_hour == pytest.approx(60.0, rel=0.01)


def test_the_median_of_all_slopes():
    assert theil_sen([0, 1, 2, 3], [0, 1, 2, 30]) == pytest.approx(5.5)  # of 1, 1, 1, 10, 14.5, 28
    assert theil_sen([0, 1], [5, 3]) == -2
