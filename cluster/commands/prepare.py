"""`kvrelay prepare`: compiles what a model's workers would compile when they start."""

import importlib.util
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from kvrelay.errors import BackendUnavailable, ConfigError
from kvrelay.native import ahead
from kvrelay.native.build import NativeLibrary
from kvrelay.types import Role

if TYPE_CHECKING:
    from kvrelay.config import Settings
    from kvrelay.kernels.cuda.modules import KernelModule


def command(
    model: Annotated[str | None, typer.Argument(help="as serve's --model; of a folder config.json is read")] = None,
    arch: Annotated[list[str] | None, typer.Option(help="GPU to compile for: 9.0a (H100, H200), 10.0a (B200)")] = None,
    output: Annotated[Path | None, typer.Option(help="copy GPU modules there, for machines without a compiler")] = None,
    cpu: Annotated[
        list[str] | None,
        typer.Option(
            help="processors to compile for, not just this one: x86-64-v3, all; for an image without a compiler"
        ),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file of settings; flags override it")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="any setting: section.key=value, repeatable")] = None,
) -> None:
    """Compile a model's kernels ahead of time, so that workers start at once. No GPU is needed."""
    from kvrelay.cluster.commands.settings_flags import settings_from_flags

    settings, console = settings_from_flags(config, {"model": {"source": model}}, set_ or []), Console(soft_wrap=True)
    compile_cpu_kernels(console, cpu or [])
    if arch:
        if wrong := [one for one in arch if not re.fullmatch(r"(7\.5|[89]\.\d|1\d\.\d)[af]?", one)]:
            raise ConfigError(f"--arch {wrong[0]}: a compute capability from 7.5 on, such as 9.0a")
        os.environ["FLASHINFER_CUDA_ARCH_LIST"] = " ".join(arch)
    if (why := why_no_gpu_kernels(settings)) is not None:
        if output is not None or arch or settings.engine.backend == "cuda":
            raise BackendUnavailable("cuda", why)
        console.print(f"GPU kernels are left out: {why}", highlight=False, markup=False)
        return
    modules = gpu_modules(settings)
    is_whole = compile_gpu_kernels(modules, console)
    if output is not None:
        copy(modules, output)
        console.print(f"copied to {output}: for flashinfer/data/aot of an installation without a compiler")
    raise typer.Exit(0 if is_whole else 1)


def compile_cpu_kernels(console: Console, levels: Sequence[str] = ()) -> None:
    """Those in C: for this machine's processor, or for the processors of `levels`, which need not be this one.

    Raises BackendUnavailable: there is no C compiler, or it fails; ConfigError: a level that this machine's compiler
    does not know.
    """
    chosen = _levels(levels)
    libraries = cpu_libraries()
    with _bar(console) as show:
        for index, (title, library) in enumerate(libraries.items()):
            show(index, len(libraries), f"CPU: {title}")
            for level in chosen:
                library.compile_ahead(level)
            if not chosen:
                library.load()
    if chosen:
        names = ", ".join(level.name for level in chosen)
        console.print(f"{len(libraries)} CPU libraries for each of {names} are in {ahead.folder()}", soft_wrap=True)
    else:
        console.print(f"{len(libraries)} CPU libraries are there")


def cpu_libraries() -> dict[str, NativeLibrary]:
    """All that is written in C, by what it does."""
    from kvrelay import hashing
    from kvrelay.kernels.cpu import native_kernels
    from kvrelay.kvcache.memory import host
    from kvrelay.kvcache.pool import ledger
    from kvrelay.kvcache.stores import codecs
    from kvrelay.kvtransfer.mover import mover
    from kvrelay.router.policies import joint

    return {
        "block hashes": hashing.BLOCK_HASHES,
        "hash index": hashing.HASH_TABLE,
        "routing": joint.LIBRARY,
        "block pool": ledger.LIBRARY,
        "copies between tiers": host.LIBRARY,
        "KV codecs": codecs.LIBRARY,
        "KV transfers": mover.LIBRARY,
        "model kernels": native_kernels.LIBRARY,
    }


def _levels(names: Sequence[str]) -> list[ahead.CpuLevel]:
    known = {level.name: level for level in ahead.levels_of_machine()}
    if wrong := [name for name in names if name not in (*known, "all")]:
        raise ConfigError(f"--cpu {wrong[0]}: on this kind of machine all, or one of {', '.join(known) or 'none'}")
    return list(known.values()) if "all" in names else [known[name] for name in dict.fromkeys(names)]


def why_no_gpu_kernels(settings: "Settings") -> str | None:
    """None: they can be compiled here, as far as a compiler is not concerned."""
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA (pip install '.[cuda]' with a CUDA build of torch)"
    if importlib.util.find_spec("flashinfer") is None:
        return "flashinfer is not installed (pip install '.[cuda]')"
    engines = [settings.for_role(role).engine for role in Role]
    if all(engine.backend in ("cpu", "reference") or engine.device == "cpu" for engine in engines):
        return "the settings choose the CPU"
    if "FLASHINFER_CUDA_ARCH_LIST" not in os.environ and not torch.cuda.is_available():
        return "this machine has no GPU to compile for: name one's architecture, such as --arch 9.0a for an H100"
    return None


def gpu_modules(settings: "Settings") -> "list[KernelModule]":
    """Of both roles and the draft model. Raises ModelError."""
    from kvrelay.cluster.compiling.kernels import needs_of
    from kvrelay.engine.checkpoints.checkpoint import prepare_checkpoint
    from kvrelay.engine.models.spec import ModelSpec
    from kvrelay.kernels.cuda.modules import kernel_modules
    from kvrelay.settings.engine import ModelSettings

    def spec(model: ModelSettings) -> ModelSpec:
        folder = Path(model.source).expanduser()
        return ModelSpec.from_folder(folder if (folder / "config.json").exists() else prepare_checkpoint(model))

    source = settings.engine.draft_source
    specs = (spec(settings.model), None if source is None else spec(ModelSettings(source=source)))
    return kernel_modules(*(needs for role in Role for needs in needs_of(settings.for_role(role), *specs)))


def compile_gpu_kernels(modules: "list[KernelModule]", console: Console) -> bool:
    """Compile what is not there; prints each failure. Whether there is none."""
    from kvrelay.cluster.compiling.kernels import Build

    with _bar(console) as show:
        build = Build(modules, lambda done, of, what: show(done, of, f"GPU: {what}"))
        failures = build.run()
    for why in dict.fromkeys(failures.values()):
        titles = ", ".join(f"{one.title} ({one.name})" for one in modules if failures.get(one.name) == why)
        console.print(f"not compiled: {titles}:\n{why}", style="red", highlight=False, markup=False)
    counts = len(modules) - build.num_modules, build.num_modules - len(failures), len(failures)
    console.print("{} GPU modules were there, {} are compiled, {} failed".format(*counts))
    return not failures


def copy(modules: "list[KernelModule]", folder: Path) -> None:
    """Each compiled library as folder/NAME/NAME.so."""
    for library in (module.library for module in modules if module.library.exists()):
        (folder / library.stem).mkdir(parents=True, exist_ok=True)
        shutil.copyfile(library, folder / library.stem / library.name)


@contextmanager
def _bar(console: Console) -> Iterator[Callable[[int, int, str], None]]:
    """Yields show(done, of, what); without a terminal it prints a line each time something is done."""
    columns = (SpinnerColumn(), BarColumn(bar_width=24), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        task, shown = progress.add_task("", total=None), -1

        def show(done: int, of: int, what: str) -> None:
            nonlocal shown
            progress.update(task, completed=done, total=of, description=what)
            if not console.is_terminal and done != shown:
                shown = done
                console.print(f"  {what}", highlight=False, markup=False)

        yield show
