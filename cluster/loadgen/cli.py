"""`kvrelay bench`: from flags to a run, its table, JSON and plot."""

import asyncio
import itertools
import json
import secrets
import signal
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvrelay.cluster.launch.endpoints import endpoints
from kvrelay.cluster.loadgen.client import LoadRequest, LoadResult, LoadTarget, require_loopback, run_load, served_model
from kvrelay.cluster.loadgen.prompts import PromptSpec, synthetic_prompt, trace_prompt
from kvrelay.cluster.loadgen.stats import OK, Distribution, LoadRecord, Slo, Summary, concurrency_steps
from kvrelay.cluster.workloads.choose import load_trace
from kvrelay.cluster.workloads.mixes import poisson_arrivals
from kvrelay.cluster.workloads.trace import TraceEntry, scale_entries
from kvrelay.environment import environment_api_key
from kvrelay.errors import ConfigError

_WARM_UP_INDEX = 1 << 40  # warm-up prompts never repeat in the run
SUFFIXES = ("", ".png", ".jpg", ".jpeg", ".webp", ".svg", ".pdf")  # without one: PNG


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What one run sends and when.

    Closed loop with `concurrency`, else Poisson with `rate`, else at the trace's times.
    """

    prompts: PromptSpec
    output_tokens: int
    num_requests: int
    concurrency: int | None = None
    rate: float | None = None
    entries: tuple[TraceEntry, ...] = ()
    duration_s: float | None = None
    warm_up: int = 0

    def jobs(self) -> Iterator[LoadRequest]:
        """Requests in order of arrival, made one at a time."""
        if self.entries:
            for index, entry in enumerate(self.entries):
                prompt = trace_prompt(self.prompts, entry, index)
                yield LoadRequest(index, prompt, entry.output_tokens, entry.arrival_s)
            return
        arrivals = poisson_arrivals(self.rate, seed=self.prompts.seed) if self.rate else itertools.repeat(0.0)
        for index, arrival_s in enumerate(itertools.islice(arrivals, self.num_requests)):
            yield LoadRequest(index, synthetic_prompt(self.prompts, index), self.output_tokens, arrival_s)

    def warm_up_jobs(self) -> Iterator[LoadRequest]:
        for index in range(_WARM_UP_INDEX, _WARM_UP_INDEX + self.warm_up):
            yield LoadRequest(index, synthetic_prompt(self.prompts, index), min(self.output_tokens, 8))

    def describe(self) -> str:
        if self.entries:
            kind = "trace, closed loop" if self.concurrency else "trace"
            return f"{kind}, {len(self.entries)} requests"
        lengths = f"{self.prompts.input_tokens} in ({self.prompts.shared_tokens} shared), {self.output_tokens} out"
        arrivals = f"{self.concurrency} clients" if self.concurrency else f"Poisson, {self.rate:g}/s"
        return f"{arrivals}, {lengths}, {self.num_requests} requests, seed {self.prompts.seed}"


def _row(table: Table, name: str, values: Distribution) -> None:
    numbers = (values.mean, values.p50, values.p90, values.p95, values.p99, values.max)
    table.add_row(name, *(f"{1000 * number:.1f}" if values.count else "-" for number in numbers))


def render(summary: Summary, console: Console) -> None:
    """Print one run's table."""
    table = Table(title="latency, ms", title_justify="left")
    table.add_column("")
    for name in ("mean", "p50", "p90", "p95", "p99", "max"):
        table.add_column(name, justify="right")
    _row(table, "TTFT", summary.ttft_s)
    _row(table, "ITL", summary.itl_s)
    _row(table, "TPOT", summary.tpot_s)
    _row(table, "E2E", summary.e2e_s)
    console.print(table)
    for line in _lines(summary):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _lines(summary: Summary) -> Iterator[str]:
    yield (
        f"requests    {summary.num_requests} sent: {summary.num_ok} ok, {summary.num_rejected} rejected (429), "
        f"{summary.num_failed} failed, {summary.num_unfinished} unfinished; at most {summary.max_concurrency} at once"
    )
    yield (
        f"throughput  {summary.requests_per_s:.2f} requests/s, {summary.output_tokens_per_s:.1f} output tokens/s, "
        f"{summary.prompt_tokens_per_s:.1f} prompt tokens/s over {summary.duration_s:.1f} s"
    )
    if summary.slo.ttft_s is not None or summary.slo.tpot_s is not None:
        yield f"goodput     {summary.goodput_per_s:.2f} requests/s ({summary.slo_attainment:.1%} within the SLO)"
    share = summary.cached_tokens / max(summary.prompt_tokens, 1)
    yield f"tokens      {summary.prompt_tokens} prompt ({share:.1%} cached), {summary.output_tokens} output"
    late, cpu = summary.late_s, 100 * summary.cpu_share
    yield f"own lag     sent p99 {1000 * late.p99:.1f} ms late, max {1000 * late.max:.1f} ms; {cpu:.0f} % of a core"
    for outcome, count in summary.errors.items():
        yield f"error       {count} x {outcome}"
    if summary.num_wrong_length:
        yield f"warning     {summary.num_wrong_length} answers were not as long as asked for"
    if summary.num_estimated:
        yield f"warning     {summary.num_estimated} answers came without usage: their tokens are counted as chunks"
    if summary.is_late:
        yield "warning     the load generator sent requests late, as it was short of processor time: see own lag"


async def execute(plan: LoadPlan, target: LoadTarget, result: LoadResult, console: Console) -> bool:
    """Run a plan into `result` with a progress bar on `console`. Returns False when Ctrl-C ended it."""
    import numpy  # noqa: F401  (what makes prompts: not at the first request, which it would delay)

    if plan.warm_up:
        await run_load(target, plan.warm_up_jobs(), concurrency=min(plan.warm_up, plan.concurrency or 1))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("requests", total=len(plan.entries) or plan.num_requests)
        run = asyncio.create_task(
            run_load(
                target,
                plan.jobs(),
                concurrency=plan.concurrency,
                duration_s=plan.duration_s,
                result=result,
                on_record=lambda _: progress.advance(bar),
            )
        )
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, run.cancel)
        try:
            await run
        except asyncio.CancelledError:
            return False
        finally:
            loop.remove_signal_handler(signal.SIGINT)
    return True


def _check_outputs(figures: Path | None, picture: Path | None) -> None:
    """Before the run: its figures must not be lost in the end. Raises ConfigError."""
    if picture is not None and picture.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"--plot {picture}: unknown picture format; choose one of {', '.join(SUFFIXES[1:])}")
    for file in (figures, picture):
        if file is not None and not file.parent.is_dir():
            raise ConfigError(f"{file}: there is no folder {file.parent}")


def _token_range(text: str) -> tuple[int, int]:
    low, _, high = text.partition(":")
    if not (low.isdigit() and high.isdigit() and int(low) < int(high)):
        raise ConfigError(f"{text!r} is not a range of token ids; write for example 1000:30000")
    return int(low), int(high)


def _json_object(text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise ConfigError(f"--extra-body must be a JSON object: {error}") from error


def command(
    url: Annotated[str | None, typer.Option(help="server root, of any OpenAI server; default: by --address")] = None,
    address: Annotated[
        str | None, typer.Option(help="a kvrelay cluster, by Ray's dashboard; default: as for kvrelay status")
    ] = None,
    model: Annotated[str | None, typer.Option(help="default: the first that the server lists")] = None,
    concurrency: Annotated[int | None, typer.Option(min=1, help="closed loop with this many clients")] = None,
    rate: Annotated[float | None, typer.Option(help="open loop: Poisson arrivals per second")] = None,
    trace: Annotated[Path | None, typer.Option(help="open loop: a Mooncake .jsonl or an Azure .csv")] = None,
    requests: Annotated[int, typer.Option(min=1, help="most requests to send")] = 64,
    duration: Annotated[float | None, typer.Option(min=0.1, help="seconds after which no new request is sent")] = None,
    input_tokens: Annotated[int, typer.Option(min=1, help="prompt length")] = 128,
    output_tokens: Annotated[int, typer.Option(min=1, help="output length")] = 64,
    shared_prefix: Annotated[int, typer.Option(min=0, help="tokens that all prompts share at their start")] = 0,
    token_range: Annotated[str, typer.Option(help="ids of synthetic prompts, low:high")] = "1000:30000",
    seed: Annotated[
        int | None,
        typer.Option(help="of prompts and arrivals; default: random, so that no earlier run's prefixes are cached"),
    ] = None,
    time_scale: Annotated[float, typer.Option(help="a trace's times are multiplied by this")] = 1.0,
    length_scale: Annotated[float, typer.Option(help="a trace's lengths are multiplied by this")] = 1.0,
    max_input: Annotated[int | None, typer.Option(min=1, help="cut a trace's prompts to this")] = None,
    max_output: Annotated[int | None, typer.Option(min=1, help="cut a trace's outputs to this")] = None,
    endpoint: Annotated[str, typer.Option(help="completions (prompts of token ids) or chat (text)")] = "completions",
    extra_body: Annotated[str, typer.Option(help="JSON object added to every request")] = "{}",
    temperature: Annotated[float, typer.Option(min=0)] = 0.0,
    api_key: Annotated[str | None, typer.Option(help="bearer token; default without --url: $KVRELAY_API_KEY")] = None,
    timeout: Annotated[float, typer.Option(min=0.1, help="seconds for one request")] = 600.0,
    warm_up: Annotated[int, typer.Option(min=0, help="requests before the clock starts")] = 2,
    slo_ttft_ms: Annotated[float | None, typer.Option(help="goodput: TTFT limit, ms")] = None,
    slo_tpot_ms: Annotated[float | None, typer.Option(help="goodput: TPOT limit, ms")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="write every figure and request here")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="write a picture here (.png, .svg, .pdf)")] = None,
    allow_remote: Annotated[bool, typer.Option("--allow-remote", help="allow a server on another machine")] = False,
) -> None:
    """Load an OpenAI server and report TTFT, ITL, TPOT, throughput and goodput.

    Closed loop with --concurrency (the default, 4), open loop with --rate or --trace. Bounded by
    --requests and --duration; Ctrl-C prints what there is.
    """
    console = Console()
    try:
        if sum(choice is not None for choice in (concurrency, rate, trace)) > 1 and not (trace and concurrency):
            raise ConfigError(
                "choose one of --concurrency, --rate and --trace (--trace may be combined with --concurrency)"
            )
        if endpoint not in ("completions", "chat"):
            raise ConfigError(f"--endpoint is completions or chat, not {endpoint!r}")
        if min(time_scale, length_scale) <= 0:
            raise ConfigError("--time-scale and --length-scale must be above 0")
        if rate is not None and rate <= 0:
            raise ConfigError("--rate must be above 0")
        _check_outputs(json_file, plot_file)
        seed = secrets.randbelow(1 << 31) if seed is None else seed
        low, high = _token_range(token_range)
        entries: list[TraceEntry] = []
        if trace is not None:
            entries = scale_entries(
                load_trace(trace, limit=requests, seed=seed),
                time_scale=time_scale,
                length_scale=length_scale,
                max_input=max_input,
                max_output=max_output,
            )
        elif rate is None and concurrency is None:
            concurrency = 4
        extra = _json_object(extra_body)
        api_key = api_key or (None if url else environment_api_key())  # the key is of kvrelay's clusters alone
        url = endpoints(url, address).api_url
        require_loopback(url, allow_remote=allow_remote)
        target = LoadTarget(
            url=url,
            model=model or served_model(url, api_key=api_key),
            endpoint="chat" if endpoint == "chat" else "completions",
            api_key=api_key,
            extra_body=extra,
            temperature=temperature,
            timeout_s=timeout,
        )
    except ConfigError as error:
        Console(stderr=True).print(f"kvrelay bench: {error}", markup=False, soft_wrap=True)
        raise typer.Exit(2) from error
    plan = LoadPlan(
        prompts=PromptSpec(input_tokens, shared_prefix, low, high, seed),
        output_tokens=output_tokens,
        num_requests=requests,
        concurrency=concurrency,
        rate=rate,
        entries=tuple(entries),
        duration_s=duration,
        warm_up=warm_up,
    )
    slo = Slo(None if slo_ttft_ms is None else slo_ttft_ms / 1000, None if slo_tpot_ms is None else slo_tpot_ms / 1000)
    _run(plan, target, slo, console, json_file, plot_file)


def _run(
    plan: LoadPlan, target: LoadTarget, slo: Slo, console: Console, out: Path | None, picture: Path | None
) -> None:
    """Execute, print, and exit: 130 after Ctrl-C, 1 when no request succeeded."""
    title = f"{target.model} at {target.url}: {plan.describe()}"
    console.print(title, markup=False, highlight=False, soft_wrap=True)
    result = LoadResult()
    is_whole = False
    try:
        is_whole = asyncio.run(execute(plan, target, result, console))
    except KeyboardInterrupt:
        console.print("stopped before the run began")
    summary = result.summary(slo)
    if out is not None:
        document: dict[str, Any] = {
            "target": {"url": target.url, "model": target.model, "endpoint": target.endpoint},
            "plan": {**asdict(plan), "entries": len(plan.entries)},
            "summary": vars(summary),
            "requests": [{**asdict(record), "tpot_s": record.tpot_s} for record in result.records],
        }
        out.write_text(json.dumps(document, indent=1, default=asdict) + "\n")
    if picture is not None:
        plot(result, picture, title=title, slo=slo)
    render(summary, console)
    if result.first_failure:
        console.print(f"first error {result.first_failure}", markup=False, highlight=False, soft_wrap=True)
    if not is_whole:
        raise typer.Exit(130)
    if summary.num_ok == 0:
        raise typer.Exit(1)


def _draw_shares(axes: Any, title: str, values_s: Sequence[float], limit_s: float | None) -> None:
    axes.set(title=title, xlabel="ms", ylabel="share of values", ylim=(0, 1.02))
    axes.grid(alpha=0.3)
    if values_s:
        axes.ecdf([1000 * value for value in values_s])
    if limit_s is not None:
        axes.axvline(1000 * limit_s, color="tab:red", linestyle="--", label="SLO")
        axes.legend(loc="lower right")


def _draw_course(axes: Any, records: Sequence[LoadRecord]) -> None:
    axes.set(title="course of the run", xlabel="s since start", ylabel="requests in flight")
    axes.grid(alpha=0.3)
    axes.step(*concurrency_steps(records), where="post", color="tab:gray")
    other = axes.twinx()
    other.set_ylabel("TTFT, ms")
    first = [(record.started_s, 1000 * record.ttft_s) for record in records if record.ttft_s is not None]
    other.scatter([x for x, _ in first], [y for _, y in first], s=8)
    bad = [record.started_s for record in records if record.outcome != OK]
    if bad:
        other.scatter(bad, [0.0] * len(bad), s=24, marker="x", color="tab:red", label="not ok")
        other.legend(loc="upper right")


def plot(result: LoadResult, path: Path, *, title: str, slo: Slo) -> None:
    """Write the picture as PNG (or what the suffix says). Raises OSError when it cannot be written."""
    from matplotlib.figure import Figure

    ok = [record for record in result.records if record.outcome == OK]
    ttfts = [record.ttft_s for record in ok if record.ttft_s is not None]
    tpots = [tpot for record in ok if (tpot := record.tpot_s) is not None]
    figure = Figure(figsize=(11, 7.5))
    axes = figure.subplots(2, 2)
    _draw_shares(axes[0][0], "time to first token", ttfts, slo.ttft_s)
    _draw_shares(axes[0][1], "gap between tokens (ITL)", result.gaps_s, None)
    _draw_shares(axes[1][0], "time per output token (TPOT)", tpots, slo.tpot_s)
    _draw_course(axes[1][1], result.records)
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
