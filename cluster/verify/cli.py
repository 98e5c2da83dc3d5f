"""`kvrelay verify`: every path on which a prompt can be served gives Hugging Face's tokens, or fails visibly.

Runs real worker processes on this machine. Negative controls damage KV on purpose: with checks on it must be refused,
with checks off it must change the answer, so that the comparison itself is shown to work.

In a 16-bit dtype, log-probabilities of a fixed text are compared with Hugging Face (dtypes.py), and the tokens of every
path with those of one worker. Heavy modules are imported when the command runs: `--help` is fast.
"""

import asyncio
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import asdict
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryDirectory, mkdtemp
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from kvrelay.errors import BackendUnavailable, KvrelayError

if TYPE_CHECKING:
    from kvrelay.cluster.verify.rows import Setup
    from kvrelay.cluster.verify.verifier import RowResult, Verifier, VerifyReport
    from kvrelay.types import KvMemory

DTYPES = ("float32", "bfloat16", "float16")
TRANSPORTS = ("shm", "tcp", "cuda_ipc", "nixl")
LATENT_FAMILY = "deepseek_v3"
QUICK = ("1 token", "one block", "block + 1", "several chunks", "shared prefix 0", "shared prefix 1", "Chinese")


def pool_memory(backend: str, device: str) -> "KvMemory":
    """A pool of a few bytes where a worker with this kernel backend has its own. Raises BackendUnavailable."""
    from kvrelay.cluster.verify.prompts import BLOCK_SIZE
    from kvrelay.kernels.select import select_backend
    from kvrelay.kvcache.memory.storage import KvStorage
    from kvrelay.types import KvLayout

    layout = KvLayout(num_layers=1, num_blocks=2, block_size=BLOCK_SIZE, num_kv_heads=1, head_dim=16, dtype="float32")
    return KvStorage(layout, select_backend(backend, device, num_threads=1).device).memory  # type: ignore[arg-type]


def usable_transports(named: Sequence[str] | None, memory: "KvMemory") -> tuple[list[str], dict[str, str]]:
    """(transports to verify over, those left out and why), by the rules that a worker with such a pool follows.

    Raises BackendUnavailable: one that was named cannot be used, or none can.
    """
    from kvrelay.kvtransfer.paths.selection import TRANSPORTS as ALL_TRANSPORTS
    from kvrelay.kvtransfer.paths.selection import offered

    chosen: list[str] = []
    left_out: dict[str, str] = {}
    for name in named or TRANSPORTS:
        try:
            chosen += offered(name, memory, ALL_TRANSPORTS)
        except BackendUnavailable as error:
            if named:
                raise
            left_out[name] = error.why
    if not chosen:
        raise BackendUnavailable("KV transport", "; ".join(f"{name}: {why}" for name, why in left_out.items()))
    return chosen, left_out


def command(
    model: Annotated[str | None, typer.Option(help="Folder, GGUF file or hub id; default: the built-in model.")] = None,
    transport: Annotated[
        list[str] | None,
        typer.Option(help=f"{', '.join(TRANSPORTS)}; repeatable; default: all that the device's pool can use."),
    ] = None,
    max_model_len: Annotated[int, typer.Option(min=192, help="Context limit to verify up to, tokens.")] = 512,
    tokens: Annotated[int, typer.Option(min=2, max=256, help="Tokens generated for each prompt.")] = 16,
    family: Annotated[
        list[str] | None, typer.Option(help="Instead of a model, tiny random weights of a family, or 'all' of them.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:<n>; a named one: in bfloat16.")] = "auto",
    backend: Annotated[str, typer.Option(help="Kernel backend: auto, cpu, reference, cuda.")] = "auto",
    dtype: Annotated[
        str | None, typer.Option(help="float32 (the default without --device), bfloat16 or float16: of the model.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the report there, row by row.")] = None,
    is_all: Annotated[bool, typer.Option("--all/--quick", help="Every row, or one transport's paths.")] = False,
) -> None:
    """Compare every path's tokens with Hugging Face's. Exit code 1 on any difference.

    In 16 bits (--device cuda, --dtype bfloat16): log-probabilities and tokens of every kind of step and path with those
    of the reference backend on the same device, over 384 tokens at least.
    """
    console = Console()
    dtype = dtype or ("float32" if device == "auto" else "bfloat16")
    for what, name, known in [("dtype", dtype, DTYPES), *(("transport", one, TRANSPORTS) for one in transport or ())]:
        if name not in known:
            console.print(f"unknown {what} {name!r}; choose from {', '.join(known)}", style="red")
            raise typer.Exit(2)
    from kvrelay.cluster.verify.rows import run_setup
    from kvrelay.cluster.verify.verifier import Verifier, VerifyReport, print_summary, row_printer

    if dtype != "float32":
        max_model_len, tokens = max(max_model_len, 384), max(tokens, 8)  # for a prefix of 256 tokens, damage after 4
    reports: list[VerifyReport] = []

    def ended(*row: Any) -> None:
        show(*row)
        if json_file is not None:
            json_file.write_text(json.dumps([{**asdict(report), "ok": report.ok} for report in reports], indent=1))

    try:
        memory = pool_memory(backend, device)
        chosen, left_out = usable_transports(transport, memory)
        with console.status("preparing the model") as status, TemporaryDirectory() as scratch:
            for folder in _folders(model, family, Path(scratch), status.update, is_wide=dtype != "float32"):
                verifier = Verifier(folder, max_model_len, tokens, backend, dtype, device, progress=status.update)
                verifier.report.device, verifier.report.left_out = memory.device, dict(left_out)
                if dtype == "float32" and memory.device != "cpu":
                    verifier.report.left_out["FlashInfer's kernels"] = "they compute in 16 bits: --device cuda"
                own = Path(mkdtemp(dir=scratch))
                if is_all:
                    setups = all_setups(verifier, chosen, own, is_random=bool(family), is_first=not reports)
                else:
                    setups = quick_setups(verifier, chosen[0], own)
                    verifier.report.left_out["everything else"] = "kvrelay verify --all"
                reports.append(verifier.report)
                show = row_printer(verifier.report, sum(setup.num_rows for _, setup in setups), console)
                with workers_log(console, verifier.report):
                    for one, setup in setups:
                        one.on_row = ended
                        asyncio.run(run_setup(one, setup))
                print_summary(verifier.report, console)
    except KvrelayError as error:
        console.print(f"[red]{type(error).__name__}[/]: {error}")
        raise typer.Exit(1) from None
    if not all(report.ok for report in reports):
        raise typer.Exit(1)


@contextmanager
def workers_log(console: Console, report: "VerifyReport") -> Iterator[None]:
    """Send standard error, ours and the workers', to a file: negative controls make them log errors.

    The file is named and kept after an error, or a row of the report that is not ok.
    """
    with NamedTemporaryFile("w", prefix="kvrelay-verify-", suffix=".log", delete=False) as log, redirect_stderr(log):
        before, is_kept = os.dup(2), True
        os.dup2(log.fileno(), 2)
        try:
            yield
            is_kept = not report.ok
        finally:
            os.dup2(before, 2)
            os.close(before)
            if is_kept:
                console.print(f"the workers' log: {log.name}", highlight=False, soft_wrap=True)
            else:
                os.unlink(log.name)


def kernels(verifier: "Verifier") -> "Setup":
    """The row about the backend's kernels: each against its definition, over the grid of shapes."""
    import torch

    from kvrelay.cluster.verify.rows import OwnRows, Setup
    from kvrelay.kernels.oracle.grid import FAMILIES, judge
    from kvrelay.kernels.select import select_backend

    async def serve(verifier: "Verifier", cluster: None, row: "RowResult") -> None:
        backend = select_backend(verifier.backend, verifier.device, num_threads=1)  # type: ignore[arg-type]
        num_cases = 0
        for family in FAMILIES:
            verifier.progress(f"kernels: {family}")
            worst = await asyncio.to_thread(judge, family, backend, getattr(torch, verifier.dtype))
            num_cases += worst.num_cases
            holds = worst.ok or worst.num_cases == 0
            row.check("" if holds else f"{family}, {worst.case}: {worst.ratio:.3g} of its bound", holds=holds)
        row.note = row.note or f"{num_cases} cases"

    name = f"kernels in {verifier.dtype} within rounding of their definitions"
    return Setup("kernels", (OwnRows((name,), serve),), transport=None)


def quick_setups(verifier: "Verifier", transport: str, scratch: Path) -> "list[tuple[Verifier, Setup]]":
    """The paths of one transport, with their controls, for some of the prompts."""
    from kvrelay.cluster.verify import constrained, parity, suites

    if verifier.dtype != "float32":
        return parity.setups(verifier, [transport], scratch)

    constrained_setups = constrained.quick(verifier, transport)
    verifier.prompts = [prompt for prompt in verifier.prompts if prompt.name in QUICK]
    verifier.report.prompts = [prompt.name for prompt in verifier.prompts]
    return [(verifier, setup) for setup in (*suites.paths([transport]), *constrained_setups)]


def all_setups(
    verifier: "Verifier", transports: Sequence[str], scratch: Path, *, is_random: bool, is_first: bool
) -> "list[tuple[Verifier, Setup]]":
    """Every row that has a meaning in the verifier's dtype, and which verifier serves it.

    is_random: the model's weights are noise. is_first: no model before it has shown what is the same for all.
    """
    from kvrelay.cluster.verify import constrained, moves, parity, suites
    from kvrelay.cluster.verify.dtypes import FP8_KV, OF_RANDOM_WEIGHTS, WEIGHTS, near
    from kvrelay.cluster.verify.groups import groups

    first, is_float32, setups = transports[0], verifier.dtype == "float32", list["Setup"]()
    served, is_on_host = list[tuple["Verifier", "Setup"]](), verifier.report.device == "cpu"
    if is_first and is_on_host:
        served.append((verifier, kernels(verifier)))
    elif not is_on_host:
        verifier.report.left_out["kernels against their definitions"] = "bench/gpu/gpu.py, section kernels"
    if not is_float32:
        served += parity.setups(verifier, transports, scratch, is_all=True, is_first=is_first)
        if not parity.stands_alone(verifier):
            why = "with these kernels a row's bits depend on its batch, so tokens may differ where two are close"
            verifier.report.left_out["tokens of every path"] = why
            return served
    setups += suites.paths(transports)
    if is_float32:
        setups += near(first, FP8_KV)
        slack = OF_RANDOM_WEIGHTS if is_random else 1.0
        setups += [setup for variant in WEIGHTS for setup in near(first, variant, slack=slack)]
        setups += groups(first)
        setups += constrained.constrained(verifier, first)
    setups += suites.tiers(scratch, verifier.kv_bytes)
    setups += suites.preemption(first)
    setups += moves.moves(first)
    for suite in (suites.queue_order, suites.mixed_batches, suites.cascade, suites.speculation):
        setups += suite(verifier, first)
    served += [(verifier, setup) for setup in setups]
    if is_float32 and not is_random:
        tiny = verifier.of_family(LATENT_FAMILY, scratch / "tiny-latent")
        served += [(tiny, setup) for setup in suites.latent(tiny, first)]
    return served


def _folders(
    model: str | None, families: list[str] | None, scratch: Path, progress: Callable[[str], None], *, is_wide: bool
) -> Iterator[Path]:
    """The checkpoint folders to verify, one after the other. is_wide: see tiny_model."""
    from kvrelay.cluster.verify.verifier import tiny_model
    from kvrelay.engine.checkpoints.checkpoint import prepare_checkpoint
    from kvrelay.engine.checkpoints.tiny import TINY_CONFIGS
    from kvrelay.settings.engine import ModelSettings

    if not families:
        settings = ModelSettings(source=model) if model else ModelSettings()
        yield prepare_checkpoint(settings, lambda what, share: progress(f"{what} {share:.0%}"))
        return
    for name in TINY_CONFIGS if "all" in families else (family.replace("-", "_") for family in families):
        yield tiny_model(name, scratch / f"tiny-{name}", is_wide=is_wide)
