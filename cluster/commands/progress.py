"""The progress lines of `kvrelay serve` and `kvrelay deploy`."""

import threading

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn


class StartProgress:
    """The progress lines of a start: one for each part of the cluster, with its state and time."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._is_live = progress.console.is_terminal  # otherwise a plain line when a part begins and when it is done
        self._tasks: dict[str, TaskID] = {}
        self._lock = threading.Lock()

    def report(self, part: str, state: str, share: float | None = None) -> None:
        """Show `state`; `share` (0 to 1) sets the bar, None makes it pulse."""
        with self._lock:
            if part not in self._tasks:
                self._tasks[part] = self._progress.add_task(part, total=None, state="")
                self._print(f"  {part:<8} {state}")
            if share is None:
                self._progress.update(self._tasks[part], state=state)
            else:
                self._progress.update(self._tasks[part], state=state, total=1.0, completed=share)

    def done(self, part: str, state: str = "ready") -> None:
        self.report(part, state, 1.0)
        with self._lock:
            self._progress.stop_task(self._tasks[part])
            self._print(f"✓ {part:<8} {state}")

    def _print(self, line: str) -> None:
        if not self._is_live:
            self._progress.console.print(line, highlight=False, markup=False)


def show_progress(console: Console) -> Progress:
    """The bars, to be entered; without a terminal StartProgress prints plain lines."""
    columns = (
        SpinnerColumn(finished_text="[green]✓"),
        TextColumn("{task.description:<8}"),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[state]}"),
        TimeElapsedColumn(),
    )
    return Progress(*columns, console=console, disable=not console.is_terminal)
