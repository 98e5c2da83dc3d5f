"""`kvrelay kv`: writes a prompt's KV to a file in one of LMCache's formats, or reads one.

One engine, in this process.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console

from kvrelay.errors import ConfigError

if TYPE_CHECKING:
    from kvrelay.config import Settings
    from kvrelay.engine.step.engine import Engine
    from kvrelay.engine.worker.kv_exchange import PromptKv
    from kvrelay.kvcache.memory.formats import KvFormat


def command(
    action: Annotated[
        Literal["export", "import"],
        typer.Argument(help="export: compute a prompt and write its KV; import: read KV and continue from it"),
    ],
    file: Annotated[Path, typer.Argument(help="safetensors file")],
    prompt: Annotated[str | None, typer.Option(help="export: the prompt, or @FILE")] = None,
    fmt: Annotated[
        str | None,
        typer.Option(
            "--format", help="export: KV_2LTD, KV_T2D, KV_2TD or KV_MLA_FMT; default: one tensor for all layers"
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(min=0, help="import: tokens to generate after the prompt")] = 16,
    model: Annotated[str | None, typer.Option(help="folder, GGUF file, hub id; default: SmolLM2-135M-Instruct")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32, bfloat16, float16")] = None,
    kv_dtype: Annotated[
        str | None, typer.Option(help="auto (as --dtype), float32, bfloat16, float16, fp8_e4m3")
    ] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="any setting: section.key=value, repeatable")] = None,
) -> None:
    """Exchange KV with other programs: a prompt's keys and values in the formats that LMCache names."""
    from kvrelay.cluster.commands.settings_flags import settings_from_flags

    flags: dict[str, dict[str, Any]] = {"model": {"source": model, "dtype": dtype}, "engine": {"kv_dtype": kv_dtype}}
    settings = settings_from_flags(None, flags, set_ or [])
    if action == "export":
        line = _export(settings, _prompt_text(prompt), _format(fmt), _writable(file))
        Console().print(line, highlight=False, soft_wrap=True)
    else:
        _import(settings, file, tokens)


def _prompt_text(prompt: str | None) -> str:
    """The prompt, or the text of @FILE. Raises ConfigError."""
    if not prompt:
        raise ConfigError("export needs a prompt, for example --prompt 'Once upon a time' or --prompt @story.txt")
    if not prompt.startswith("@"):
        return prompt
    try:
        return Path(prompt[1:]).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompt {prompt}: {error}") from error


def _format(name: str | None) -> "KvFormat | None":
    """Raises ConfigError naming the formats."""
    from kvrelay.kvcache.memory.formats import KvFormat

    if name is not None and name not in KvFormat.__members__:
        raise ConfigError(f"--format {name}: choose from {', '.join(KvFormat)}")
    return KvFormat(name) if name is not None else None


def _writable(file: Path) -> Path:
    """The file, checked before a model is loaded. Raises ConfigError."""
    if file.is_dir() or not file.absolute().parent.is_dir():
        raise ConfigError(f"{file}: the folder must exist, and the path must name a file")
    return file


def _engine(settings: "Settings") -> "tuple[Engine, Path]":
    """An engine as a decode worker builds it, and its model's folder."""
    from kvrelay.cluster.launch.local import make_worker
    from kvrelay.engine.checkpoints.checkpoint import prepare_checkpoint
    from kvrelay.types import Role

    folder = prepare_checkpoint(settings.model)
    worker = make_worker(Role.DECODE, settings, folder, b"", "kv", None)
    return worker.build_engine(), folder


def _export(settings: "Settings", text: str, fmt: "KvFormat | None", file: Path) -> str:
    """Compute the prompt and write its KV; a line that says what was written."""
    from kvrelay.engine.worker.kv_exchange import export_prompt, save
    from kvrelay.kvcache.memory.formats import KvFormat
    from kvrelay.serve.text.tokenizer import Tokenizer

    engine, folder = _engine(settings)
    token_ids = Tokenizer(folder).encode(text)
    default = KvFormat.KV_MLA_FMT if engine.cache.memory.layout.is_latent else KvFormat.KV_2LTD
    kv = export_prompt(engine, token_ids, fmt or default)
    save(kv, file)
    first = next(iter(kv.tensors.values()))
    return f"{file}: {len(token_ids)} tokens as {kv.fmt}, {len(kv.tensors)} x {first.dtype} {list(first.shape)}"


def _import(settings: "Settings", file: Path, num_tokens: int) -> None:
    """Read the file before the model is loaded; print what it holds and a continuation of its prompt."""
    from kvrelay.engine.worker.kv_exchange import import_prompt, load
    from kvrelay.serve.text.tokenizer import Tokenizer

    if not file.is_file():
        raise ConfigError(f"{file}: no such file; `kvrelay kv export` writes one")
    kv = load(file)
    engine, folder = _engine(settings)
    cached = import_prompt(engine, kv)
    line = f"{file}: {len(kv.token_ids)} tokens as {kv.fmt}; {cached} of them, in full blocks, need no prefill"
    Console().print(line, highlight=False, soft_wrap=True)
    if num_tokens:
        print(Tokenizer(folder).decode(_continuation(engine, kv, num_tokens)))


def _continuation(engine: "Engine", kv: "PromptKv", num_tokens: int) -> list[int]:
    """Greedy tokens after the prompt, whose last partial block (at least one token) is computed here."""
    from kvrelay.plane.messages import Sampling, SequenceRequest

    engine.add(
        SequenceRequest(
            request_id="continuation",
            token_ids=kv.token_ids,
            num_prompt_tokens=len(kv.token_ids),
            block_hashes=[],
            tokens_per_hash=engine.config.block_size,
            sampling=Sampling(max_tokens=num_tokens, temperature=0.0),
        )
    )
    found: list[int] = []
    while engine.scheduler.has_work:
        for output in engine.step().outputs:
            found += output.token_ids
    return found
