"""Past days from a file, as the season that the planner begins with."""

import pytest

from kvrelay.cluster.autoscaling.history import check_history, season_of
from kvrelay.cluster.autoscaling.policies import PlannerPolicy
from kvrelay.errors import ConfigError
from kvrelay.router.planning.demand import BIN_S
from tests.cluster.autoscaling.test_planner_policy import World

pytestmark = pytest.mark.pure

DAY_S, HOUR_S = 86400.0, 3600.0


def written(path, rows, header="time,requests"):
    path.write_text("\n".join([header, *rows]) + "\n")
    return str(path)


def hourly(path, *, days=1.0, begin_s=0.0, rate=lambda hour: float(hour)):
    """A file with `rate(hour of the day)` requests per s."""
    hours = range(round(24 * days))
    rows = [f"{begin_s + hour * HOUR_S},{rate(hour % 24) * HOUR_S}" for hour in hours]
    return written(path, rows)


def at_hours(season):
    """The mean rate of each hour."""
    number = round(HOUR_S / BIN_S)
    return [sum(season.bins[first : first + number]) / number for first in range(0, len(season.bins), number)]


def test_a_row_counts_until_the_next_one_and_the_last_as_long_as_the_one_before(tmp_path):
    season = season_of(hourly(tmp_path / "a.csv"), DAY_S, DAY_S)
    assert at_hours(season) == pytest.approx(list(range(24)))
    coarse = written(tmp_path / "b.csv", ["0,86400", f"{DAY_S / 2},172800"])
    assert at_hours(season_of(coarse, DAY_S, DAY_S)) == pytest.approx([2.0] * 12 + [4.0] * 12)


def test_times_are_seconds_or_iso_8601_and_utc_unless_they_say_otherwise(tmp_path):
    rows = {
        "seconds": ["1763164800,10", "1763208000,20"],
        "utc": ["2025-11-15T00:00:00,10", "2025-11-15 12:00:00Z,20"],
        "zone": ["2025-11-15T02:00:00+02:00,10", "2025-11-15T14:00:00+02:00,20"],
    }
    found = [season_of(written(tmp_path / name, each), DAY_S, 1763251200.0) for name, each in rows.items()]
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("later_days", [0, 1, 40])
def test_hours_stay_where_they_are_however_old_the_file_is(tmp_path, later_days):
    """It ends at midnight; now it is six in the morning."""
    now_s = DAY_S + later_days * DAY_S + 6 * HOUR_S
    season = season_of(hourly(tmp_path / "a.csv"), DAY_S, now_s)
    assert season.start_s == now_s and at_hours(season)[-6:] == pytest.approx(list(range(6)))
    assert at_hours(season)[:-6] == pytest.approx(list(range(24)))
    assert season.ahead(600.0, DAY_S) == pytest.approx(6.0)  # without an hour of live history


def test_of_a_long_file_the_last_days_count(tmp_path):
    rows = [f"{day * DAY_S},{DAY_S * day}" for day in range(400)]
    season = season_of(written(tmp_path / "a.csv", rows), DAY_S, 400 * DAY_S)
    assert len(season.bins) == 14 * 288 and season.bins[0] == pytest.approx(386.0)


@pytest.mark.parametrize(
    ("rows", "header", "reason"),
    [
        ([], "time,requests", "two rows"),
        (["0,1", "3600,1"], "time,requests", "no whole day"),
        (["0,1", "0,1", "90000,1"], "time,requests", "each later"),
        (["0,1", "noon,1"], "time,requests", "behind 1 rows: .*noon"),
        (["0,1", "90000,-1"], "time,requests", "no number of requests: '-1'"),
        (["0,1", "90000,nan"], "time,requests", "no number of requests: 'nan'"),
        (["0,1", "inf,1"], "time,requests", "no time: 'inf'"),
        (["0,1,2", "90000,1,2"], "time,requests", "too many values"),
        (["0,1", "90000,1"], "when,count", "columns time,requests are expected, not 'when,count'"),
    ],
)
def test_a_file_that_is_of_no_use_is_refused_with_its_reason(tmp_path, rows, header, reason):
    path = written(tmp_path / "a.csv", rows, header)
    with pytest.raises(ConfigError, match=reason):
        check_history(path)
    with pytest.raises(ConfigError, match=reason):
        PlannerPolicy(history=path)


def test_no_file_is_no_season_and_a_missing_one_is_an_error(tmp_path):
    assert season_of(None, DAY_S, 0.0) is None
    with pytest.raises(ConfigError, match="No such file"):
        check_history(str(tmp_path / "none.csv"))


def counts_before_nine(history):
    """Prefill workers a minute before nine, when thirty times as many requests come on every day of the file."""
    world = World(PlannerPolicy(scale_down_delay_s=60.0, ttft_s=1.0, history=history))
    world.now_s = 100 * DAY_S + 8.8 * HOUR_S
    for _ in range(65):
        found = world.tick(1.0)
    assert world.now_s < 100 * DAY_S + 9 * HOUR_S
    return found["prefill"]


def test_workers_are_started_before_the_rush_that_past_days_had(tmp_path):
    usual = {7: 0.6, 8: 1.0, 9: 30.0}
    history = hourly(tmp_path / "a.csv", days=3, rate=lambda hour: usual.get(hour, 0.5))
    assert counts_before_nine(history) > 3 and counts_before_nine(None) == 1
