"""The command `kvrelay`: its flags and exit codes.

Each command's work is in a module of its own, imported when it runs.
"""

import importlib
import os
import sys
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from rich.console import Console
from rich.markup import escape

from kvrelay import __version__
from kvrelay.cluster.launch.concealment import conceal
from kvrelay.environment import LOG_LEVEL_VARIABLE, LOG_LEVELS
from kvrelay.errors import ConfigError, KvrelayError
from kvrelay.settings.choices import BackendName, ChecksMode, Dtype, KvDtype, Quantization, TransportName

USAGE_ERROR = 2  # a wrong flag or setting
FAILED = 1
INTERRUPTED = 130

_LAZY = {  # command -> module and function, and its summary
    "deploy": ("cluster.commands.deploy:command", "Deploy a Serve file on any Ray cluster, and wait until it answers."),
    "status": ("cluster.commands.status:status", "Show the workers, their load and KV pools, and how KV travels."),
    "doctor": ("cluster.commands.doctor:doctor", "Show between which workers KV can travel, and what to change."),
    "scale": ("cluster.commands.status:scale", "Change how many workers run, without restarting the others."),
    "role": ("cluster.commands.status:role", "Change a worker's role in place: prefill, decode or both."),
    "rotate": ("cluster.commands.status:rotate", "Give the cluster's TLS a new authority; the old one ends."),
    "verify": ("cluster.verify.cli:command", "Compare the tokens of every serving path with Hugging Face generate."),
    "prepare": ("cluster.commands.prepare:command", "Compile a model's kernels ahead of time; needs no GPU."),
    "models": ("cluster.commands.models:command", "List the cache of converted models, or clear it."),
    "keys": ("cluster.tenants.cli:command", "Add API keys of tenants to a file, list and remove them."),
    "kv": ("cluster.commands.kv:command", "Write a prompt's KV to a file, or continue from such a file."),
    "profile": ("cluster.commands.profile:command", "Profile engine steps with torch, or measure a speed profile."),
    "trace": ("cluster.commands.trace:command", "Write a workload as a trace file, or summarise it."),
    "simulate": ("cluster.commands.simulate:command", "Simulate a cluster of any size under a workload."),
    "plan": ("cluster.commands.plan:command", "Compute how many prefill and decode workers a workload needs."),
    "dashboards": ("cluster.commands.dashboards:command", "Write Grafana dashboards and Prometheus alert rules."),
    "bench": ("cluster.loadgen.cli:command", "Load an OpenAI server; report latency and throughput."),
    "chaos": ("cluster.chaos.cli:command", "Kill, stop and damage parts of a cluster of its own; check every token."),
}

app = typer.Typer(
    name="kvrelay",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
console = Console()
_ClickException: Any = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")


def _choices(kind: Any) -> str:
    return ", ".join(map(str, get_args(kind)))


def _print_version(is_asked: bool) -> None:
    if is_asked:
        print(__version__)
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", help="print the version", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """LLM serving on Ray with prefill and decode on separate workers."""


@app.command()
def serve(
    config: Annotated[Path | None, typer.Option(help="YAML file of settings; flags override it")] = None,
    model: Annotated[str | None, typer.Option(help="folder, GGUF file, hub id; default: SmolLM2-135M-Instruct")] = None,
    prefill: Annotated[int | None, typer.Option(help="prefill workers; 0: all compute prompts and decode")] = None,
    decode: Annotated[int | None, typer.Option(help="decode workers")] = None,
    ingress: Annotated[int | None, typer.Option(help="ingresses; several share the port")] = None,
    host: Annotated[str | None, typer.Option(help="address to listen on")] = None,
    port: Annotated[int | None, typer.Option(help="port of the API")] = None,
    dashboard_port: Annotated[
        int | None, typer.Option(help="port of Ray's dashboard; another when it is taken")
    ] = None,
    transport: Annotated[str | None, typer.Option(help=f"how KV travels: {_choices(TransportName)}")] = None,
    dtype: Annotated[str | None, typer.Option(help=_choices(Dtype))] = None,
    quantization: Annotated[str | None, typer.Option(help=f"weights as integers: {_choices(Quantization)}")] = None,
    kv_memory: Annotated[
        str | None, typer.Option(help="KV pool of each worker: a size (512MiB) or a share of the free memory (50%)")
    ] = None,
    kv_dtype: Annotated[str | None, typer.Option(help=f"type of KV: {_choices(KvDtype)}; auto: as --dtype")] = None,
    max_model_len: Annotated[int | None, typer.Option(help="longest prompt plus output, tokens")] = None,
    draft_model: Annotated[
        str | None, typer.Option(help="small model with the same vocabulary that drafts tokens; same forms as --model")
    ] = None,
    backend: Annotated[str | None, typer.Option(help=f"kernels: {_choices(BackendName)}")] = None,
    checks: Annotated[str | None, typer.Option(help=f"checksums of transferred KV: {_choices(ChecksMode)}")] = None,
    served_name: Annotated[str | None, typer.Option(help="the model's name in the API")] = None,
    chat_template: Annotated[str | None, typer.Option(help="Jinja file; default: the model's own template")] = None,
    api_key: Annotated[str | None, typer.Option(help="clients must send this key; default: $KVRELAY_API_KEY")] = None,
    cores_per_worker: Annotated[int | None, typer.Option(help="CPU cores each worker is pinned to")] = None,
    log_level: Annotated[
        str | None, typer.Option(help=f"messages shown: {', '.join(LOG_LEVELS)}; info includes each request")
    ] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="any setting: section.key=value, repeatable")] = None,
) -> None:
    """Start a cluster on this machine and serve until Ctrl-C."""
    if log_level is not None:
        if log_level.lower() not in LOG_LEVELS:
            raise ConfigError(f"--log-level {log_level}: must be one of {', '.join(LOG_LEVELS)}")
        os.environ[LOG_LEVEL_VARIABLE] = log_level  # the cluster's processes inherit it
    from kvrelay.cluster.commands.serve import serve as run
    from kvrelay.cluster.commands.settings_flags import settings_from_flags

    flags: dict[str, dict[str, Any]] = {
        "model": {
            "source": model,
            "dtype": dtype,
            "max_model_len": max_model_len,
            "served_name": served_name,
            "quantization": quantization,
            "chat_template": chat_template,
        },
        "engine": {"kv_memory": kv_memory, "kv_dtype": kv_dtype, "backend": backend, "draft_model": draft_model},
        "transfer": {"transport": transport, "checks": checks},
        "serve": {"host": host, "port": port, "api_key": api_key},
        "cluster": {
            "prefill": prefill,
            "decode": decode,
            "ingress": ingress,
            "dashboard_port": dashboard_port,
            "cores_per_worker": cores_per_worker,
        },
    }
    raise typer.Exit(run(settings_from_flags(config, flags, set_ or []), console))


@app.command()
def version() -> None:
    """Print the version."""
    print(__version__)


def _add_lazy_commands(arguments: list[str]) -> None:
    """Import a heavy command only when it is the one to run; list the others by name."""
    wanted = _command(arguments)
    for name, (place, summary) in _LAZY.items():
        if name == wanted:
            module, _, function = place.partition(":")
            app.command(name)(getattr(importlib.import_module(f"kvrelay.{module}"), function))
        else:
            app.command(name, help=summary)(_placeholder)


def _command(arguments: list[str]) -> str | None:
    return next((argument for argument in arguments if not argument.startswith("-")), None)


def _print_from_supervisor(line: str) -> None:
    """Print a line after the driver has ended, perhaps in the middle of a progress bar."""
    console.print(line, highlight=False)
    console.show_cursor(True)


def _placeholder() -> None:
    raise AssertionError("the real command replaces this before it runs")


def main() -> None:
    """The console script."""
    arguments = sys.argv[1:]
    conceal(arguments)
    if _command(arguments) == "serve":
        from kvrelay.cluster.launch.supervisor import supervise

        supervise(_print_from_supervisor)
    sys.exit(run(arguments))


def run(arguments: list[str]) -> int:
    """Run one command; return its exit status. A known error prints one line and no traceback."""
    _add_lazy_commands(arguments)
    try:
        return int(app(args=arguments, standalone_mode=False) or 0)
    except ConfigError as error:
        return _print_error(str(error), USAGE_ERROR)
    except KvrelayError as error:
        return _print_error(str(error), FAILED)
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except _ClickException as error:
        if "\n" in error.format_message():  # no command: the message is the help
            error.show()
            return USAGE_ERROR
        return _print_error(error.format_message(), USAGE_ERROR)


def _print_error(message: str, status_code: int) -> int:
    Console(stderr=True).print(f"[red]kvrelay:[/red] {escape(message)}", highlight=False, soft_wrap=True)
    return status_code


if __name__ == "__main__":
    main()
