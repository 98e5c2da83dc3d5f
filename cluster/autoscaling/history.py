"""A file of past days (`planner.history`) as a season. Reads one file; otherwise pure.

CSV with a header, or JSON lines, in any order. `time`: seconds since the epoch, or ISO 8601, in UTC where it names no
zone. `requests`: number that arrived from then until the next row, an hour at most; what is behind that is unknown.
Without `requests` each row is one request.
"""

import csv
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from kvrelay.errors import ConfigError
from kvrelay.router.planning.season import BIN_S, DAYS, Season, num_bins

MOST_BYTES = 64 << 20  # it is read in Serve's controller, which waits
LONGEST_S = 3600.0
LATEST_S = 1e11  # milliseconds since the epoch are more


def season_from(path: Path, period_s: float) -> Season:
    """The rates of the file's days. Raises ConfigError that names the file, and the line where one is wrong."""
    try:
        if path.stat().st_size > MOST_BYTES:
            raise ConfigError(
                f"planner.history: {path} has more than {MOST_BYTES >> 20} MiB: count requests by minutes"
            )
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"planner.history: {path}: {error}") from error
    columns = None if lines and lines[0].lstrip().startswith("{") else next(csv.reader(lines[:1]), [])
    counts, singles = defaultdict[float, float](float), list[float]()
    for number, line in enumerate(lines[columns is not None :], start=1 + (columns is not None)):
        if not line.strip():
            continue
        try:
            row = json.loads(line) if columns is None else dict(zip(columns, next(csv.reader([line])), strict=True))
            at_s = _seconds(row["time"])
            if "requests" in row:
                counts[at_s] += _count(row["requests"])
            else:
                singles.append(at_s)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            problem = f"{type(error).__name__}: {error}"
            raise ConfigError(f"planner.history: {path}, line {number}: {problem}") from error
    if not counts and not singles:
        raise ConfigError(f"planner.history: {path} has no rows; write a header with `time` and `requests`, then rows")
    if singles:
        return season_of(singles, period_s)
    season, rows = Season(), sorted(counts.items())
    for (start_s, requests), (next_s, _) in pairwise([*rows, (rows[-1][0] + BIN_S, 0.0)]):
        season.observe(start_s, min(next_s, start_s + LONGEST_S), requests, period_s)
    return season


def season_of(times_s: Iterable[float], period_s: float) -> Season:
    """The rates of single requests: between two of them there was none."""
    counts, season = Counter(math.floor(at_s / BIN_S) for at_s in times_s), Season()
    last = max(counts)
    for number in range(max(min(counts), last - DAYS * num_bins(period_s)), last + 1):
        season.observe(number * BIN_S, (number + 1) * BIN_S, counts[number], period_s)
    return season


def _seconds(value: Any) -> float:
    try:
        seconds = float(value)
    except ValueError:
        at = datetime.fromisoformat(value)
        seconds = (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
    if not abs(seconds) < LATEST_S:
        raise ValueError(f"time {value!r}: give seconds")
    return seconds


def _count(value: Any) -> float:
    requests = float(value)
    if not 0.0 <= requests < math.inf:
        raise ValueError(f"requests {value!r}: not a count")
    return requests
