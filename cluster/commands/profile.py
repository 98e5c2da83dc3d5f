"""`kvrelay profile`: time of an engine's steps inside and outside kernels, or a speed profile fitted to measured steps.

One engine, in this process; none with --published, which prints one of cluster/profiles/published. Torch is imported
when a measurement runs, so that `--help` is fast.
"""

import json
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
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
    from kvrelay.engine.profiling.step_profile import StepProfile, StepWorkload
    from kvrelay.engine.step.engine import Engine
    from kvrelay.router.planning.speed_fit import Fitted

BUSY_SPREAD = 0.10  # steps of the same work differ less on an idle machine
TARGET_SHARE = 0.10  # outside kernels, of a decode step with one sequence on the CPU
_SAMPLED_FUNCTION = "StepProfiler._step"
_FLAME_S = 2.0  # sampled time of each workload, if the sequences can grow that long
_MOST_FLAME_ROUNDS = 256


def command(
    step: Annotated[bool, typer.Option("--step", help="measure steps inside and outside kernels")] = False,
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
    batch: Annotated[
        list[int] | None, typer.Option(min=1, help="decoding sequences; repeatable; default: 1 and 16")
    ] = None,
    context: Annotated[int, typer.Option(min=1, help="context of each decoding sequence at the start, tokens")] = 128,
    prompt: Annotated[
        int, typer.Option(min=0, help="prompt in prefill and mixed steps, tokens; 0: no such steps")
    ] = 256,
    steps: Annotated[int, typer.Option(min=1, help="measured steps of each kind")] = 40,
    temperature: Annotated[float, typer.Option(min=0.0, help="sampling temperature; 0: greedy")] = 0.0,
    flame: Annotated[Path | None, typer.Option(help="write a flame graph to this HTML file")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="also write the results to this file")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="any setting: section.key=value, repeatable")] = None,
) -> None:
    """Measure engine steps: time inside and outside kernels (--step), or a speed profile (--fit)."""
    if [step, fit is not None, published is not None].count(True) != 1:
        raise ConfigError("choose one of --step, --fit and --published")
    if published is not None:
        from kvrelay.cluster.profiles.profile import published_profile

        typer.echo(published_profile(published).text(), nl=False)
        return
    for file, flag in ((flame, "--flame"), (json_file, "--json"), (fit, "--fit")):
        _check_writable(file, flag)
    from kvrelay.cluster.commands.settings_flags import settings_from_flags

    flags: dict[str, dict[str, Any]] = {"model": {"source": model, "dtype": dtype}, "engine": {"backend": backend}}
    settings = settings_from_flags(config, flags, set_ or [])
    if fit is not None:
        _fit(settings, fit, seconds, workers)
        return
    from kvrelay.cluster.profiles.flame import write_page
    from kvrelay.engine.profiling.step_profile import StepProfiler, StepWorkload

    sizes = batch or [1, 16]
    workloads = [StepWorkload(size, 0) for size in sizes]
    if prompt:
        workloads += [StepWorkload(0, prompt), StepWorkload(max(sizes), prompt)]
    engine = _engine(settings)
    try:
        profiler = StepProfiler(engine, context_tokens=context, num_steps=steps, temperature=temperature)
        for workload in workloads:
            profiler.check(workload)
        profiles, trees = _measure(engine, profiler, workloads, with_flame=flame is not None)
        where = _where(engine, settings)
    finally:
        engine.close()
    _show(Console(), profiles, where)
    if flame is not None:
        notes = [_headline(profile) for profile in profiles]
        write_page(flame, f"kvrelay profile --step: {where}", trees, notes)
    if json_file is not None:
        json_file.write_text(json.dumps(_as_data(profiles, where), indent=1) + "\n")


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


def _check_writable(file: Path | None, flag: str) -> None:
    """Checked before minutes of work. Raises ConfigError."""
    if file is not None and (file.is_dir() or not file.absolute().parent.is_dir()):
        raise ConfigError(f"{flag} {file}: the folder must exist, and the path must name a file")


def _engine(settings: "Settings") -> "Engine":
    """An engine as a decode worker builds it. Raises ModelError, BackendUnavailable."""
    from kvrelay.cluster.profiles.neighbours import profiled_engine
    from kvrelay.engine.checkpoints.checkpoint import prepare_checkpoint

    return profiled_engine(settings, prepare_checkpoint(settings.model))


def _measure(
    engine: "Engine", profiler: Any, workloads: "list[StepWorkload]", *, with_flame: bool
) -> "tuple[list[StepProfile], list[dict[str, Any]]]":
    from kvrelay.cluster.profiles.flame import frames_under, sampled, tree_of

    profiles: list[StepProfile] = []
    trees: list[dict[str, Any]] = []
    for workload in workloads:
        profile = profiler.run(workload)
        profiles.append(profile)
        if not with_flame:
            continue
        rounds = max(4, min(_MOST_FLAME_ROUNDS, int(_FLAME_S / max(profile.step_s, 1e-6))))

        def sample(run_rounds: Callable[[], None], name: str = workload.name) -> None:
            with sampled(threading.get_ident()) as sampler:
                run_rounds()
            trees.append(tree_of(frames_under(sampler.seconds, _SAMPLED_FUNCTION), name))

        profiler.sample(workload, rounds, sample)
    return profiles, trees


def _where(engine: "Engine", settings: "Settings") -> str:
    from kvrelay.engine.checkpoints.checkpoint import model_name

    describe = getattr(engine.backend, "describe", None)
    facts = ", ".join(f"{name} {value}" for name, value in describe().items()) if describe else engine.backend.name
    return f"{model_name(settings.model)}, {engine.cache.fingerprint.compute_dtype}, {facts}"


def _micro(seconds: float) -> str:
    return f"{1e6 * seconds:,.0f}"


def _headline(profile: "StepProfile") -> str:
    return (
        f"{profile.workload}: a step of {_micro(profile.step_s)} µs (median of {profile.num_steps}), "
        f"{_micro(profile.outside_s)} µs of it outside kernels ({profile.share:.1%})"
    )


def _show(console: Console, profiles: "list[StepProfile]", where: str) -> None:
    console.print(f"{where}\none step, µs", highlight=False)
    table = Table(box=box.SIMPLE)
    table.add_column("", no_wrap=True)
    for profile in profiles:
        table.add_column(profile.workload.replace(" + ", "\n+ "), justify="right", no_wrap=True)
    table.add_row("step", *(_micro(profile.step_s) for profile in profiles))
    table.add_row("inside kernels", *(_micro(profile.kernels_s) for profile in profiles))
    table.add_row("outside kernels", *(_micro(profile.outside_s) for profile in profiles))
    table.add_row("share of step", *(_share(profile) for profile in profiles), end_section=True)
    for index, phase in enumerate(profiles[0].phases):
        cells = [(profile, profile.phases[index]) for profile in profiles]
        table.add_row(
            phase.name, *(f"{_micro(one.outside_s)}  {one.outside_s / profile.step_s:5.1%}" for profile, one in cells)
        )
    table.add_section()
    table.add_row("kernel calls", *(f"{profile.kernel_calls:,.0f}" for profile in profiles))
    if any(profile.host_waits is not None for profile in profiles):
        table.add_row("host waits", *(f"{profile.host_waits or 0:.1f}" for profile in profiles))
    if any(profile.ahead_s is not None for profile in profiles):
        table.add_row("host ahead of device", *(_micro(profile.ahead_s or 0.0) for profile in profiles))
        table.add_row("host waiting", *(_micro(profile.waited_s or 0.0) for profile in profiles))
    console.print(table)
    for profile in profiles:
        if profile.workload == "decode 1" and profile.host_waits is None:
            verdict = "within" if profile.share <= TARGET_SHARE else "[red]above[/]"
            console.print(f"{_headline(profile)}: {verdict} the target of {TARGET_SHARE:.0%}", highlight=False)


def _share(profile: "StepProfile") -> str:
    return f"{profile.share:.1%}"


def _as_data(profiles: "list[StepProfile]", where: str) -> dict[str, Any]:
    return {"where": where, "steps": [{**asdict(profile), "share": profile.share} for profile in profiles]}
