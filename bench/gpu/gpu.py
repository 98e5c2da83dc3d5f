"""Everything there is to run on a machine with a GPU, in one go: is it right, and how near is it to the limits?

    python -m bench.gpu.gpu [--model FOLDER] [--only SECTION ...] [--out FOLDER]
    python -m bench.gpu.gpu --device cpu --tiny        # the same code over tiny shapes, without a GPU

Each section runs in a process of its own with a time limit, so that one that fails, hangs or takes the device down
with it leaves the others alone. Needs no network and no Ray; kvrelay need not be installed. Writes
<out>/<date>-<device>.json and prints the same as Markdown. <out> is $OUT, else bench/results. Exit status 1 when a
section failed; a speed below its target is printed and is no failure.
"""

import argparse
import contextlib
import datetime
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent


@dataclass(frozen=True, slots=True)
class Section:
    """What runs in one child, and for how long at most."""

    name: str
    module: str
    function: str
    limit_s: float
    title: str


SECTIONS = (
    Section("limits", "limits", "run", 60, "What the device can do"),
    Section("compile", "compile", "run", 200, "Kernels compiled or loaded"),
    Section("kernels", "kernels", "run", 110, "Kernels against the reference"),
    Section("graphs", "graphs", "run", 75, "Graphs on and off, and where a step's time goes"),
    Section("experts", "experts", "run", 45, "A layer of experts, Qwen3-30B-A3B's sizes, bf16"),
    Section("nixl", "transfer", "run", 60, "NIXL between two processes"),
    Section("decode", "throughput", "run_decode", 100, "Decode, Llama-8B shape, bf16"),
    Section("prefill", "throughput", "run_prefill", 60, "Prefill, Llama-8B shape, bf16"),
    Section("choices", "choices", "run", 75, "Choices between kernels"),
    Section("pair", "pair", "run", 120, "One prefill and one decode worker on one device"),
    Section("tests", "pair", "run_tests", 100, "pytest -m gpu"),
    Section("verify", "pair", "run_verify", 140, "kvrelay verify"),
)
_BUDGET_S = 530.0
_LEAST_S = 5.0  # a section is not begun for less
_STOP_S = 3.0
_LOG_LINES = 12


@dataclass(slots=True)
class Outcome:
    """Of one section. status: ok, FAILED, TIMED OUT, left out."""

    section: Section
    status: str
    seconds: float = 0.0
    note: str = ""
    rows: list[dict[str, Any]] = field(default_factory=list)

    @property
    def is_failure(self) -> bool:
        return self.status in ("FAILED", "TIMED OUT")


# ---- the child


def child(name: str, order: str) -> int:
    """One section; its exit status: 0, 1 for an error (printed to standard error), 3 where it was left out."""
    section = next((one for one in SECTIONS if one.name == name), None)
    if section is None:
        print(f"there is no section {name}", file=sys.stderr)
        return 1
    from bench.gpu.section import Context, LeftOut

    run = getattr(importlib.import_module(f"bench.gpu.{section.module}"), section.function)
    try:
        run(Context.from_json(order))
    except LeftOut as error:
        print(error, file=sys.stderr)
        return 3
    except Exception:
        traceback.print_exc()
        return 1
    return 0


# ---- the driver


class Driver:
    """Runs the sections one after the other and keeps what they wrote."""

    def __init__(self, options: argparse.Namespace, scratch: Path) -> None:
        self._options, self._scratch = options, scratch
        self._end_s = time.monotonic() + options.budget
        self._limits: dict[str, float] = {}
        self.device_name = options.device

    def run(self, section: Section) -> Outcome:
        """Never raises for what a child does."""
        limit_s = min(section.limit_s * self._options.patience, self._end_s - time.monotonic())
        if limit_s < _LEAST_S:
            return Outcome(section, "left out", note="no time left")
        rows_file, log_file = self._scratch / f"{section.name}.rows", self._scratch / f"{section.name}.log"
        began = time.monotonic()
        with log_file.open("w") as log:
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "bench.gpu.gpu",
                    "--child",
                    section.name,
                    "--order",
                    self._order(rows_file, limit_s),
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment(),
                start_new_session=True,
                cwd=ROOT,
            )
            try:
                status = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                _end_group(process)
        outcome = Outcome(section, "ok", time.monotonic() - began, rows=rows_of(rows_file))
        self.judge(outcome, status, log_file, limit_s)
        if section.name == "limits":
            self._take_limits(outcome.rows)
        return outcome

    def judge(self, outcome: Outcome, status: int | None, log_file: Path, limit_s: float) -> None:
        wrong = [row for row in outcome.rows if row.get("ok") is False]
        if status is None:
            outcome.status, outcome.note = "TIMED OUT", f"after {limit_s:.0f} s; {_tail(log_file)}"
        elif status == 3:
            outcome.status, outcome.note = "left out", _tail(log_file, lines=1)
        elif status:
            outcome.status, outcome.note = "FAILED", f"exit status {status}; {_tail(log_file)}"
        elif wrong or not outcome.rows:
            outcome.status, outcome.note = (
                "FAILED",
                f"{len(wrong)} of {len(outcome.rows)} checks do not hold; {_tail(log_file)}",
            )
        else:
            below = sum(row.get("meets") is False for row in outcome.rows)
            outcome.note = f"{below} figures below their target" if below else ""

    def _take_limits(self, rows: list[dict[str, Any]]) -> None:
        for row in rows:
            if "value" in row:
                self._limits[row["name"]] = float(row["value"])
            elif row["name"] == "device":
                self.device_name = row["text"]

    def _order(self, rows_file: Path, limit_s: float) -> str:
        options = self._options
        return json.dumps(
            {
                "device": options.device,
                "tiny": options.tiny,
                "scratch": str(self._scratch),
                "rows_file": str(rows_file),
                "limits": self._limits,
                "model": str(options.model) if options.model else None,
                "limit_s": limit_s,
            }
        )

    @staticmethod
    def _environment() -> dict[str, str]:
        path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(ROOT))))
        return {"NIXL_LOG_LEVEL": "WARN", "HF_HUB_OFFLINE": "1", **os.environ, "PYTHONPATH": path}


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """The child with all that it started: asked, then made to."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_S)


def rows_of(file: Path) -> list[dict[str, Any]]:
    """What was written whole; the last line may be cut."""
    found: list[dict[str, Any]] = []
    for line in file.read_text().splitlines() if file.exists() else ():
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return found


def _tail(file: Path, lines: int = _LOG_LINES) -> str:
    return "\n".join(file.read_text(errors="replace").strip().splitlines()[-lines:])


def markdown(outcomes: list[Outcome], facts: dict[str, Any]) -> str:
    """The whole report."""
    text = [f"# {facts['device']}, {facts['date']}", "", facts["versions"], ""]
    summary = [
        {
            "section": one.section.name,
            "": one.status,
            "s": one.seconds,
            "note": one.note.splitlines()[0] if one.note else "",
        }
        for one in outcomes
    ]
    text += [*_table(summary), ""]
    for one in outcomes:
        if one.rows or one.is_failure:
            text += [f"## {one.section.title}", "", *_table(one.rows), ""]
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


def _slug(device: str) -> str:
    words = [word for word in re.split(r"[^a-z0-9]+", device.lower()) if word not in ("", "nvidia", "gpu")]
    return "-".join(words[:2]) or "unknown"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="shapes that a CPU computes in seconds")
    parser.add_argument("--only", nargs="+", choices=[section.name for section in SECTIONS], help="limits always runs")
    parser.add_argument("--model", type=Path, help="folder of a real checkpoint, for the pair of workers")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or HERE.parent / "results"))
    parser.add_argument("--budget", type=float, default=_BUDGET_S, help="seconds for all of it")
    parser.add_argument("--patience", type=float, default=1.0, help="factor on every section's time limit")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--order", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is None and options.model is not None and not (options.model / "config.json").is_file():
        parser.error(f"--model {options.model}: there is no config.json")
    if options.child is None and options.device == "cpu" and not options.tiny:
        parser.error("--device cpu needs --tiny: the real shapes take hours")
    return options


def main() -> int:
    options = _options()
    if options.child is not None:
        return child(options.child, options.order)
    options.model = options.model.resolve() if options.model else None
    wanted = [one for one in SECTIONS if not options.only or one.name in ("limits", *options.only)]
    scratch = Path(tempfile.mkdtemp(prefix="kvrelay-gpu-"))
    try:
        driver, outcomes = Driver(options, scratch), []
        for section in wanted:
            print(f"{section.name} …", file=sys.stderr, flush=True)
            outcomes.append(driver.run(section))
            print(f"{section.name}: {outcomes[-1].status}, {outcomes[-1].seconds:.0f} s", file=sys.stderr, flush=True)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    about = next((row["what"] for one in outcomes for row in one.rows if row.get("name") == "device"), "")
    facts = {
        "device": driver.device_name, "date": datetime.datetime.now(datetime.UTC).date().isoformat(), "versions": about,
        "tiny": options.tiny, "seconds": sum(one.seconds for one in outcomes),
    }  # fmt: skip
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / f"{facts['date']}-{_slug(driver.device_name)}{'-tiny' if options.tiny else ''}.json"
    sections = [
        {"name": one.section.name, "status": one.status, "seconds": one.seconds, "note": one.note, "rows": one.rows}
        for one in outcomes
    ]
    file.write_text(json.dumps({**facts, "sections": sections}, indent=1) + "\n")
    print(markdown(outcomes, facts))
    print(f"written: {file}", file=sys.stderr)
    return int(any(one.is_failure for one in outcomes))


if __name__ == "__main__":
    sys.exit(main())
