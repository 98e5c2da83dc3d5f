"""What `kvrelay verify` found: one result per row, printed as rows end."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

CUDA_NOTE = (
    "float32 on cuda: attention, norms and cache writes run in torch here, FlashInfer's kernels exist in half "
    "precision only. This proves paging, scheduling and transfer in GPU memory; `pytest -m gpu` compares FlashInfer's "
    "kernels with the reference in float16 and bfloat16."
)


@dataclass(slots=True)
class RowResult:
    """One row: how many checks passed, and a note about the first that failed."""

    name: str
    passed: int = 0
    total: int = 0
    note: str = ""

    @property
    def ok(self) -> bool:
        return self.passed == self.total and self.total > 0

    def compare(self, prompt: str, expected: Sequence[int], tokens: Sequence[int]) -> None:
        """Check that a prompt's tokens are the expected ones."""
        self.total += 1
        if list(expected) == list(tokens):
            self.passed += 1
        elif not self.note:
            pairs = enumerate(zip(expected, tokens, strict=False))
            at = next((index for index, (one, other) in pairs if one != other), min(len(expected), len(tokens)))
            self.note = f"{prompt}: token {at} differs"

    def check(self, note: str = "", *, holds: bool) -> None:
        """Check anything else. The note of the first check stands, unless a later one fails."""
        self.total += 1
        self.passed += holds
        if not holds or not self.note:
            self.note = note or self.note


@dataclass(slots=True)
class VerifyReport:
    """The rows of one model. left_out: rows or transports that do not apply here, and why."""

    model: str
    prompts: list[str]
    rows: list[RowResult] = field(default_factory=list)
    device: str = "cpu"
    dtype: str = "float32"
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return bool(self.rows) and all(row.ok for row in self.rows)


def row_printer(report: VerifyReport, num_rows: int, console: "Console") -> Callable[[RowResult, float], None]:
    """Print the title; returns what prints each row when it has ended, on a terminal or not."""
    against = "one worker alone, and Hugging Face's log-probabilities"
    if report.dtype == "float32":
        against = "Hugging Face generate"
    _print(console, f"kvrelay verify: {report.model}, {report.dtype}, greedy, against {against}")

    def show(row: RowResult, seconds: float) -> None:
        mark, style = ("ok  ", "green") if row.ok else ("FAIL", "red")
        note = f"; {row.note}" if row.note else ""
        line = f"{row.name}: {row.passed} of {row.total}{note} ({seconds:.1f} s)"
        console.print(f"{len(report.rows):>3}/{num_rows} [{style}]{mark}[/]", end=" ")
        _print(console, line)

    return show


def print_summary(report: VerifyReport, console: "Console") -> None:
    """Print how many rows passed, the prompts, and what was left out."""
    _print(console, f"{sum(row.ok for row in report.rows)} of {len(report.rows)} rows ok")
    _print(console, f"prompts: {', '.join(report.prompts)}")
    for name, why in report.left_out.items():
        _print(console, f"left out: {name} ({why})")
    if report.device.startswith("cuda") and report.dtype == "float32":
        _print(console, CUDA_NOTE)


def _print(console: "Console", line: Any) -> None:
    console.print(line, highlight=False, markup=False, soft_wrap=True)
