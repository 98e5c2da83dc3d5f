"""The GPU's tests and `kvrelay verify`, as a user runs them; each in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

from bench.gpu.section import Context, LeftOut

ROOT = Path(__file__).resolve().parent.parent.parent
GRID = "test_attention_equals_the_reference"  # the section "kernels" has it, in the order of use and as time allows


def run_tests(context: Context) -> None:
    """pytest's GPU tests."""
    if not context.is_cuda:
        raise LeftOut("they need a GPU")
    report = context.scratch / "tests.xml"
    # without the project's own settings, which name plugins that such a machine may lack
    plain = ["-c", os.devnull, f"--rootdir={ROOT}", "--import-mode=importlib", "-p", "no:cacheprovider"]
    chosen = ["-m", "gpu and not slow", "-k", f"not {GRID}", f"--junitxml={report}", "tests/kernels"]
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", *plain, *chosen], cwd=ROOT)
    context.add(check="pytest -m gpu", ok=done.returncode == 0, note=suite_of(report))


def suite_of(report: Path) -> str:
    """The counts of a junit file."""
    import xml.etree.ElementTree as Tree

    try:
        suite = next(Tree.parse(report).getroot().iter("testsuite"))
    except (OSError, Tree.ParseError, StopIteration):
        return "no report"
    return ", ".join(f"{suite.get(name)} {name}" for name in ("tests", "failures", "errors", "skipped"))


def run_verify(context: Context) -> None:
    """Tokens equal Hugging Face's over every way of serving, in float32; a flipped bit is refused."""
    backend, report = "cuda" if context.is_cuda else "cpu", context.scratch / "verify.json"
    few = ["--max-model-len", "192", "--tokens", "16", *(["--transport", "shm"] if context.tiny else [])]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "kvrelay.cluster.commands.cli",
            "verify",
            "--family",
            "llama",
            "--backend",
            backend,
            "--json",
            str(report),
            *few,
        ],
        cwd=ROOT,
    )
    if not report.exists():
        context.add(check="kvrelay verify", ok=False, note=f"exit status {done.returncode}, no report")
        return
    for one in json.loads(report.read_text()):
        for row in one["rows"]:
            context.add(
                check=row["name"],
                same=row["passed"],
                of=row["total"],
                ok=row["passed"] == row["total"] > 0,
                note=row["note"],
            )
        context.add(check="verify as a whole", ok=bool(one["ok"]), note=f"on {one['device']}")
