"""Past days' load from a file (`planner.history`), as the season that the planner begins with."""

import csv
import math
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

import numpy as np

from kvrelay.errors import ConfigError
from kvrelay.router.planning.demand import BIN_S, MOST_PERIODS, SeasonalPattern
from kvrelay.router.planning.planner import PlannerRules

COLUMNS = ["time", "requests"]


def season_of(path: str | None, period_s: float, now_s: float) -> SeasonalPattern | None:
    """The season in a CSV file of `time`, ISO 8601 (UTC unless it says otherwise) or seconds since the epoch, and
    `requests` that came from then until the next row's time. None: no file.

    Raises ConfigError.
    """
    if path is None or not period_s:
        return None
    rows = _rows(Path(path))
    times = np.array([*(at_s for at_s, _ in rows), 2 * rows[-1][0] - rows[-2][0]])  # the last is as long as that before
    if times[-1] - times[0] < period_s:
        raise ConfigError(f"{path}: {(times[-1] - times[0]) / 3600:.3g} h are no whole day")
    edges = np.arange(times[-1], max(times[0], times[-1] - MOST_PERIODS * period_s) - 1e-6, -BIN_S)[::-1]
    came = np.interp(edges, times, np.cumsum([0.0, *(requests for _, requests in rows)]))
    return SeasonalPattern.learned((np.diff(came) / BIN_S).tolist(), float(times[-1]), period_s, now_s)


def check_history(path: str) -> None:
    """Raises ConfigError where the file cannot be used."""
    season_of(path, PlannerRules().period_s, 0.0)


def _rows(path: Path) -> list[tuple[float, float]]:
    rows = list[tuple[float, float]]()
    try:
        with path.open(newline="") as file:
            reader = csv.reader(file)
            if (header := [name.strip() for name in next(reader, [])]) != COLUMNS:
                raise ValueError(f"columns {','.join(COLUMNS)} are expected, not {','.join(header)[:80]!r}")
            for at, requests in reader:
                rows.append((_seconds(at), float(requests)))
                if not 0 <= rows[-1][1] < math.inf:
                    raise ValueError(f"no number of requests: {requests!r}")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except (ValueError, csv.Error) as error:
        raise ConfigError(f"{path}, behind {len(rows)} rows: {error}") from error
    if len(rows) < 2 or any(later <= earlier for (earlier, _), (later, _) in pairwise(rows)):
        raise ConfigError(f"{path}: two rows or more are needed, each later than the one before")
    return rows


def _seconds(at: str) -> float:
    try:
        seconds = float(at)
    except ValueError:
        found = datetime.fromisoformat(at.strip())
        seconds = (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
    if not math.isfinite(seconds):
        raise ValueError(f"no time: {at!r}")
    return seconds
