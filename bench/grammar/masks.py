"""Time to compile a grammar, and to compute a step's masks at 1, 4 and 16 streams, over the schemas of schemas.py.

python -m bench.grammar.masks --model FOLDER: one line for each group of schemas, and one over all. Times are of this
process on all its threads; a stream follows a random output of its schema.
"""

import argparse
import json
import time
from collections import defaultdict
from pathlib import Path

import numpy as np

from bench.grammar.schemas import schemas
from kvrelay.grammar.compiler import CompiledGrammar, GrammarCompiler
from kvrelay.grammar.masks import fill_masks
from kvrelay.plane.messages import GrammarSpec

STREAMS = (1, 4, 16)
MOST_TOKENS = 64


def mask_times(grammars: list[CompiledGrammar], num_words: int, streams: int, seed: int) -> list[float]:
    """Seconds of each step; stream i follows grammar i, again from its start when its output has ended."""
    random = np.random.default_rng(seed)
    chosen = [grammars[i % len(grammars)] for i in range(streams)]
    matchers, masks, found = [one.matcher() for one in chosen], np.zeros((streams, num_words), np.int32), []
    for _ in range(MOST_TOKENS):
        start = time.perf_counter()
        fill_masks([(matcher, [], row) for row, matcher in enumerate(matchers)], masks)
        found.append(time.perf_counter() - start)
        for row, matcher in enumerate(matchers):
            allowed = np.nonzero(np.unpackbits(masks[row].view(np.uint8), bitorder="little"))[0]
            matcher.accept([int(random.choice(allowed))])
            if matcher.is_over or matcher.problem:
                matchers[row] = chosen[row].matcher()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="a prepared model folder")
    chosen = parser.parse_args()
    config = json.loads((chosen.model / "config.json").read_text())
    eos = json.loads((chosen.model / "generation_config.json").read_text())["eos_token_id"]
    vocab_size = (config.get("text_config") or config)["vocab_size"]
    compiler = GrammarCompiler(chosen.model, vocab_size, eos if isinstance(eos, list) else [eos])
    compiler.load()
    groups: dict[str, list[CompiledGrammar]] = defaultdict(list)
    compiled: dict[str, list[float]] = defaultdict(list)
    for name, schema in schemas().items():
        start = time.perf_counter()
        grammar = compiler.compile(GrammarSpec("json_schema", json.dumps(schema)))
        for group in (name.split()[0], "all"):
            groups[group].append(grammar)
            compiled[group].append(time.perf_counter() - start)
    large = {group: found for group, found in groups.items() if len(found) >= 5}
    print("schemas".ljust(12), "compile ms p50 p99".rjust(20), *(f"mask µs p50 p99 at {n}".rjust(26) for n in STREAMS))
    for group, grammars in large.items():
        figures = [_figures(compiled[group], 1e3)]
        figures += [_figures(mask_times(grammars, compiler.num_words, n, 0), 1e6) for n in STREAMS]
        print(f"{group} {len(grammars)}".ljust(12), figures[0].rjust(20), *(one.rjust(26) for one in figures[1:]))


def _figures(seconds: list[float], scale: float) -> str:
    middle, high = np.percentile(np.array(seconds) * scale, [50, 99])
    return f"{middle:.1f} {high:.1f}"


if __name__ == "__main__":
    main()
