"""What the workers of bench/router/decision.py hold, the same for our index and for another project's. Standard library
alone.

A block is a random number of 64 bits, unlike every other. 16 prompts of P blocks; of each, one worker of even number
holds the first half and one of odd number the first eighth. Of `shared` contents the first eighth of all prompts is one
system prompt, which every worker holds. Beside those, chains of CHAIN blocks that no request asks for: MAX_FILLER each,
less where all workers together would have more than MAX_TOTAL (with 4,096 workers 488 each), so that memory stays
within a few GB.
"""

import random
from dataclasses import dataclass

NUM_PROMPTS = 16
CHAIN = 100
MAX_FILLER = 20_000
MAX_TOTAL = 2_000_000

Chain = list[int]


@dataclass(frozen=True)
class Contents:
    prompts: list[Chain]
    held: list[list[Chain]]  # of each worker: beginnings of chains


def contents(num_workers: int, prompt_blocks: int, *, shared: bool, seed: int) -> Contents:
    """The same for the same arguments."""
    rng = random.Random(f"{num_workers}/{prompt_blocks}/{shared}/{seed}")
    system = _chain(rng, prompt_blocks // 8) if shared else []
    prompts = [system + _chain(rng, prompt_blocks - len(system)) for _ in range(NUM_PROMPTS)]
    held: list[list[Chain]] = [[system] if shared else [] for _ in range(num_workers)]
    for prompt in prompts:
        held[2 * rng.randrange(num_workers // 2)].append(prompt[: prompt_blocks // 2])
        held[2 * rng.randrange(num_workers // 2) + 1].append(prompt[: prompt_blocks // 8])
    filler = min(MAX_FILLER, MAX_TOTAL // num_workers)
    for chains in held:
        chains += [_chain(rng, min(CHAIN, filler - first)) for first in range(0, filler, CHAIN)]
    return Contents(prompts, held)


def fresh(rng: random.Random, num_events: int, num_blocks: int) -> list[Chain]:
    """Chains that no worker holds yet, one for each event."""
    return [_chain(rng, num_blocks) for _ in range(num_events)]


def _chain(rng: random.Random, length: int) -> Chain:
    return [rng.getrandbits(64) for _ in range(length)]
