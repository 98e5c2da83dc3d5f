"""What the sections of bench/gpu/gpu.py found, as JSON and Markdown: written as it comes, merged over several calls."""

import contextlib
import datetime
import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

RUNNING, CUT_OFF = "running", "CUT OFF"


@dataclass(slots=True)
class Outcome:
    """Of one section. status: running, ok, rehearsed, left out, FAILED, TIMED OUT, CUT OFF (its driver was killed)."""

    name: str
    title: str
    status: str = RUNNING
    seconds: float = 0.0
    note: str = ""
    rows: list[dict[str, Any]] = field(default_factory=list)

    @property
    def is_failure(self) -> bool:
        return self.status in ("FAILED", "TIMED OUT", CUT_OFF)


class Report:
    """Outcomes by section. `kind`: "" | "tiny" | "rehearsal", a part of the file's name."""

    def __init__(self, kind: str = "") -> None:
        self._kind, self._stem = kind, ""
        self.outcomes: dict[str, Outcome] = {}

    def read(self, file: Path) -> list[Outcome]:
        """Add what an earlier call wrote; where two have a section, the file read last counts. Raises OSError,
        ValueError: not such a file.
        """
        try:
            found = [Outcome(**row) for row in json.loads(file.read_text())["sections"]]
        except (TypeError, KeyError) as error:
            raise ValueError(f"{file} is no report: {error!r}") from error
        for outcome in found:
            if outcome.status == RUNNING:
                outcome.status = CUT_OFF
            self.outcomes[outcome.name] = outcome
        return found

    def _fact(self, key: str, default: str) -> str:
        limits = self.outcomes.get("limits")
        rows = limits.rows if limits else []
        return next((str(row[key]) for row in rows if row.get("name") == "device"), default)

    def write(self, folder: Path, names: Iterable[str], kept: Path | None = None) -> Path:
        """<date>-<device>.json and .md in the folder, sections in this order; returns the former, which is written to
        `kept` first. A driver that is killed leaves whole files.
        """
        outcomes = [self.outcomes[name] for name in names if name in self.outcomes]
        date = datetime.datetime.now(datetime.UTC).date().isoformat()
        device = self._fact("text", "unknown")
        facts = {
            "device": device, "date": date, "versions": self._fact("what", ""), "kind": self._kind,
            "seconds": sum(one.seconds for one in outcomes),
        }  # fmt: skip
        folder.mkdir(parents=True, exist_ok=True)
        stem = "-".join(filter(None, (date, slug(device), self._kind)))
        text = json.dumps({**facts, "sections": [asdict(one) for one in outcomes]}, indent=1) + "\n"
        files = [(folder / f"{stem}.md", markdown(outcomes, facts)), (folder / f"{stem}.json", text)]
        for path, content in files if kept is None else [(kept, text), *files]:
            path.with_name("unfinished").write_text(content)
            path.with_name("unfinished").replace(path)
        if self._stem not in ("", stem):  # begun before the device's name was known
            for suffix in (".md", ".json"):
                (folder / f"{self._stem}{suffix}").unlink(missing_ok=True)
        self._stem = stem
        return folder / f"{stem}.json"


def rows_of(file: Path) -> list[dict[str, Any]]:
    """What was written whole; the last line may be cut."""
    found: list[dict[str, Any]] = []
    for line in file.read_text().splitlines() if file.exists() else ():
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return found


def markdown(outcomes: list[Outcome], facts: dict[str, Any]) -> str:
    """The whole report."""
    text = [f"# {facts['device']}, {facts['date']}{' (' + facts['kind'] + ')' if facts['kind'] else ''}", ""]
    summary = [
        {"section": one.name, "": one.status, "s": one.seconds, "note": one.note.split("\n")[0]} for one in outcomes
    ]
    text += [facts["versions"], "", *_table(summary), ""]
    for one in outcomes:
        if one.rows or one.is_failure:
            text += [f"## {one.title}", "", *_table(one.rows), ""]
        if one.is_failure:
            text += ["```", one.note, "```", ""]
    return "\n".join(text)


def _table(rows: list[dict[str, Any]]) -> list[str]:
    names = list(dict.fromkeys(name for row in rows for name in row))
    if not names:
        return []
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    return lines + ["| " + " | ".join(_cell(row.get(name)) for name in names) + " |" for row in rows]


def _cell(value: Any) -> str:
    match value:
        case None:
            return ""
        case bool():
            return "yes" if value else "NO"
        case float():
            return f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"
        case dict():
            return ", ".join(f"{name} {_cell(one)}" for name, one in value.items())
    return str(value).replace("|", "/").replace("\n", " ")


def slug(device: str) -> str:
    words = [word for word in re.split(r"[^a-z0-9]+", device.lower()) if word not in ("", "nvidia", "gpu")]
    return "-".join(words[:2]) or "unknown"
