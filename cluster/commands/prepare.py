"""`kvrelay prepare`: compiles what a model's workers would compile when they start."""

import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from kvrelay.errors import BackendUnavailable, ConfigError
from kvrelay.types import Role

if TYPE_CHECKING:
    from kvrelay.config import Settings
    from kvrelay.engine.compiling.building import BuildProgress
    from kvrelay.kernels.cuda.modules import KernelModule

logger = logging.getLogger(__name__)

FAILED = 1


def command(
    model: Annotated[
        str | None, typer.Argument(help="folder, GGUF file, hub id; default: SmolLM2-135M-Instruct")
    ] = None,
    arch: Annotated[
        list[str] | None,
        typer.Option(help="GPU architecture to compile for: 9.0a (H100, H200), 10.0a (B200); default: this machine's"),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="copy the compiled GPU modules there, for machines without a compiler")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file of settings; flags override it")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32, bfloat16, float16")] = None,
    kv_dtype: Annotated[
        str | None, typer.Option(help="auto (as --dtype), float32, bfloat16, float16, fp8_e4m3")
    ] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="any setting: section.key=value, repeatable")] = None,
) -> None:
    """Compile a model's kernels ahead of time, so that workers start at once. No GPU is needed."""
    from kvrelay.cluster.commands.settings_flags import settings_from_flags

    flags: dict[str, dict[str, Any]] = {"model": {"source": model, "dtype": dtype}, "engine": {"kv_dtype": kv_dtype}}
    settings = settings_from_flags(config, flags, set_ or [])
    console = Console()
    compile_cpu_kernels(console)
    failed = False
    if (why := why_no_gpu_kernels(settings, arch or [])) is not None:
        console.print(f"GPU kernels are left out: {why}", highlight=False, markup=False, soft_wrap=True)
        if output is not None:
            raise ConfigError(f"--output {output}: there is nothing to copy: {why}")
    else:
        modules = gpu_modules(settings)
        failed = compile_gpu_kernels(modules, console)
        if output is not None:
            console.print(copied(modules, output), highlight=False, soft_wrap=True)
    raise typer.Exit(FAILED if failed else 0)


# ---- kernels in C, for the CPU that compiles them


def _cpu_kernels() -> dict[str, Callable[[], object]]:
    """What loads each library, compiling it if need be; None where it cannot be compiled."""
    from kvrelay import hashing
    from kvrelay.kernels.cpu.native_kernels import NativeKernels
    from kvrelay.kvcache.memory.host import native_copies
    from kvrelay.kvcache.pool import ledger
    from kvrelay.kvcache.stores.codecs import native_codecs
    from kvrelay.kvtransfer.mover import mover

    return {
        "block hashes": hashing.hash_extension,
        "hash index": hashing.table_extension,
        "block pool": ledger.binder,
        "copies between tiers": native_copies,
        "KV codecs": native_codecs,
        "KV transfers": mover.library,
        "model kernels": lambda: NativeKernels(1),
    }


def compile_cpu_kernels(console: Console) -> None:
    """Raises BackendUnavailable: there is no C compiler, or it fails."""
    kernels = _cpu_kernels()
    with _bar(console, len(kernels)) as show:
        for index, (title, load) in enumerate(kernels.items()):
            show(index, len(kernels), f"CPU: {title}")
            if load() is None:
                raise BackendUnavailable(title, "a C compiler (cc, gcc or clang) and Python.h are needed")
        show(len(kernels), len(kernels), "CPU kernels")
    console.print(f"{len(kernels)} CPU libraries are there", highlight=False)


# ---- FlashInfer's modules


def why_no_gpu_kernels(settings: "Settings", archs: list[str]) -> str | None:
    """None: GPU kernels are compiled. Raises BackendUnavailable where they are asked for and cannot be."""
    import importlib.util

    import torch

    from kvrelay.kernels.cuda import jit

    jit.compile_for(archs)
    engines = [settings.for_role(role).engine for role in Role]
    lacks = [] if torch.version.cuda else [f"torch {torch.__version__} is built without CUDA"]
    if importlib.util.find_spec("flashinfer") is None:
        lacks.append("flashinfer is not installed")
    is_wanted = bool(archs) or any(one.backend == "cuda" or one.device.startswith("cuda") for one in engines)
    if lacks:
        why = f"{' and '.join(lacks)}; pip install '.[cuda]' brings what is missing"
    elif all(one.backend in ("cpu", "reference") or one.device == "cpu" for one in engines) and not archs:
        return "the settings use the CPU"
    elif not jit.has_processor():
        is_wanted, why = True, "this machine has no GPU to compile for: name its architecture, --arch 9.0a for an H100"
    else:
        return None
    if is_wanted:
        raise BackendUnavailable("cuda", why)
    return why


def gpu_modules(settings: "Settings") -> "list[KernelModule]":
    """Of both roles and the draft model. Raises ModelError, BackendUnavailable."""
    from kvrelay.engine.checkpoints.checkpoint import model_spec
    from kvrelay.engine.models.decoder import kernel_needs
    from kvrelay.kernels.cuda.modules import hopper_modules, kernel_modules
    from kvrelay.kvcache.memory.storage import DTYPES, KV_DTYPES

    found: dict[str, KernelModule] = {}
    for role in Role:
        own = settings.for_role(role)
        sources = [own.model.source]
        if role is Role.DECODE and own.engine.draft_source is not None:
            sources.append(own.engine.draft_source)
        for source in sources:
            needs = kernel_needs(
                model_spec(own.model.model_copy(update={"source": source})),
                DTYPES[own.model.compute_dtype],
                block_size=own.engine.block_size,
                kv_layout=own.engine.kv_layout,
                kv_dtype=KV_DTYPES[own.kv_dtype],
            )
            found |= {module.name: module for module in (*kernel_modules(needs), *hopper_modules(needs))}
    return list(found.values())


def compile_gpu_kernels(modules: "list[KernelModule]", console: Console) -> bool:
    """Compile what is not there; prints each failure. Returns whether there is any."""
    from kvrelay.engine.compiling.building import Build

    with _bar(console, 0) as show:

        def report(progress: "BuildProgress") -> None:
            show(*progress.files, f"GPU: {progress}")

        build = Build(modules, report)
        num_missing = build.num_modules
        failures = build.run()
    for module in modules:
        if module.name in failures:
            console.print(f"{module.title} ({module.name}) does not compile:", style="red", highlight=False)
            console.print(failures[module.name], highlight=False, markup=False, soft_wrap=True)
    console.print(
        f"{len(modules)} GPU modules: {len(modules) - num_missing} were there, {num_missing - len(failures)} are "
        f"compiled, {len(failures)} failed",
        highlight=False,
    )
    return bool(failures)


def copied(modules: "list[KernelModule]", folder: Path) -> str:
    """Copy each compiled library to folder/NAME/NAME.so; returns what to do with them."""
    libraries = [module.library for module in modules if module.library.exists()]
    for library in libraries:
        target = folder / library.stem / library.name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(library, target)
    megabytes = sum(library.stat().st_size for library in libraries) / 1e6
    return (
        f"copied {len(libraries)} modules ({megabytes:.1f} MB) to {folder}; in flashinfer/data/aot of an installation "
        "of the same version they are used without a compiler"
    )


@contextmanager
def _bar(console: Console, total: int) -> Iterator[Callable[[int, int, str], None]]:
    """Yields show(done, of, what); without a terminal it prints a line each time something is done."""
    columns = (SpinnerColumn(), BarColumn(bar_width=24), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        task = progress.add_task("", total=total or None)
        shown = -1

        def show(done: int, of: int, what: str) -> None:
            nonlocal shown
            progress.update(task, completed=done, total=of, description=what)
            if not console.is_terminal and done != shown:
                shown = done
                console.print(f"  {what}", highlight=False, markup=False, soft_wrap=True)

        yield show
