"""`kvrelay kv`: a prompt's KV into a file in one of LMCache's formats, and out of it. One engine, in this process."""

import enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from kvrelay.cluster.commands.settings_flags import settings_from_flags
from kvrelay.config import Settings
from kvrelay.errors import ConfigError

if TYPE_CHECKING:
    from kvrelay.engine.step.engine import Engine


class Action(enum.StrEnum):
    EXPORT = "export"
    IMPORT = "import"


def command(
    action: Annotated[
        Action, typer.Argument(help="export: compute a prompt, write its KV; import: read it, go on from it")
    ],
    file: Annotated[Path, typer.Argument(help="safetensors file")],
    prompt: Annotated[str | None, typer.Option(help="export: the prompt, or @FILE")] = None,
    fmt: Annotated[
        str | None,
        typer.Option("--format", help="export: KV_2LTD, KV_T2D, KV_2TD or KV_MLA_FMT; default: the whole prompt's"),
    ] = None,
    tokens: Annotated[int, typer.Option(min=0, help="import: how many tokens to generate after the prompt")] = 16,
    model: Annotated[str | None, typer.Option(help="folder, GGUF file, hub id; default: SmolLM2-135M-Instruct")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32, bfloat16, float16")] = None,
    kv_dtype: Annotated[
        str | None, typer.Option(help="auto (as --dtype), float32, bfloat16, float16, fp8_e4m3")
    ] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="any setting: section.key=value, repeatable")] = None,
) -> None:
    """Exchange KV with other programs: a prompt's keys and values in the formats that LMCache names."""
    from kvrelay.serve.text.tokenizer import Tokenizer

    flags: dict[str, dict[str, Any]] = {
        "model": {"source": model, "dtype": dtype, "max_model_len": None},
        "engine": {"kv_dtype": kv_dtype},
    }
    if action is Action.EXPORT and not prompt:
        raise ConfigError(
            "--prompt: say whose KV to export, for example --prompt 'Once upon a time' or --prompt @story.txt"
        )
    engine, folder = _engine(settings_from_flags(None, flags, set_ or []))
    console, tokenizer = Console(), Tokenizer(folder)
    if action is Action.EXPORT:
        assert prompt is not None
        console.print(_export(engine, tokenizer.encode(_text(prompt)), fmt, file), highlight=False, soft_wrap=True)
    else:
        console.print(_import(engine, file), highlight=False, soft_wrap=True)
        if tokens:
            print(tokenizer.decode(_continuation(engine, file, tokens)))


def _text(prompt: str) -> str:
    """The prompt, or the text of @FILE. Raises ConfigError."""
    if not prompt.startswith("@"):
        return prompt
    try:
        return Path(prompt[1:]).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompt {prompt}: {error}") from error


def _engine(settings: Settings) -> "tuple[Engine, Path]":
    """An engine for the settings, as a worker makes it, and its model's folder."""
    from kvrelay.cluster.launch.local import make_worker
    from kvrelay.engine.checkpoints.checkpoint import prepare_checkpoint
    from kvrelay.types import Role

    folder = prepare_checkpoint(settings.model)
    worker = make_worker(Role.DECODE, settings, folder, b"", "kv", None)
    return worker.build_engine(), folder


def _export(engine: "Engine", token_ids: list[int], fmt: str | None, file: Path) -> str:
    from kvrelay.engine.worker.kv_exchange import export_prompt, save
    from kvrelay.kvcache.memory.formats import KvFormat

    if fmt is not None and fmt not in KvFormat.__members__:
        raise ConfigError(f"--format {fmt}: choose from {', '.join(KvFormat)}")
    default = KvFormat.KV_MLA_FMT if engine.memory.layout.is_latent else KvFormat.KV_2LTD
    kv = export_prompt(engine, token_ids, KvFormat(fmt) if fmt else default)
    save(kv, file)
    first = next(iter(kv.tensors.values()))
    return f"{file}: {len(token_ids)} tokens as {kv.fmt}, {len(kv.tensors)} x {first.dtype} {list(first.shape)}"


def _import(engine: "Engine", file: Path) -> str:
    from kvrelay.engine.worker.kv_exchange import import_prompt, load

    kv = load(file)
    cached = import_prompt(engine, kv)
    return f"{file}: {len(kv.token_ids)} tokens as {kv.fmt}; {cached} of them, in full blocks, need no prefill"


def _continuation(engine: "Engine", file: Path, num_tokens: int) -> list[int]:
    """Greedy tokens after the file's prompt, whose last tokens (at least one) are computed here."""
    from kvrelay.engine.worker.kv_exchange import load
    from kvrelay.plane.messages import Sampling, SequenceRequest

    token_ids = load(file).token_ids
    sampling = Sampling(max_tokens=num_tokens, temperature=0.0)
    engine.add(SequenceRequest(
        request_id="continuation", token_ids=token_ids, num_prompt_tokens=len(token_ids), block_hashes=[],
        tokens_per_hash=engine.config.block_size, sampling=sampling,
    ))  # fmt: skip
    found: list[int] = []
    while engine.scheduler.has_work:
        for output in engine.step().outputs:
            found += output.token_ids
    return found
