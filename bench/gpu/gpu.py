"""Everything there is to run on a machine with a GPU: is it right, and how near is it to the limits?

    python -m bench.gpu.gpu --call 1                    # is it right? all sections at once, in five minutes
    python -m bench.gpu.gpu --call 2                    # how fast? one after the other, in six minutes
    python -m bench.gpu.gpu --call 3                    # kvrelay serve, where Ray is installed
    python -m bench.gpu.gpu [--only SECTION ...]        # on a machine of one's own: all calls, one after the other
    python -m bench.gpu.gpu --device cpu --tiny         # the same code over tiny shapes, without a GPU

Each section runs in a process of its own with a time limit, so that one that fails, hangs or takes the device down
with it leaves the others alone. Call 1 runs most of its sections side by side: their times are no figures. Needs no
network and no Ray; kvrelay need not be installed. Writes <out>/<date>-<device>.json and .md after every section and
every few seconds within one. <out> is $OUT, else bench/results. Calls that name the same --scratch folder share its
checkpoints and the measured limits, and the report of each includes those before it; --merge takes in reports from
elsewhere. Exit status 1 when a section failed; a speed below its target is printed and is no failure. --rehearse:
narrow models, and wrong numbers are counted but fail nothing, for a CUDA runtime that computes nothing (docs/gpu.md).
"""

import argparse
import contextlib
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from bench.gpu.report import Outcome, Report, rows_of

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent


@dataclass(frozen=True, slots=True)
class Section:
    """What runs in one child, in which calls, and for how long at most."""

    name: str
    calls: tuple[int, ...]
    module: str
    function: str
    limit_s: float
    title: str


TOGETHER = 1  # the call whose sections run side by side, but for the first two
SECTIONS = (
    Section("limits", (1,), "limits", "run", 20, "What the device can do"),
    Section("compile", (1,), "compile", "run", 30, "Kernels compiled or loaded"),
    Section("kernels", (1,), "kernels", "run", 150, "Kernels against the reference"),
    Section("graphs", (1, 2), "graphs", "run", 30, "Graphs on and off, and where a step's time goes"),
    Section("parity", (1,), "pair", "run_parity", 120, "kvrelay verify in bf16 on the device"),
    Section("tests", (1,), "pair", "run_tests", 120, "pytest -m gpu"),
    Section("verify", (1,), "pair", "run_verify", 160, "kvrelay verify in float32"),
    Section("decode", (2,), "throughput", "run_decode", 60, "Decode, Llama-8B shape, bf16"),
    Section("prefill", (2,), "throughput", "run_prefill", 30, "Prefill, Llama-8B shape, bf16"),
    Section("nixl", (1, 2), "transfer", "run", 35, "CUDA IPC and NIXL between two processes"),
    Section("pair", (1, 2), "pair", "run", 75, "One prefill and one decode worker on one device"),
    Section("quantised", (1, 2), "experts", "run_quantised", 30, "A Llama-8B's largest product over quantised weights"),
    Section("experts", (1, 2), "experts", "run", 15, "A layer of experts, Qwen3-30B-A3B's sizes, bf16"),
    Section("choices", (2,), "choices", "run", 35, "Choices between kernels"),
    Section("served", (3,), "pair", "run_served", 150, "kvrelay serve over HTTP, Llama-8B shape, bf16"),
)
NAMES = tuple(section.name for section in SECTIONS)
CALLS = tuple(sorted({call for section in SECTIONS for call in section.calls}))
CALL_S, HELD_S = 540.0, 900.0  # what a call, and all machines together, may take
START_S, INSTALL_S = 40.0, 20.0  # a machine, with the files that go over; carried wheels
_LEAST_S = 5.0  # a section is not begun for less
_STOP_S = 3.0
_WRITE_S = 5.0
_LOG_LINES = 12
_REPORT = "report.json"  # in the scratch folder


def seconds_of_call(call: int) -> float:
    """Its sections' limits."""
    apart, together = split(call, [one for one in SECTIONS if call in one.calls])
    return sum(one.limit_s for one in apart) + max((one.limit_s for one in together), default=0.0)


def split(call: int | None, sections: list[Section]) -> tuple[list[Section], list[Section]]:
    """Those that run one after the other, and those that then run side by side."""
    apart = [one for one in sections if call != TOGETHER or one in SECTIONS[:2]]
    return apart, [one for one in sections if one not in apart]


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
    """Runs the sections one after the other and writes what is known into the report."""

    def __init__(self, options: argparse.Namespace, scratch: Path, report: Report) -> None:
        self._options, self._scratch, self.report = options, scratch, report
        self._writing = threading.Lock()
        self._end_s = time.monotonic() + (options.budget or (CALL_S if options.call else HELD_S))

    def run(self, section: Section) -> Outcome:
        """Never raises for what a child does."""
        outcome = self.report.outcomes[section.name] = Outcome(section.name, section.title)
        limit_s = min(section.limit_s * self._options.patience, self._end_s - time.monotonic())
        if limit_s < _LEAST_S:
            outcome.status, outcome.note = "left out", "no time left"
            return outcome
        rows_file, log_file = self._scratch / f"{section.name}.rows", self._scratch / f"{section.name}.log"
        rows_file.unlink(missing_ok=True)
        began = time.monotonic()
        command = [sys.executable, "-m", "bench.gpu.gpu", "--child", section.name]
        with log_file.open("w") as log:
            process = subprocess.Popen(
                [*command, "--order", self._order(rows_file, limit_s)],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment(),
                process_group=0,  # in the session of this process: what ends that ends the child, too
                cwd=ROOT,
            )
            try:
                while (status := process.poll()) is None and time.monotonic() < min(began + limit_s, self._end_s):
                    outcome.seconds, outcome.rows = time.monotonic() - began, rows_of(rows_file)
                    self.write()
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(max(0.0, min(_WRITE_S, began + limit_s - time.monotonic())))
            finally:
                _end_group(process)
        outcome.seconds, outcome.rows = time.monotonic() - began, rows_of(rows_file)
        self.judge(outcome, status, log_file, limit_s)
        return outcome

    def stop(self) -> None:
        """End all children, from another thread: within _WRITE_S."""
        self._end_s = 0.0

    def judge(self, outcome: Outcome, status: int | None, log_file: Path, limit_s: float) -> None:
        """`status`: the child's exit status; None: it had to be ended."""
        wrong = sum(row.get("ok") is False for row in outcome.rows)
        below = sum(row.get("meets") is False for row in outcome.rows)
        outcome.status, outcome.note = "ok", f"{below} figures below their target" if below else ""
        if status is None:
            outcome.status, outcome.note = "TIMED OUT", f"after {limit_s:.0f} s; {_tail(log_file)}"
        elif status == 3:
            outcome.status, outcome.note = "left out", _tail(log_file, lines=1)
        elif status:
            outcome.status, outcome.note = "FAILED", f"exit status {status}; {_tail(log_file)}"
        elif not outcome.rows or (wrong and not self._options.rehearse):
            outcome.status = "FAILED"
            outcome.note = f"{wrong} of {len(outcome.rows)} checks do not hold; {_tail(log_file)}"
        elif self._options.rehearse:
            outcome.status, outcome.note = "rehearsed", f"{wrong} of {len(outcome.rows)} checks do not hold"

    def write(self) -> Path:
        """The report, in the folder asked for and for the next call; returns the former's file."""
        with self._writing:
            return self.report.write(self._options.out, NAMES, self._scratch / _REPORT)

    def _order(self, rows_file: Path, limit_s: float) -> str:
        options, limits = self._options, self.report.outcomes.get("limits")
        return json.dumps(
            {
                "device": options.device,
                "tiny": options.tiny,
                "rehearse": options.rehearse,
                "scratch": str(self._scratch),
                "rows_file": str(rows_file),
                "limits": {row["name"]: float(row["value"]) for row in limits.rows if "value" in row} if limits else {},
                "model": str(options.model) if options.model else None,
                "limit_s": limit_s,
            }
        )

    def _environment(self) -> dict[str, str]:
        rehearsed = str(ROOT / "tests/fake_cuda/site") if self._options.rehearse else None
        path = os.pathsep.join(filter(None, (rehearsed, os.environ.get("PYTHONPATH"), str(ROOT))))
        return {"NIXL_LOG_LEVEL": "WARN", "HF_HUB_OFFLINE": "1", **os.environ, "PYTHONPATH": path}


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """The child with all that it started: asked, then made to."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_S)


def _tail(file: Path, lines: int = _LOG_LINES) -> str:
    return "\n".join(file.read_text(errors="replace").strip().splitlines()[-lines:])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="shapes that a CPU computes in seconds")
    parser.add_argument("--rehearse", action="store_true", help="over a CUDA runtime that computes nothing")
    parser.add_argument("--call", type=int, choices=CALLS, help="the sections of one command")
    parser.add_argument("--only", nargs="+", choices=NAMES, help="these; limits, too, where they are not known yet")
    parser.add_argument("--model", type=Path, help="folder of a real checkpoint, for the pair of workers")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or HERE.parent / "results"))
    parser.add_argument("--scratch", type=Path, help="30 GB for checkpoints, kept for the next call")
    parser.add_argument("--merge", type=Path, nargs="+", default=[], help="reports of earlier calls")
    parser.add_argument("--budget", type=float, help=f"seconds; for a call {CALL_S:.0f}, for all {HELD_S:.0f}")
    parser.add_argument("--patience", type=float, default=1.0, help="factor on every section's time limit")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--order", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is None and options.model is not None and not (options.model / "config.json").is_file():
        parser.error(f"--model {options.model}: there is no config.json")
    if options.child is None and options.device == "cpu" and not options.tiny:
        parser.error("--device cpu needs --tiny: the real shapes take hours")
    return options


def wanted_sections(call: int | None, only: list[str] | None, *, knows_limits: bool) -> list[Section]:
    """In order of use; "limits" before all where this machine's are not known."""
    named = [one for one in SECTIONS if (call or one.calls[0]) in one.calls and one.name in (only or NAMES)]
    return named if knows_limits or SECTIONS[0] in named else [SECTIONS[0], *named]


def run_all(options: argparse.Namespace, scratch: Path) -> int:
    report, kept = Report("rehearsal" if options.rehearse else "tiny" if options.tiny else ""), scratch / _REPORT
    for file in options.merge:
        report.read(file)
    known = report.read(kept) if kept.exists() else []
    knows_limits = any(one.name == "limits" and not one.is_failure for one in known)
    wanted = wanted_sections(options.call, options.only, knows_limits=knows_limits)
    driver = Driver(options, scratch, report)
    apart, together = split(options.call, wanted)

    def run(section: Section) -> None:
        sys.stderr.write(f"{section.name} …\n")  # at once: sections run side by side
        outcome = driver.run(section)
        if section in together:
            outcome.note = "; ".join(filter(None, ("beside other sections: no figures", outcome.note)))
        sys.stderr.write(f"{section.name}: {outcome.status}, {outcome.seconds:.0f} s\n")
        driver.write()

    for section in apart:
        run(section)
    with ThreadPoolExecutor(max(1, len(together))) as threads:
        try:
            list(threads.map(run, together))
        finally:
            driver.stop()
    file = driver.write()
    print(file.with_suffix(".md").read_text())
    print(f"written: {file}", file=sys.stderr)
    return int(any(report.outcomes[one.name].is_failure for one in wanted))


def main() -> int:
    options = _options()
    if options.child is not None:
        return child(options.child, options.order)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the child is ended on the way out
    options.model = options.model.resolve() if options.model else None
    if options.scratch is not None:
        options.scratch.mkdir(parents=True, exist_ok=True)
        return run_all(options, options.scratch.resolve())
    scratch = Path(tempfile.mkdtemp(prefix="kvrelay-gpu-"))
    try:
        return run_all(options, scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
