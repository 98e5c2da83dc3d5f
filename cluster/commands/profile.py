"""`kvrelay profile`: an engine's steps under torch's profiler, or a speed profile fitted to measured steps.

One engine, in this process; none with --published, which prints one of cluster/profiles/published. Torch is imported
when a measurement runs, so that `--help` is fast.
"""

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from kvrelay.errors import ConfigError

if TYPE_CHECKING:
    from kvrelay.cluster.profiles.profile import SimulatorProfile
    from kvrelay.config import Settings
    from kvrelay.engine.step.engine import Engine
    from kvrelay.router.planning.speed_fit import Fitted

BUSY_SPREAD = 0.10  # steps of the same work differ less on an idle machine
_WARM_UP = 4  # steps: recordings, graphs, caches
_ROWS = 30  # of the table


def command(
    fit: Annotated[
        Path | None,
        typer.Option(
            "--fit",
            help="measure steps of all kinds and write a speed profile for `kvrelay simulate` and `kvrelay plan`",
        ),
    ] = None,
    seconds: Annotated[float, typer.Option(min=5, help="longest time that --fit measures, s")] = 90.0,
    workers: Annotated[
        int, typer.Option(min=1, help="workers on one machine: --fit also measures how much they slow each other down")
    ] = 1,
    published: Annotated[
        str | None, typer.Option("--published", help="print a profile made from published figures of H100s and A100s")
    ] = None,
    model: Annotated[str | None, typer.Option(help="folder, GGUF file, hub id; default: SmolLM2-135M-Instruct")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file of settings; flags override it")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32, bfloat16, float16")] = None,
    backend: Annotated[str | None, typer.Option(help="kernels: auto, reference, cpu, cuda")] = None,
    batch: Annotated[int, typer.Option(min=0, help="decoding sequences in each step")] = 1,
    context: Annotated[int, typer.Option(min=1, help="context of each decoding sequence at the start, tokens")] = 128,
    prompt: Annotated[int, typer.Option(min=0, help="tokens of a new prompt in each step; 0: none")] = 0,
    steps: Annotated[int, typer.Option(min=1, help="profiled steps")] = 20,
    trace: Annotated[Path | None, typer.Option(help="write a Chrome trace of the steps to this file")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="any setting: section.key=value, repeatable")] = None,
) -> None:
    """Run an engine's steps under torch's profiler, or measure a speed profile (--fit)."""
    if fit is not None and published is not None:
        raise ConfigError("choose one of --fit and --published")
    if published is not None:
        from kvrelay.cluster.profiles.profile import published_profile

        typer.echo(published_profile(published).text(), nl=False)
        return
    if not batch + prompt:
        raise ConfigError("steps need work: give --batch, --prompt or both")
    for file, flag in ((trace, "--trace"), (fit, "--fit")):  # before minutes of work
        if file is not None and (file.is_dir() or not file.absolute().parent.is_dir()):
            raise ConfigError(f"{flag} {file}: the folder must exist, and the path must name a file")
    from kvrelay.cluster.commands.settings_flags import settings_from_flags

    flags: dict[str, dict[str, Any]] = {"model": {"source": model, "dtype": dtype}, "engine": {"backend": backend}}
    settings = settings_from_flags(config, flags, set_ or [])
    if fit is not None:
        _fit(settings, fit, seconds, workers)
        return
    engine = _engine(settings)
    try:
        step_s, session = profiled_steps(engine, batch=batch, context=context, prompt=prompt, num_steps=steps)
        order = "self_device_time_total" if engine.backend.device.type == "cuda" else "self_cpu_time_total"
        print(f"{_where(engine, settings)}\n{session.key_averages().table(sort_by=order, row_limit=_ROWS)}")
        print(f"a step of {batch} decoding sequences and a prompt of {prompt} tokens: {1e3 * step_s:.3f} ms unprofiled")
        if trace is not None:
            session.export_chrome_trace(str(trace))
            print(f"written to {trace}; open it in https://ui.perfetto.dev")
    finally:
        engine.close()


def profiled_steps(engine: "Engine", *, batch: int, context: int, prompt: int, num_steps: int) -> tuple[float, Any]:
    """The median seconds of so many plain steps, and torch's profile of as many more.

    The sequences stay in the engine. Raises ConfigError: it cannot run such steps.
    """
    from torch.profiler import profile

    from kvrelay.cluster.profiles.fit import add_prompt

    budget = engine.config.token_budget
    longest = -(-batch * context // budget) + _WARM_UP + 2 * num_steps + 2  # the first decode while others prefill
    for number in range(batch):
        add_prompt(engine, number, context, max_tokens=longest)
    while any(seq.num_uncomputed > 1 for seq in engine.scheduler.sequences.values()):
        engine.step()

    def run(first: int, count: int) -> list[float]:
        found = []
        for number in range(first, first + count):
            if prompt:
                add_prompt(engine, batch + number, prompt, max_tokens=1)
            begin_s = time.perf_counter()
            result = engine.step()
            engine.reports.drain_events()
            found.append(time.perf_counter() - begin_s)
            if number and result.num_tokens != batch + prompt:  # the first may be the last prompt's, collected late
                raise ConfigError(
                    f"a step computed {result.num_tokens} tokens, not {batch + prompt}: lower --batch, --context or "
                    f"--prompt (engine.token_budget {budget}, engine.max_running {engine.config.max_running})"
                )
        return found

    run(0, _WARM_UP)
    step_s = statistics.median(run(_WARM_UP, num_steps))
    _name_ranges(engine)
    with profile() as session:
        run(_WARM_UP + num_steps, num_steps)
    return step_s, session


def _name_ranges(engine: "Engine") -> None:
    """Make a step's parts and compiled kernels ranges of the profile; torch knows its own operators only."""
    from torch.profiler import record_function

    def named(owner: Any, name: str) -> Callable[..., Any]:
        function: Callable[..., Any] = record_function(name)(getattr(owner, name))
        return function

    class Library:
        def __init__(self, lib: Any) -> None:
            self._lib = lib

        def __getattr__(self, name: str) -> Callable[..., Any]:
            setattr(self, name, function := named(self._lib, name))
            return function

    sampler, runner = engine.executor.sampler, engine.runner
    for owner, names in (
        (engine, ("step", "advance")),
        (engine.reports, ("drain_events",)),
        (engine.scheduler, ("schedule",)),
        (runner, ("run", "batch", "logits")),
        (sampler, ("sample", "draw")),
    ):
        for name in names:
            setattr(owner, name, named(owner, name))
    if (native := engine.backend.compiled_kernels) is not None:
        native.lib = Library(native.lib)


def _fit(settings: "Settings", file: Path, budget_s: float, num_workers: int) -> None:
    """Measure, fit, write the profile, and print the errors of the fit. Raises ConfigError."""
    from kvrelay.cluster.profiles.fit import StepSampler, profile_of, step_clock_of
    from kvrelay.cluster.profiles.neighbours import between_steps_s, slowdowns
    from kvrelay.engine.checkpoints.checkpoint import model_name, prepare_checkpoint
    from kvrelay.router.planning.speed_fit import fit_curve

    engine, slowdown, between_s = _engine(settings), {}, 0.0
    try:
        sampler = StepSampler(engine, budget_s=budget_s, step_clock=step_clock_of(engine))
        fitted = fit_curve(sampler.run())
        threads, where = getattr(engine.backend, "num_threads", 0), _where(engine, settings)  # 0: not a CPU
        if num_workers > 1:
            slowdown = slowdowns(engine, settings, prepare_checkpoint(settings.model), num_workers)
        if not engine.looks_ahead:  # with lookahead the device computes meanwhile
            between_s = between_steps_s(engine)
    finally:
        engine.close()
    profile = profile_of(
        engine,
        fitted,
        model=model_name(settings.model),
        num_threads=threads,
        date=time.strftime("%Y-%m-%d"),
        spread=sampler.spread(),
        between_s=between_s,
    )
    if slowdown:
        profile = profile.model_copy(update={"slowdown": slowdown, "workers_per_node": num_workers})
    file.write_text(profile.text())
    _show_fit(Console(), fitted, where, file, profile)


def _show_fit(console: Console, fitted: "Fitted", where: str, file: Path, profile: "SimulatorProfile") -> None:
    curve = fitted.curve
    console.print(where, highlight=False)
    table = Table(box=box.SIMPLE)
    for name in ("steps", "kinds of work", "median error", "p90"):
        table.add_column(name, justify="left" if name == "steps" else "right")
    for kind, error in fitted.errors.items():
        table.add_row(kind, f"{error.num_samples}", f"{error.median:.1%}", f"{error.p90:.1%}")
    console.print(table)
    console.print(
        f"step time: {_micro(curve.overhead_s)} µs + the larger of {_micro(curve.weights_s)} µs (weights) and "
        f"{1e6 * curve.token_s:.1f} µs per token + {1e9 * curve.pair_s:.2f} ns per token pair in prompts + "
        f"{1e6 * curve.context_s:.3f} µs per token of context + {_micro(curve.sequence_s)} µs per sequence",
        highlight=False,
        soft_wrap=True,
    )
    between_s = profile.decode.overhead_s - curve.overhead_s
    console.print(
        f"between two steps: {_micro(between_s)} µs, which the profile counts as part of each step", highlight=False
    )
    spread = profile.fit.spread if profile.fit is not None else None
    if spread is not None:
        line = f"steps of the same work vary: p90 - p10 is {spread:.1%} of the median"
        is_busy = spread > BUSY_SPREAD
        console.print(
            line + (": [red]other programs ran meanwhile[/], measure again" if is_busy else ""), highlight=False
        )
    for kind, ratios in profile.slowdown.items():
        times = ", ".join(f"{ratio:.2f} with {count}" for count, ratio in enumerate(ratios, 1) if count > 1)
        console.print(
            f"a {kind} step takes longer by these factors: {times} busy workers", highlight=False, soft_wrap=True
        )
    console.print(f"written to {file}", highlight=False, soft_wrap=True)


def _engine(settings: "Settings") -> "Engine":
    """An engine as a decode worker builds it. Raises ModelError, BackendUnavailable."""
    from kvrelay.cluster.profiles.neighbours import profiled_engine
    from kvrelay.engine.checkpoints.checkpoint import prepare_checkpoint

    return profiled_engine(settings, prepare_checkpoint(settings.model))


def _where(engine: "Engine", settings: "Settings") -> str:
    from kvrelay.engine.checkpoints.checkpoint import model_name

    describe = getattr(engine.backend, "describe", None)
    facts = ", ".join(f"{name} {value}" for name, value in describe().items()) if describe else engine.backend.name
    return f"{model_name(settings.model)}, {engine.cache.fingerprint.compute_dtype}, {facts}"


def _micro(seconds: float) -> str:
    return f"{1e6 * seconds:,.0f}"
