"""A storm of pre-emptions on a decode engine, and from which length on a swap is cheaper than computing again.

    python bench/preemption.py [--model M] [--threads N] [--clock wall|cpu] [--json FILE] [--plot FILE]

Storm: requests arrive as on a decode worker (their blocks are reserved, then their KV is there), all at once. First with enough
memory, then with half of the most that this took: with headroom and without, where every way is tried and what the cost model
chooses. Goodput is output tokens of complete requests over time; the orders of the runs turn, medians count. Crossover: one
sequence of each length is pre-empted both ways and timed until its next token, less a plain step. `--clock cpu` counts this
process's CPU time: for a machine that others use, too.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from figures import available_cores, show

import inprocess  # isort: skip
from kvrelay.engine.scheduling.preemption_policy import (
    PreemptionMode,
    PreemptionRates,
    VictimGroup,
    costs,
    crossover_tokens,
)
from kvrelay.engine.step.engine import Engine, EngineConfig, load_engine
from kvrelay.engine.worker.tier_setup import make_swap_area
from kvrelay.kernels.select import select_backend

CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked for. Output lengths are spread evenly between the two."""

    num_requests: int
    at_once: int
    prompt_tokens: int
    least_output: int
    most_output: int

    def outputs(self) -> list[int]:
        step = (self.most_output - self.least_output) / max(1, self.num_requests - 1)
        lengths = [round(self.least_output + step * index) for index in range(self.num_requests)]
        return [lengths[index * 7 % self.num_requests] for index in range(self.num_requests)]  # short and long mixed


@dataclass(frozen=True, slots=True)
class Outcome:
    """One storm."""

    name: str
    goodput: float  # tokens/s
    completed: int
    num_steps: int
    peak_blocks: int
    preempted: dict[str, int]
    recomputed_tokens: int
    swap_s: float


class Bench:
    """Engines of one model folder."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._folder = inprocess.prepare(arguments.model)
        self._threads, self._clock = arguments.threads, CLOCKS[arguments.clock]
        torch.set_num_threads(self._threads)
        self._backend = select_backend(arguments.backend, "auto", self._threads)
        self._dtype = inprocess.DTYPES[arguments.dtype]

    def engine(self, num_blocks: int, at_once: int, *, mode: str, headroom: float, swap_share: float) -> Engine:
        """With a pool of so many blocks, and a swap area of so many pools."""
        plain = EngineConfig(
            token_budget=512, max_running=at_once, preemption=mode, headroom=headroom, prefix_caching=False
        )
        weights = inprocess.count_weights(self._folder)
        block_bytes = weights.kv_values_per_token * plain.block_size * self._dtype.itemsize
        config = replace(plain, kv_memory_bytes=num_blocks * block_bytes)
        engine = load_engine(self._folder, self._backend, self._dtype, config)
        bytes_of_swap = int(swap_share * num_blocks * block_bytes)
        area = make_swap_area(engine.memory, bytes_of_swap, "full", lambda: None, clock=self._clock)
        engine._clock = self._clock  # its speeds are to be in the same seconds
        if area is not None:
            engine.attach_swap(area)
        return engine

    def storm(
        self, name: str, load: Load, num_blocks: int, *, mode: str, headroom: float, swap_share: float = 4.0
    ) -> Outcome:
        """All requests at once; until each has its tokens."""
        engine = self.engine(num_blocks, load.at_once, mode=mode, headroom=headroom, swap_share=swap_share)
        wanted: dict[str, int] = {}
        for index, length in enumerate(load.outputs()):
            prompt = inprocess.random_prompt(index, load.prompt_tokens, engine.model.spec.vocab_size)
            request = inprocess.request(index, prompt, length, engine.config.block_size)
            if (refusal := engine.refusal(request)) is not None:
                raise SystemExit(f"the engine refuses: {refusal}")
            engine.reserve(request)
            wanted[request.request_id] = length
        got, steps, peak = dict.fromkeys(wanted, 0), 0, 0
        began = self._clock()
        while engine.scheduler.sequences:
            result = engine.step()
            for reservation in result.reservations:  # the KV has come
                engine.activate(reservation.request_id, [1000])
                got[reservation.request_id] += 1
            for output in result.outputs:
                got[output.request_id] += len(output.token_ids)
            engine.drain_events()
            peak, steps = max(peak, engine.pool.counts().used), steps + 1
        seconds = self._clock() - began
        engine.check()
        report = engine.load()
        engine.close()
        completed = [name for name in wanted if got[name] == wanted[name]]
        return Outcome(
            name, sum(wanted[name] for name in completed) / seconds, len(completed), steps, peak, report.preempted,
            report.recomputed_tokens, report.swap_out_s + report.swap_in_s,
        )  # fmt: skip

    # ---- the crossover

    def crossover(self, lengths: list[int], repeats: int) -> dict[str, Any]:
        """Seconds that either way costs at each length, as measured and as predicted."""
        block_size = EngineConfig().block_size
        num_blocks = max(lengths) // block_size + 8
        engine = self.engine(num_blocks, 4, mode="auto", headroom=0.0, swap_share=2.0)
        rows = [self._both(engine, length, repeats) for length in lengths]
        area = engine.scheduler.preemptor.area
        assert area is not None
        speed = max(length / row["recompute_s"] for length, row in zip(lengths, rows, strict=True))
        rates = PreemptionRates(area.save_bytes_per_s, area.load_bytes_per_s, speed, swap_latency_s=area.latency_s)
        token_bytes = engine.scheduler.preemptor.token_bytes
        for row in rows:
            tokens = row["tokens"]
            swap_bytes = int(-(-tokens // block_size) * block_size * token_bytes)
            found = costs(VictimGroup(tokens, swap_bytes=swap_bytes, can_swap=True), rates)
            row |= {
                "predicted_swap_s": found[PreemptionMode.SWAP].delay_s,
                "predicted_recompute_s": found[PreemptionMode.RECOMPUTE].delay_s,
            }
            row["break_even_bytes_per_s"] = 2 * swap_bytes / row["recompute_s"]
        engine.close()
        return {
            "rows": rows, "rates": asdict(rates), "token_bytes": token_bytes,
            "crossover_tokens": crossover_tokens(rates, bytes_per_token=token_bytes, block_tokens=block_size),
        }  # fmt: skip

    def _both(self, engine: Engine, num_tokens: int, repeats: int) -> dict[str, Any]:
        prompt = inprocess.random_prompt(num_tokens, num_tokens, engine.model.spec.vocab_size)
        request = inprocess.request(num_tokens, prompt, 4 * repeats + 8, engine.config.block_size)
        engine.add(request)
        seq = engine.scheduler.sequences[request.request_id]
        while seq.num_output < 3:
            engine.step()
        times: dict[str, list[float]] = {"plain": [], "swap": [], "recompute": []}
        for _ in range(repeats):
            for way, seconds in times.items():
                before, began = seq.num_output, self._clock()
                if way != "plain":
                    engine.scheduler.preemptor.only = PreemptionMode(way)
                    gone = engine.preempt((seq,))
                    assert gone == way, f"{gone} instead of {way}"
                while seq.num_output == before:
                    engine.step()
                seconds.append(self._clock() - began)
        engine.abort(request.request_id)
        engine.step()
        plain = statistics.median(times["plain"])
        return {
            "tokens": num_tokens,
            **{f"{way}_s": max(1e-6, statistics.median(times[way]) - plain) for way in ("swap", "recompute")},
        }


def storms(bench: Bench, load: Load, rounds: int) -> list[dict[str, Any]]:
    """Medians over rounds, and each run's share of the goodput with enough memory."""
    plenty = load.at_once * ((load.prompt_tokens + load.most_output) // 16 + 2)
    first = bench.storm("enough memory", load, plenty, mode="auto", headroom=1.0)
    print(first, flush=True)
    half = first.peak_blocks // 2
    kinds: list[tuple[str, int, dict[str, Any]]] = [
        ("enough memory", plenty, {"mode": "auto", "headroom": 1.0}),
        ("half, headroom, the model's choice", half, {"mode": "auto", "headroom": 1.0}),
        ("half, no headroom, the model's choice", half, {"mode": "auto", "headroom": 0.0}),
        ("half, no headroom, always swap", half, {"mode": "swap", "headroom": 0.0}),
        ("half, no headroom, always recompute", half, {"mode": "recompute", "headroom": 0.0}),
        ("half, no headroom, little swap memory", half, {"mode": "auto", "headroom": 0.0, "swap_share": 0.1}),
    ]
    runs: dict[str, list[Outcome]] = {name: [] for name, _, _ in kinds}
    runs["enough memory"].append(first)
    for turn in range(rounds):
        for name, num_blocks, options in kinds[turn % len(kinds) :] + kinds[: turn % len(kinds)]:
            if turn or name != "enough memory":
                runs[name].append(bench.storm(name, load, num_blocks, **options))
                print(runs[name][-1], flush=True)
    enough = statistics.median(run.goodput for run in runs["enough memory"])
    return [
        asdict(outcomes[0]) | {
            "goodput": (median := statistics.median(run.goodput for run in outcomes)), "share": median / enough,
            "completed": min(run.completed for run in outcomes), "blocks": num_blocks,
        }
        for (_, num_blocks, _), outcomes in zip(kinds, runs.values(), strict=True)
    ]  # fmt: skip


def plot(found: dict[str, Any], path: Path, title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows, rates = found["rows"], found["rates"]
    tokens = [row["tokens"] for row in rows]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 5))
    for way, colour in (("swap", "C0"), ("recompute", "C1")):
        left.plot(tokens, [1000 * row[f"{way}_s"] for row in rows], f"{colour}o", label=f"{way}, measured")
        predicted = [1000 * row[f"predicted_{way}_s"] for row in rows]
        left.plot(tokens, predicted, f"{colour}--", label=f"{way}, the model's")
    left.set_ylabel("ms until the next token, less a plain step")
    if found["crossover_tokens"] is not None:
        left.axvline(
            found["crossover_tokens"], color="grey", ls=":", label=f"crossover: {found['crossover_tokens']} tokens"
        )
    right.plot(tokens, [row["break_even_bytes_per_s"] / 1e9 for row in rows], "C2-o", label="swap = recompute")
    both_ways = 2 / (1 / rates["save_bytes_per_s"] + 1 / rates["load_bytes_per_s"])
    right.axhline(both_ways / 1e9, color="C0", ls="--", label="measured, pool to host and back")
    right.set_ylabel("bandwidth, GB/s (above the line: swap)")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(tokens, [str(count) for count in tokens])
        axes.set_xlabel("tokens of the sequence")
        axes.grid(alpha=0.3)
        axes.legend()
    left.set_ylim(bottom=0.1)  # less is noise
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", choices=list(inprocess.DTYPES), default="bfloat16")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=128, help="tokens")
    parser.add_argument("--output", type=int, nargs=2, default=(32, 192), help="tokens, least and most")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--lengths", type=int, nargs="+", default=[16, 32, 64, 128, 256, 512, 1024])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    bench = Bench(arguments)
    load = Load(arguments.requests, arguments.at_once, arguments.prompt, *arguments.output)
    found = bench.crossover(arguments.lengths, arguments.rounds)
    for row in found["rows"]:
        print({name: round(value, 5) for name, value in row.items()}, flush=True)
    print(found["rates"], "crossover:", found["crossover_tokens"], flush=True)
    if arguments.plot is not None:
        plot(
            found,
            arguments.plot,
            f"{arguments.model}, {arguments.dtype}, {arguments.threads} threads, {arguments.clock} time",
        )
    rows = [
        {
            "run": row["name"], "blocks": row["blocks"], "goodput tok/s": round(row["goodput"], 1),
            "of enough": round(row["share"], 3), "completed": f"{row['completed']} of {load.num_requests}",
            "steps": row["num_steps"], "preempted": ", ".join(f"{way} {n}" for way, n in row["preempted"].items()) or "none",
            "recomputed tokens": row["recomputed_tokens"], "swap s": round(row["swap_s"], 4),
        }
        for row in storms(bench, load, arguments.rounds)
    ]  # fmt: skip
    show(f"2x oversubscription of decode memory, {arguments.clock} time", rows, arguments.json)
    if arguments.json is not None:
        report = json.loads(arguments.json.read_text()) | {"load": asdict(load), "crossover": found}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
