"""A file of past days: its forms, and what is wrong with one."""

import json
import math
from datetime import UTC, datetime
from pathlib import Path

import pytest

from kvrelay.cluster.autoscaling import history
from kvrelay.cluster.autoscaling.history import season_from
from kvrelay.cluster.autoscaling.policies import PlannerPolicy
from kvrelay.errors import ConfigError
from kvrelay.router.planning.season import BIN_S, DAYS

pytestmark = pytest.mark.pure

DAY_S = 86400.0
COUNTS = {0: 600, 300: 0, 600: 150}  # by the second, from the beginning of a day


def written(tmp_path: Path, text: str, name: str = "past.csv") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def iso(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).isoformat()


def test_counts_lines_and_single_requests_say_the_same(tmp_path):
    singles = [start_s + BIN_S * (one + 0.5) / count for start_s, count in COUNTS.items() for one in range(count)]
    texts = [
        "time,requests\n" + "".join(f"{start_s},{count}\n" for start_s, count in COUNTS.items()),
        'note,requests,"time"\n' + "".join(f'x,"{count}","{iso(start_s)}"\n' for start_s, count in COUNTS.items()),
        "".join(json.dumps({"time": iso(start_s), "requests": count}) + "\n" for start_s, count in COUNTS.items()),
        "time\n" + "".join(f"{at_s}\n" for at_s in reversed(singles)),
    ]
    for text in texts:
        season = season_from(written(tmp_path, text), DAY_S)
        assert season.first == 0 and season.rates == pytest.approx([2.0, 0.0, 0.5]), text[:40]


def test_a_count_of_an_hour_is_spread_over_it_and_one_before_a_gap_over_an_hour_only(tmp_path):
    season = season_from(written(tmp_path, "time,requests\n0,3600\n3600,7200\n90000,1\n"), DAY_S)
    assert season.rates[:12] == pytest.approx([1.0] * 12)
    assert season.rates[12:24] == pytest.approx([2.0] * 12) and math.isnan(season.rates[24])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "no rows"),
        ("time,requests\n", "no rows"),
        ("when,requests\n1,2\n", "line 2: KeyError"),
        ("time,requests\n1,2\n2,-1\n", "line 3: ValueError"),
        ("time,requests\n1,nan\n", "line 2: ValueError"),
        ("time,requests\n1,2,3\n", "line 2: ValueError"),
        ("time\nyesterday\n", "line 2: ValueError"),
        ("time\ninf\n", "line 2: ValueError"),
        ("time\n1764201600000\n", "line 2: ValueError: time .*: give seconds"),
        ('{"time": 1}\n{"time": 2\n', "line 2: JSONDecodeError"),
        ('{"time": 1}\n[3]\n', "line 2: TypeError"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(tmp_path, text, problem):
    path = written(tmp_path, text)
    with pytest.raises(ConfigError, match=f"planner.history: {path}.*{problem}"):
        season_from(path, DAY_S)


def test_one_request_of_long_ago_does_not_take_long(tmp_path):
    season = season_from(written(tmp_path, "time\n-9e10\n9e10\n"), DAY_S)
    assert sum(season.rates) * BIN_S == pytest.approx(1.0) and len(season.rates) <= DAYS * 288


def test_files_that_are_missing_binary_or_too_large_are_refused(tmp_path, monkeypatch):
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name in ("missing", "binary"):
        with pytest.raises(ConfigError, match=r"planner\.history"):
            season_from(tmp_path / name, DAY_S)
    monkeypatch.setattr(history, "MOST_BYTES", 3)
    with pytest.raises(ConfigError, match="count requests by minutes"):
        season_from(written(tmp_path, "time\n1\n"), DAY_S)


def test_the_policy_reads_it_at_once_and_names_what_is_wrong(tmp_path):
    with pytest.raises(ConfigError, match=r"planner\.history"):
        PlannerPolicy(history=str(tmp_path / "missing"))
    PlannerPolicy(history=str(written(tmp_path, "time\n1\n")))
