"""`kvrelay profile`: what a step of the engine costs outside its kernels, and how long steps take by what they compute.

One engine, in this process. With --published there is none: a ready-made profile is written out.
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

from kvrelay.cluster.commands.settings_flags import settings_from_flags
from kvrelay.cluster.profiles.flame import below, sampled, tree_of, write_page
from kvrelay.cluster.profiles.profile import SimulatorProfile, published_profile
from kvrelay.config import Settings
from kvrelay.errors import ConfigError
from kvrelay.router.planning.speed_fit import Fitted, fit_curve

if TYPE_CHECKING:
    from kvrelay.engine.profiling.step_profile import StepProfile, StepWorkload
    from kvrelay.engine.step.engine import Engine

BUSY_SPREAD = 0.10  # of steps of the same work: beyond what a quiet machine shows
TARGET_SHARE = 0.10  # of a step with one sequence on the CPU
_SAMPLED_FUNCTION = "StepProfiler._step"
_FLAME_S = 2.0  # sampled of each workload, if the sequences can grow so long
_MOST_FLAME_ROUNDS = 256


def command(
    step: Annotated[bool, typer.Option("--step", help="what a step costs outside its kernels")] = False,
    fit: Annotated[
        Path | None,
        typer.Option("--fit", help="measure steps of all kinds, write a profile for `kvrelay simulate` there"),
    ] = None,
    seconds: Annotated[float, typer.Option(min=5, help="longest that --fit measures")] = 90.0,
    workers: Annotated[
        int, typer.Option(min=1, help="of one machine: --fit also measures how they slow each other down")
    ] = 1,
    published: Annotated[
        str | None,
        typer.Option("--published", help="print this ready-made profile: H100s and A100s by published figures"),
    ] = None,
    model: Annotated[str | None, typer.Option(help="folder, GGUF file, hub id; default: SmolLM2-135M-Instruct")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file of settings; flags win over it")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32, bfloat16, float16")] = None,
    backend: Annotated[str | None, typer.Option(help="kernels: auto, reference, cpu, cuda")] = None,
    batch: Annotated[list[int] | None, typer.Option(min=1, help="sequences that decode; repeatable: 1, 16")] = None,
    context: Annotated[
        int, typer.Option(min=1, help="tokens of each sequence that decodes, when measuring begins")
    ] = 128,
    prompt: Annotated[int, typer.Option(min=0, help="tokens of the prompt in prefill and mixed steps; 0: none")] = 256,
    steps: Annotated[int, typer.Option(min=1, help="steps measured of each kind")] = 40,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy")] = 0.0,
    flame: Annotated[Path | None, typer.Option(help="write a flame graph there: one HTML file")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="also write the figures there")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="any setting: section.key=value, repeatable")] = None,
) -> None:
    """Measure steps of the engine: inside and outside their kernels, or how long they take by what they compute."""
    if [step, fit is not None, published is not None].count(True) != 1:
        raise ConfigError("say what to profile: one of --step, --fit, --published")
    if published is not None:
        typer.echo(published_profile(published).text(), nl=False)
        return
    for file, flag in ((flame, "--flame"), (json_file, "--json"), (fit, "--fit")):
        _check_writable(file, flag)
    flags: dict[str, dict[str, Any]] = {
        "model": {"source": model, "dtype": dtype, "max_model_len": None},
        "engine": {"backend": backend},
    }
    settings = settings_from_flags(config, flags, set_ or [])
    if fit is not None:
        _fit(settings, fit, seconds, workers)
        return
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


def _fit(settings: Settings, file: Path, budget_s: float, num_workers: int) -> None:
    """Measure, fit, write, and say how well the curve tells what was measured. Raises ConfigError."""
    from kvrelay.cluster.profiles.fit import StepSampler, profile_of, step_clock_of
    from kvrelay.cluster.profiles.neighbours import slowdowns
    from kvrelay.cluster.profiles.step_loop import between_steps_s
    from kvrelay.engine.checkpoints.checkpoint import model_name, prepare_checkpoint

    engine, slowdown, between_s = _engine(settings), {}, 0.0
    try:
        sampler = StepSampler(engine, budget_s=budget_s, step_clock=step_clock_of(engine))
        fitted = fit_curve(sampler.run())
        threads, where = _num_threads(engine), _where(engine, settings)
        if num_workers > 1:
            slowdown = slowdowns(engine, settings, prepare_checkpoint(settings.model), num_workers)
        if not engine.looks_ahead:  # otherwise the device computes meanwhile
            between_s = between_steps_s(engine)
    finally:
        engine.close()
    profile = profile_of(
        engine, fitted, model=model_name(settings.model), num_threads=threads, date=time.strftime("%Y-%m-%d"),
        spread=sampler.spread(), between_s=between_s,
    )  # fmt: skip
    if slowdown:
        profile = profile.model_copy(update={"slowdown": slowdown, "workers_per_node": num_workers})
    file.write_text(profile.text())
    _show_fit(Console(), fitted, where, file, profile)


def _num_threads(engine: "Engine") -> int:
    """That compute; 0: none of the CPU's."""
    import torch

    return torch.get_num_threads() if engine.backend.device.type == "cpu" else 0


def _show_fit(console: Console, fitted: Fitted, where: str, file: Path, profile: SimulatorProfile) -> None:
    curve = fitted.curve
    console.print(where, highlight=False)
    table = Table(box=box.SIMPLE)
    for name in ("steps", "kinds of work", "median error", "p90"):
        table.add_column(name, justify="left" if name == "steps" else "right")
    for kind, error in fitted.errors.items():
        table.add_row(kind, f"{error.num_samples}", f"{error.median:.1%}", f"{error.p90:.1%}")
    console.print(table)
    console.print(
        f"a step: {_micro(curve.overhead_s)} µs + the longer of {_micro(curve.weights_s)} µs (weights) and "
        f"{1e6 * curve.token_s:.1f} µs a token + {1e9 * curve.pair_s:.2f} ns a pair in prompts + "
        f"{1e6 * curve.context_s:.3f} µs a token of context + {_micro(curve.sequence_s)} µs a sequence",
        highlight=False, soft_wrap=True,
    )  # fmt: skip
    between_s = profile.decode.overhead_s - curve.overhead_s
    console.print(
        f"between two steps a worker takes {_micro(between_s)} µs, which the file counts as part of each",
        highlight=False,
    )
    spread = profile.fit.spread if profile.fit is not None else None
    if spread is not None:
        told = f"steps of the same work differ: p90 is {spread:.1%} of the median above p10"
        is_busy = spread > BUSY_SPREAD
        console.print(
            told + (": [red]something else ran meanwhile[/], measure again" if is_busy else ""), highlight=False
        )
    for kind, ratios in profile.slowdown.items():
        times = ", ".join(f"{ratio:.2f} with {count}" for count, ratio in enumerate(ratios, 1) if count > 1)
        console.print(
            f"a {kind} step takes so many times as long: {times} workers that compute", highlight=False, soft_wrap=True
        )
    console.print(f"written to {file}", highlight=False, soft_wrap=True)


def _check_writable(file: Path | None, flag: str) -> None:
    """Before minutes of work. Raises ConfigError."""
    if file is not None and (file.is_dir() or not file.absolute().parent.is_dir()):
        raise ConfigError(f"{flag} {file}: the folder must be there, and the file is not to be a folder")


def _engine(settings: Settings) -> "Engine":
    """As a decode worker makes it. Raises ModelError, BackendUnavailable."""
    from kvrelay.cluster.profiles.neighbours import profiled_engine
    from kvrelay.engine.checkpoints.checkpoint import prepare_checkpoint

    return profiled_engine(settings, prepare_checkpoint(settings.model))


def _measure(
    engine: "Engine", profiler: Any, workloads: "list[StepWorkload]", *, with_flame: bool
) -> "tuple[list[StepProfile], list[dict[str, Any]]]":
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
            trees.append(tree_of(below(sampler.seconds, _SAMPLED_FUNCTION), name))

        profiler.sample(workload, rounds, sample)
    return profiles, trees


def _where(engine: "Engine", settings: Settings) -> str:
    from kvrelay.engine.checkpoints.checkpoint import model_name

    describe = getattr(engine.backend, "describe", None)
    facts = ", ".join(f"{name} {value}" for name, value in describe().items()) if describe else engine.backend.name
    return f"{model_name(settings.model)}, {engine.fingerprint.compute_dtype}, {facts}"


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
