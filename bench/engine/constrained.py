"""Decode speed with and without a JSON schema, and what masks cost inside the engine.

    python -m bench.engine.constrained [--streams 1 4 16] [--rounds 7] [--tokens 64] [--temperature 0] [--json FILE]

Two parts, each with the unconstrained baseline in turn with the constrained run, the same prompts and output lengths
(the schema's array is longer than any output; the baseline ignores its end). Draft tokens are off.

    cluster  a prefill worker, a decode worker and the ingress's dispatcher, without HTTP: TPOT as a client sees it, the
             mean of a round's streams. Median and range of the rounds, and of the rounds' ratios
    engine   one engine in this process: steps that only decode, the processor time of all its threads in them, how
             long masks of all rows took (replayed tokens, grammars, restrictions; beside the model's step), and how
             long the step then waited for them. Where other work runs, compare processor times

Each constrained output is checked to be the beginning of such an array, and that no unconstrained one is (the control).
"""

import argparse
import asyncio
import json
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from bench.engine.inprocess import build_engine, prepare
from bench.figures import available_cores, show
from kvrelay.cluster.launch.local import local_cluster
from kvrelay.config import settings_from
from kvrelay.engine.models.spec import ModelSpec
from kvrelay.engine.step.engine import Engine
from kvrelay.grammar.compiler import GrammarCompiler
from kvrelay.hashing import block_hashes
from kvrelay.plane.messages import GrammarSpec, Sampling, SequenceRequest
from kvrelay.serve.requests.dispatcher import Dispatcher

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 60},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "city": {"type": "string", "pattern": "^[A-Z][a-z]{2,20}$"},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}, "minItems": 1, "maxItems": 4},
        "role": {"enum": ["engineer", "nurse", "teacher", "driver"]},
        "active": {"type": "boolean"},
    },
    "required": ["name", "age", "city", "tags", "role", "active"],
    "additionalProperties": False,
}
SCHEMA = GrammarSpec("json_schema", json.dumps({"type": "array", "items": PERSON, "minItems": 400}))
PROMPT = "Here is a JSON array of {count} people, with their names, ages, cities, tags, roles and activity:\n"
SETUPS = ("plain", "constrained")


class Requests:
    """Makes requests, each with its own text."""

    def __init__(self, folder: Path, block_size: int, options: argparse.Namespace) -> None:
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._block_size, self._options, self._num_made = block_size, options, 0

    def make(self, setup: str, stream: int, seed: int) -> SequenceRequest:
        self._num_made += 1
        prompt = self._tokenizer.encode(PROMPT.format(count=500 + stream)).ids
        sampling = Sampling(
            max_tokens=self._options.tokens,
            temperature=self._options.temperature,
            seed=seed,
            ignore_eos=True,
            grammar=SCHEMA if setup == "constrained" else None,
        )
        return SequenceRequest(
            request_id=f"bench-{self._num_made}",
            token_ids=prompt,
            num_prompt_tokens=len(prompt),
            block_hashes=block_hashes(prompt, self._block_size),
            sampling=sampling,
        )


class Checked:
    """Counts outputs, and those that the schema allows."""

    def __init__(self, folder: Path, num_tokens: int) -> None:
        spec = ModelSpec.from_config(json.loads((folder / "config.json").read_text()))
        self._grammar = GrammarCompiler(folder, spec.vocab_size, spec.eos_ids).compile(SCHEMA)
        self._num_tokens, self._seen, self._valid = num_tokens, Counter[str](), Counter[str]()

    def note(self, setup: str, output: Sequence[int]) -> None:
        if len(output) != self._num_tokens:
            raise SystemExit(f"a {setup} output has {len(output)} tokens instead of {self._num_tokens}")
        self._seen[setup] += 1
        self._valid[setup] += self._grammar.matcher().accept(output) == len(output)

    def report(self) -> None:
        parts = [f"{self._valid[setup]} of {self._seen[setup]} {setup}" for setup in SETUPS]
        print("outputs that begin such an array:", ", ".join(parts))
        if self._valid["constrained"] != self._seen["constrained"] or self._valid["plain"]:
            raise SystemExit("wrong")


# ---- the cluster


def row_of(streams: int, taken: dict[str, list[float]]) -> dict[str, Any]:
    """Of each setup's TPOT in each round, in ms."""
    plain, constrained = (taken[setup] for setup in SETUPS)
    beyond = [100 * (b / a - 1) for a, b in zip(plain, constrained, strict=True)]
    return {
        "streams": streams,
        "plain ms": statistics.median(plain),
        "range": f"{min(plain):.2f}-{max(plain):.2f}",
        "constrained ms": statistics.median(constrained),
        "range ": f"{min(constrained):.2f}-{max(constrained):.2f}",
        "beyond %": 100 * (statistics.median(constrained) / statistics.median(plain) - 1),
        "of a round": statistics.median(beyond),
        "range  ": f"{min(beyond):.1f}-{max(beyond):.1f}",
    }


async def tpot(dispatcher: Dispatcher, request: SequenceRequest) -> tuple[float, list[int]]:
    """(milliseconds per token behind the first, the output)."""
    times: list[float] = []
    output: list[int] = []
    async for one in dispatcher.generate(request, force="remote"):
        times.append(time.perf_counter())
        output += one.token_ids
    return 1000 * (times[-1] - times[0]) / max(1, len(output) - 1), output


async def cluster(folder: Path, options: argparse.Namespace) -> None:
    settings = settings_from({"engine": {"kv_memory": "512MiB", "speculation": "off"}})
    requests = Requests(folder, settings.engine.block_size, options)
    checked = Checked(folder, options.tokens)
    found: dict[int, dict[str, list[float]]] = {n: {setup: [] for setup in SETUPS} for n in options.streams}
    async with local_cluster(settings, folder, num_prefill=1, num_decode=1, num_inside=0) as running:
        for index in range(-1, options.rounds):  # the first round is not counted: it compiles and records
            for streams, taken in found.items():
                for setup in SETUPS[:: 1 if index % 2 else -1]:
                    made = [requests.make(setup, stream, index + 1) for stream in range(streams)]
                    results = await asyncio.gather(*(tpot(running.dispatcher, request) for request in made))
                    for _, output in results:
                        checked.note(setup, output)
                    if index >= 0:
                        taken[setup].append(statistics.mean(ms for ms, _ in results))
    title = f"TPOT through a prefill and a decode worker, {options.model}, {options.tokens} tokens"
    show(title, [row_of(*one) for one in found.items()], options.json)
    checked.report()


# ---- the engine


class TimedMasks:
    """Times an engine's masks, in µs: of a whole step, and how long the step waited for them."""

    def __init__(self, engine: Engine) -> None:
        self.filled: list[float] = []
        self.waited: list[float] = []
        fill, begin = engine.constraints._fill, engine.constraints.begin
        constraints: Any = engine.constraints
        constraints._fill = lambda *inputs: _timed(lambda: fill(*inputs), self.filled)

        def begun(*inputs: Any) -> Any:
            wait = begin(*inputs)
            return lambda: _timed(wait, self.waited)

        constraints.begin = begun

    def clear(self) -> None:
        self.filled.clear()
        self.waited.clear()


def _timed(work: Any, into: list[float]) -> Any:
    began_s = time.perf_counter()
    result = work()
    into.append(1e6 * (time.perf_counter() - began_s))
    return result


Step = tuple[float, float]  # milliseconds, and those of all threads on their processors


def decode(engine: Engine, requests: list[SequenceRequest]) -> tuple[list[Step], dict[str, list[int]]]:
    """(the steps that decode all of them, outputs)."""
    steps: list[Step] = []
    outputs: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for request in requests:
        if (refusal := engine.requests.refusal(request)) is not None:
            raise SystemExit(f"the engine refuses: {refusal}")
        engine.add(request)
    while engine.scheduler.has_work:
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        result = engine.step()
        if result.num_decode == len(requests) == result.num_tokens:
            steps.append((1000 * (time.perf_counter() - began_s), 1000 * (time.process_time() - began_cpu_s)))
        engine.reports.drain_events()
        for output in result.outputs:
            outputs[output.request_id] += output.token_ids
    return steps, outputs


def in_engine(engine: Engine, folder: Path, options: argparse.Namespace) -> None:
    requests = Requests(folder, engine.config.block_size, options)
    checked = Checked(folder, options.tokens)
    timed, rows = TimedMasks(engine), []
    for streams in options.streams:
        steps: dict[str, list[Step]] = {setup: [] for setup in SETUPS}
        for index in range(-1, options.rounds):
            for setup in SETUPS[:: 1 if index % 2 else -1]:
                made = [requests.make(setup, stream, index + 1) for stream in range(streams)]
                taken, outputs = decode(engine, made)
                for output in outputs.values():
                    checked.note(setup, output)
                if index >= 0:
                    steps[setup] += taken
            if index < 0:
                timed.clear()
        plain, constrained = (statistics.median(step for step, _ in steps[setup]) for setup in SETUPS)
        plain_cpu, constrained_cpu = (statistics.mean(cpu for _, cpu in steps[setup]) for setup in SETUPS)
        rows.append(
            {
                "streams": streams,
                "plain step ms": plain,
                "constrained ms": constrained,
                "beyond %": 100 * (constrained / plain - 1),
                "mean CPU ms": plain_cpu,
                "constrained": constrained_cpu,
                "CPU beyond %": 100 * (constrained_cpu / plain_cpu - 1),
                **_quantiles("masks", timed.filled),
                **_quantiles("waited", timed.waited),
            }
        )
        timed.clear()
    out = options.json and options.json.with_suffix(".engine.json")
    show(f"steps of one engine, {options.threads} threads; masks of a step in µs", rows, out)
    checked.report()


def _quantiles(name: str, values: list[float]) -> dict[str, float | None]:
    ordered = sorted(values)
    at = {"p50": 0.5, "p99": 0.99}
    return {f"{name} {key}": ordered[int(share * (len(ordered) - 1))] if ordered else None for key, share in at.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=64, help="of an output")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--parts", nargs="+", choices=["cluster", "engine"], default=["cluster", "engine"])
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    folder = prepare(options.model)
    if "cluster" in options.parts:
        asyncio.run(cluster(folder, options))
    if "engine" in options.parts:
        engine = build_engine(folder, "bfloat16", options.threads, "auto", token_budget=512, kv_memory=256 << 20)
        in_engine(engine, folder, options)
        engine.close()


if __name__ == "__main__":
    main()
