"""What a run of faults comes to: a table, a record for JSON, a picture."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kvrelay.cluster.chaos.growth import memory_trends
from kvrelay.cluster.chaos.history import Problem
from kvrelay.cluster.chaos.run import ProcessSample, StruckFault
from kvrelay.cluster.loadgen.stats import Distribution, distribution

CONTROL = "nothing"
GOAL_S = 2.0  # of the 99th percentile of silences
SHOWN = 20  # problems on the terminal; all are in the JSON


@dataclass(frozen=True, slots=True)
class ChaosReport:
    """Everything that a run reports. `left_out`: kinds of faults that are impossible here, and why."""

    model: str
    seed: int
    seconds: float
    counts: Mapping[str, int]
    faults: Sequence[StruckFault]
    problems: Sequence[Problem]
    leaks: Sequence[str]
    tokens_per_s: Mapping[int, int]
    samples: Sequence[ProcessSample]
    left_out: Mapping[str, str]

    @property
    def is_fine(self) -> bool:
        """Nothing wrong, broken without excuse, or leaked, and every part came back."""
        return not self.problems and not self.leaks and all(one.whole_s is not None for one in self.faults)

    @property
    def num_faults(self) -> int:
        return sum(one.kind != CONTROL for one in self.faults)

    def silences(self) -> dict[str, Distribution]:
        """Of each kind's faults, and of all together, the control apart."""
        found: defaultdict[str, list[float]] = defaultdict(list)
        for one in self.faults:
            for name in (one.kind, "all faults") if one.kind != CONTROL else (CONTROL,):
                found[name] += [] if one.silence_s is None else [one.silence_s]
        return {name: distribution(found[name]) for name in sorted(found)}


def render(report: ChaosReport, console: Console, *, shows_growth: bool) -> None:
    """Print the table and what was wrong."""
    table = Table(title="longest silence of a running stream, and until the part was back, s", title_justify="left")
    for name in ("fault", "count", "p50", "p90", "p99", "max", "back p50", "back max"):
        table.add_column(name, justify="left" if name == "fault" else "right")
    counts = Counter(one.kind for one in report.faults) + Counter({"all faults": report.num_faults})
    for name, silence in report.silences().items():
        whole = distribution(
            one.whole_s
            for one in report.faults
            if one.whole_s is not None and (one.kind == name or (name == "all faults" and one.kind != CONTROL))
        )
        found = (silence.p50, silence.p90, silence.p99, silence.max) if silence.count else ()
        cells = [f"{value:.2f}" for value in found] or ["–"] * 4
        table.add_row(name, str(counts[name]), *cells, f"{whole.p50:.1f}", f"{whole.max:.1f}")
    console.print(table)
    for line in _lines(report, shows_growth=shows_growth):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _lines(report: ChaosReport, *, shows_growth: bool) -> Iterator[str]:
    counts = report.counts
    yield (
        f"requests  {counts.get('requests', 0)}: {counts.get('complete', 0)} right and whole, "
        f"{counts.get('left', 0)} left by their clients, "
        f"{counts.get('excused', 0)} cut off with the ingress that answered them"
    )
    num_wrong = sum(one.is_wrong for one in report.problems)
    lost = [one.kind for one in report.faults if one.whole_s is None]
    yield (
        f"faults    {report.num_faults} in {report.seconds:.0f} s, seed {report.seed}: {num_wrong} requests wrong, "
        f"{len(report.problems) - num_wrong} broken, {len(report.leaks)} leaks, {len(lost)} parts not back"
    )
    for kind, why in report.left_out.items():
        yield f"left out  {kind}: {why}"
    for problem in report.problems[:SHOWN]:
        yield f"{'wrong   ' if problem.is_wrong else 'broken  '}  request {problem.number}: {problem.what}"
    yield from (f"leak      {line}" for line in report.leaks[:SHOWN])
    yield from (f"not back  after {kind}" for kind in lost)
    for one in memory_trends(report.samples) if shows_growth else ():
        known = one.per_hour is not None and one.private_per_hour is not None
        rate = f"{one.per_hour:+.1f} MiB/h (private {one.private_per_hour:+.1f})" if known else "not known"
        course = f"first {one.first:.0f}, last {one.last:.0f}, peak {one.peak:.0f} MiB"
        yield f"growth    {rate:>28}  {one.kind}, {one.num_processes} in all: {course}"


def plot(report: ChaosReport, path: Path) -> None:
    """Silences by kind, tokens over time with the faults, memory of every process. Raises OSError."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 11))
    silences, course, memory = figure.subplots(3, 1)
    kinds = sorted({one.kind for one in report.faults})
    silences.set(title="longest silence of a running stream", xlabel="s", yticks=range(len(kinds)), yticklabels=kinds)
    found = [one for one in report.faults if one.silence_s is not None]
    silences.scatter([one.silence_s for one in found], [kinds.index(one.kind) for one in found], s=12, alpha=0.6)
    silences.axvline(GOAL_S, color="tab:red", linestyle="--", label=f"goal of p99: {GOAL_S:g} s")
    silences.legend(loc="lower right")
    course.set(title="tokens of the requests that ended in each second, and faults", xlabel="s since the start")
    seconds = range(max(report.tokens_per_s, default=0) + 1)
    course.step(seconds, [report.tokens_per_s.get(second, 0) for second in seconds], color="tab:gray", where="post")
    struck = [one.at_s for one in report.faults if one.kind != CONTROL]
    course.plot(struck, [0] * len(struck), "|", color="tab:red", markersize=12)
    memory.set(title="resident memory of each process", xlabel="s since the start", ylabel="MiB")
    by_pid: defaultdict[int, list[ProcessSample]] = defaultdict(list)
    for one in report.samples:
        by_pid[one.pid].append(one)
    for own in by_pid.values():
        memory.plot([one.at_s for one in own], [one.rss_bytes / (1 << 20) for one in own], linewidth=0.8)
    for axes in (silences, course, memory):
        axes.grid(alpha=0.3)
    figure.suptitle(f"{report.num_faults} faults in {report.seconds:.0f} s, seed {report.seed}, {report.model}")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
