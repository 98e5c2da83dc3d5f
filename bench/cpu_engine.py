"""The engine alone against llama.cpp's own bench, without HTTP: same model, same lengths, in turn, in one run.

    python bench/cpu_engine.py smollm2 --llama-bin FOLDER_OF_llama-batched-bench [--models ~/.cache/kvrelay/peers]
        [--clients 1 4 16 32] [--lengths 512 2048] [--weights 16 int8 int4] [--rounds 2] [--json FILE]

kvrelay: bench/decode.py and bench/prefill.py, each round in a process of its own (all weights beside each other in it).
llama.cpp: llama-batched-bench, a process for each shape, with just the sequences and the context that it needs. Its
tokens are random and it samples none; our figures hold sampling and scheduling. 16 bits: f16, llama.cpp's faster one
on processors without bfloat16 products. Medians of the rounds. See bench/cpu.py for how to get the peers.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from figures import available_cores, show

HERE = Path(__file__).resolve().parent
DEFAULT_MODELS = Path("~/.cache/kvrelay/peers").expanduser()
OURS = {"16": "bfloat16", "int8": "int8", "int4": "int4"}  # as bench/decode.py calls them
THEIRS = {"16": "f16", "int8": "q8_0", "int4": "q4_1"}  # files with the same bits per weight
Key = tuple[str, str, str, int]  # who, weights, "decode" or "prefill", clients or prompt tokens


def ours(options: argparse.Namespace) -> dict[Key, float]:
    """Tokens per second of one round of our scripts. Raises CalledProcessError."""
    model = str(options.models / options.model / "checkpoint")
    more = [name for name in options.weights if name != "16"]
    shared = ["--model", model, "--repeats", "1", "--quantization", *more]
    decode = [*shared, "--hf", "--concurrency", *map(str, options.clients)]
    decode += ["--prompt", str(options.prompt), "--output", str(options.output)]
    found = {}
    for row in _script("decode.py", decode) if options.clients else []:
        found["kvrelay", row["weights"], "decode", row["concurrency"]] = row["tokens/s"]
    prefill = [*shared, "--no-hf", "--lengths", *map(str, options.lengths)]
    for row in _script("prefill.py", prefill) if options.lengths else []:
        found["kvrelay", row["weights"], "prefill", row["prompt tokens"]] = row["tokens/s"]
    return found


def _script(name: str, arguments: list[str]) -> list[dict[str, Any]]:
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        command = [sys.executable, str(HERE / name), *arguments, "--json", out.name]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        rows: list[dict[str, Any]] = json.loads(Path(out.name).read_text())["rows"]
        return rows


def theirs(options: argparse.Namespace) -> dict[Key, float]:
    """The same of llama.cpp. Raises CalledProcessError."""
    found = {}
    for name in options.weights:
        file = options.models / options.model / f"{THEIRS[name]}.gguf"
        for clients in options.clients:
            row = _batched(options, file, options.prompt, options.output, clients)
            found["llama.cpp", OURS[name], "decode", clients] = row["speed_tg"]
        for length in options.lengths:
            row = _batched(options, file, length, 1, 1)
            found["llama.cpp", OURS[name], "prefill", length] = row["speed_pp"]
    return found


def _batched(options: argparse.Namespace, file: Path, prompt: int, output: int, clients: int) -> dict[str, float]:
    """One row of llama-batched-bench: clients sequences of `prompt` tokens in, `output` tokens out."""
    context = clients * (-(-(prompt + output + 16) // 256) * 256)
    threads = str(available_cores())
    command = [str(options.llama_bin / "llama-batched-bench"), "-m", str(file), "-c", str(context), "-t", threads]
    command += ["-tb", threads, "-fa", options.flash, "-npp", str(prompt), "-ntg", str(output), "-npl", str(clients)]
    command += ["-fit", "off", "--output-format", "jsonl"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if len(rows) != 1:
        raise SystemExit(f"llama-batched-bench printed no figures:\n{done.stdout[-2000:]}")
    row: dict[str, float] = rows[0]
    return row


def compared(rounds: list[dict[Key, float]]) -> list[dict[str, Any]]:
    """A row for each shape and kind of weights that both sides have. Medians over the rounds."""
    found: dict[Key, list[float]] = {}
    for one in rounds:
        for key, value in one.items():
            found.setdefault(key, []).append(value)
    rates = {key: statistics.median(values) for key, values in found.items()}
    rows = []
    for (who, weights, kind, size), rate in rates.items():
        peer = rates.get(("llama.cpp", weights, kind, size))
        if who == "kvrelay":
            shape = f"{size} {'sequences' if kind == 'decode' else 'prompt tokens'}"
            rows.append(
                {
                    "": f"{kind}, {shape}",
                    "weights": weights,
                    "kvrelay tok/s": rate,
                    "llama.cpp tok/s": peer,
                    "kvrelay / llama.cpp": rate / peer if peer else None,
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder of --models: smollm2 or qwen2.5-0.5b")
    parser.add_argument("--models", type=Path, default=DEFAULT_MODELS)
    parser.add_argument("--llama-bin", type=Path, required=True)
    parser.add_argument("--clients", type=int, nargs="*", default=[1, 4, 16, 32])
    parser.add_argument("--lengths", type=int, nargs="*", default=[512, 2048])
    parser.add_argument("--weights", nargs="+", choices=list(OURS), default=list(OURS))
    parser.add_argument("--prompt", type=int, default=128, help="tokens, of decoding sequences")
    parser.add_argument("--output", type=int, default=64, help="tokens, of decoding sequences")
    parser.add_argument("--flash", choices=["on", "off", "auto"], default="auto", help="llama.cpp's flash attention")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rounds = []
    for number in range(options.rounds):
        for side in (ours, theirs) if number % 2 == 0 else (theirs, ours):
            rounds.append(side(options))
            print(f"round {number + 1}: {side.__name__} done", flush=True)
    show(f"in process, {options.model}, medians of {options.rounds}", compared(rounds), options.json)


if __name__ == "__main__":
    main()
