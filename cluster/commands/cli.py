"""The command `kvrelay`. Owns flags and exit codes; what the commands do is in their own modules, imported lazily."""

import difflib
import importlib
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from kvrelay import __version__
from kvrelay.errors import ConfigError, KvrelayError

USAGE_ERROR = 2  # a wrong flag or setting
FAILED = 1

_LAZY = {  # command -> module and what its `command` function does
    "verify": ("kvrelay.cluster.verify.cli", "Compare every path's tokens with Hugging Face generate."),
    "kv": ("kvrelay.cluster.commands.kv", "Write a prompt's KV to a file, or read one and go on from it."),
    "profile": ("kvrelay.cluster.commands.profile", "Measure what a step of the engine costs outside its kernels."),
    "trace": ("kvrelay.cluster.commands.trace", "Write a load as a trace file, or say what it is like."),
    "simulate": ("kvrelay.cluster.commands.simulate", "Simulate a cluster of any size under a load."),
    "plan": ("kvrelay.cluster.commands.plan", "Say how many prefill and decode workers a load needs, or none."),
    "bench": ("kvrelay.cluster.loadgen.cli", "Load an OpenAI server and report latency and throughput."),
}

app = typer.Typer(
    name="kvrelay", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
    help="LLM serving on Ray with prefill and decode on separate workers.",
    context_settings={"help_option_names": ["-h", "--help"]},
)  # fmt: skip
console = Console()
_UsageProblem: Any = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")


@app.command()
def serve(
    config: Annotated[Path | None, typer.Option(help="YAML file of settings; flags win over it")] = None,
    model: Annotated[str | None, typer.Option(help="folder, GGUF file, hub id; default: SmolLM2-135M-Instruct")] = None,
    prefill: Annotated[int | None, typer.Option(help="prefill workers; 0 serves aggregated")] = None,
    decode: Annotated[int | None, typer.Option(help="decode workers")] = None,
    ingress: Annotated[int | None, typer.Option(help="ingresses, at consecutive ports")] = None,
    host: Annotated[str | None, typer.Option(help="address to listen at")] = None,
    port: Annotated[int | None, typer.Option(help="port of the API")] = None,
    dashboard_port: Annotated[int | None, typer.Option(help="port of Ray's dashboard; another when taken")] = None,
    transport: Annotated[str | None, typer.Option(help="how KV travels: auto, nixl, shm, tcp")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32, bfloat16, float16")] = None,
    quantization: Annotated[str | None, typer.Option(help="weights as integers: none, int8, int4")] = None,
    kv_memory: Annotated[
        str | None, typer.Option(help="KV pool of each worker: 512MiB, or a share of the free memory: 50%")
    ] = None,
    kv_dtype: Annotated[
        str | None, typer.Option(help="auto (as --dtype), float32, bfloat16, float16, fp8_e4m3")
    ] = None,
    max_model_len: Annotated[int | None, typer.Option(help="longest prompt and output, tokens")] = None,
    draft_model: Annotated[
        str | None, typer.Option(help="small model of the same vocabulary that drafts tokens: as --model")
    ] = None,
    backend: Annotated[str | None, typer.Option(help="kernels: auto, reference, cpu, cuda")] = None,
    checks: Annotated[str | None, typer.Option(help="checksums on transferred blocks: full, off")] = None,
    served_name: Annotated[str | None, typer.Option(help="the model's name in the API")] = None,
    api_key: Annotated[str | None, typer.Option(help="clients must send this; unseen by ps: $KVRELAY_API_KEY")] = None,
    cores_per_worker: Annotated[int | None, typer.Option(help="CPU cores each worker is pinned to")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="any setting: section.key=value, repeatable")] = None,
) -> None:
    """Start a cluster on this machine and serve until Ctrl-C."""
    from kvrelay.cluster.commands.serve import serve as run
    from kvrelay.cluster.commands.settings_flags import settings_from_flags

    flags: dict[str, dict[str, Any]] = {
        "model": {"source": model, "dtype": dtype, "max_model_len": max_model_len, "served_name": served_name,
                  "quantization": quantization},
        "engine": {"kv_memory": kv_memory, "kv_dtype": kv_dtype, "backend": backend, "draft_model": draft_model},
        "transfer": {"transport": transport, "checks": checks},
        "serve": {"host": host, "port": port, "api_key": api_key},
        "cluster": {"prefill": prefill, "decode": decode, "ingress": ingress, "dashboard_port": dashboard_port,
                    "cores_per_worker": cores_per_worker},
    }  # fmt: skip
    raise typer.Exit(run(settings_from_flags(config, flags, set_ or []), console))


Url = Annotated[str | None, typer.Option(help="the API's root; default: this machine's newest cluster")]
Dashboard = Annotated[str | None, typer.Option(help="the Ray dashboard's root; default: as --url")]
ApiKey = Annotated[str | None, typer.Option(help="when the cluster was started with one; default: $KVRELAY_API_KEY")]


@app.command()
def status(
    url: Url = None,
    dashboard: Dashboard = None,
    api_key: ApiKey = None,
    as_json: Annotated[bool, typer.Option("--json", help="for programs")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="live, until Ctrl-C; with --json a line each second")] = False,
) -> None:
    """Show workers, their load, their KV pools, and how KV travels."""
    from kvrelay.cluster.commands import status as status_command
    from kvrelay.cluster.launch.endpoints import endpoints
    from kvrelay.environment import environment_api_key

    api_key = api_key or environment_api_key()
    api_url, dashboard_url = endpoints(url, dashboard)
    if watch:
        from kvrelay.cluster.commands import watch as watching

        watching.watch(console, api_url, api_key, as_json=as_json)
    else:
        status_command.show_status(console, api_url, dashboard_url, api_key=api_key, as_json=as_json)


@app.command()
def doctor(
    url: Url = None,
    api_key: ApiKey = None,
    as_json: Annotated[bool, typer.Option("--json", help="for programs")] = False,
    probe: Annotated[bool, typer.Option("--probe", help="measure every path anew")] = False,
) -> None:
    """Show between which workers KV can travel, how fast, and what to do where it cannot; exit code 1 on an incompatible pair."""
    from kvrelay.cluster.commands import doctor as doctors
    from kvrelay.cluster.launch.endpoints import endpoints
    from kvrelay.environment import environment_api_key

    api_url, _ = endpoints(url, None)
    raise typer.Exit(doctors.show(console, api_url, api_key or environment_api_key(), as_json=as_json, is_probe=probe))


@app.command()
def scale(
    prefill: Annotated[int | None, typer.Option(min=1, help="prefill workers")] = None,
    decode: Annotated[int | None, typer.Option(min=1, help="decode workers")] = None,
    ingress: Annotated[int | None, typer.Option(min=1, help="ingresses")] = None,
    url: Url = None,
    dashboard: Dashboard = None,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="until the new count runs")] = True,
) -> None:
    """Change how many workers run; the others are not restarted."""
    from kvrelay.cluster.commands import status as status_command
    from kvrelay.cluster.launch.endpoints import endpoints

    given = {"prefill": prefill, "decode": decode, "ingress": ingress}
    counts = {name: count for name, count in given.items() if count is not None}
    if not counts:
        raise ConfigError("say what to scale: --prefill N, --decode N or --ingress N")
    _, dashboard_url = endpoints(url, dashboard)
    status_command.scale(dashboard_url, counts, console, wait=wait)


@app.command()
def version() -> None:
    """Print the version."""
    print(__version__)


def _add_lazy_commands(arguments: list[str]) -> None:
    """Import a heavy command only when it is the one that was asked for; the others are listed by name."""
    asked = _command(arguments)
    for name, (module, summary) in _LAZY.items():
        if name == asked:
            app.command(name)(importlib.import_module(module).command)
        else:
            app.command(name, help=summary)(_placeholder)


def _command(arguments: list[str]) -> str | None:
    return next((argument for argument in arguments if not argument.startswith("-")), None)


def _last_words(line: str) -> None:
    """Of the process in front, when the other one may have been ended within a progress bar."""
    console.print(line, highlight=False)
    console.show_cursor(True)


def _placeholder() -> None:
    raise AssertionError("replaced by the real command when it is asked for")


def main() -> None:
    """The console script."""
    arguments = sys.argv[1:]
    _add_lazy_commands(arguments)
    if _command(arguments) == "serve":
        from kvrelay.cluster.launch.supervisor import supervise

        supervise(_last_words)
    sys.exit(run(arguments))


def run(arguments: list[str]) -> int:
    """Run one command; its exit status. Known errors are one line, without a traceback."""
    try:
        return int(app(args=arguments, standalone_mode=False) or 0)
    except ConfigError as error:
        return _say(str(error), USAGE_ERROR)
    except KvrelayError as error:
        return _say(str(error), FAILED)
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except _UsageProblem as error:
        if "\n" in error.format_message():  # no command: the message is the help
            error.show()
            return USAGE_ERROR
        return _say(explained(error), USAGE_ERROR)


def explained(error: Any) -> str:
    """click's message as one line, with the nearest known flag or command."""
    message = str(error.format_message()).splitlines()[0] if error.format_message() else "no command given"
    wrong, known = _wrong_word(error)
    near = difflib.get_close_matches(wrong, known, n=1, cutoff=0.5) if wrong else []
    if not near or near[0] in message:
        return message
    return f"{message.rstrip('.')}; did you mean {near[0]}?"


def _wrong_word(error: Any) -> tuple[str | None, list[str]]:
    context = error.ctx
    option = getattr(error, "option_name", None)
    if option and context is not None:
        return option, [flag for parameter in context.command.params for flag in parameter.opts]
    if context is not None and hasattr(context.command, "commands") and "'" in error.format_message():
        return error.format_message().split("'")[1], list(context.command.commands)
    return None, []


def _say(message: str, status_code: int) -> int:
    Console(stderr=True).print(f"[red]kvrelay:[/red] {_escaped(message)}", highlight=False, soft_wrap=True)
    return status_code


def _escaped(text: str) -> str:
    from rich.markup import escape

    return escape(text)


if __name__ == "__main__":
    main()
