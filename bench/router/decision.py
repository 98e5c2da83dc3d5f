"""How long one routing decision takes: python -m bench.router.decision.

What the workers hold: see `Contents`. Half of the workers prefill, half decode; their loads are drawn at random, are
all equal, or those of a few stand out. For each number of workers, length of prompt and kind of load, in microseconds:
`first`, the index's lookup of a prompt that it has not seen yet; `lookup`, the same again;
`decision`, the whole of `select_and_reserve`, `on_first_token` and `on_end`, 10 ms of the router's time apart, and how
many of them a core makes in a second; `new`, the same for prompts that continue what is held with tokens that the
router has never seen. Then events: how many a second from the wire's bytes to the index, half of them
storing a chain and half removing it.
"""

import argparse
import itertools
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from kvrelay.plane.messages import decode_from_worker, encode
from kvrelay.plane.reports import KvEvents, KvSnapshot, LoadReport, WorkerInfo
from kvrelay.router.decision.router import Router
from kvrelay.router.types import Decision, RouteRequest
from kvrelay.settings.router import RouterSettings
from kvrelay.types import Fingerprint

BLOCK_SIZE = 16
FINGERPRINT = Fingerprint(1, "m", "bfloat16", BLOCK_SIZE, 2, 2, 8, "seed")
ROUNDS = 3
EVENTS = ((4, 2000), (128, 200))
"""(blocks in one event, number of events)."""

NUM_PROMPTS = 16
CHAIN = 100
MAX_FILLER = 20_000
MAX_TOTAL = 2_000_000
Chain = list[int]


@dataclass(frozen=True)
class Contents:
    """What the workers hold.

    A block is a random number of 64 bits, unlike every other. 16 prompts of P blocks; of each, one worker of even
    number holds the first half and one of odd number the first eighth. Of `shared` contents the first eighth of all
    prompts is one system prompt, which every worker holds. Beside those, chains of CHAIN blocks that no request asks
    for: MAX_FILLER each, less where all workers together would have more than MAX_TOTAL (with 4,096 workers 488 each),
    so that memory stays within a few GB.
    """

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


def hashes(chain: list[int]) -> tuple[bytes, ...]:
    """Names as our chains have them: 16 bytes."""
    return tuple(one.to_bytes(16, "little") for one in chain)


def worker(index: int) -> WorkerInfo:
    return WorkerInfo(
        worker_id=f"{index}",
        role="prefill" if index % 2 == 0 else "decode",
        epoch="e",
        host="127.0.0.1",
        port=0,
        node_id=f"n{index // 8}",
        model="bench",
        fingerprint=FINGERPRINT,
        block_size=BLOCK_SIZE,
        num_blocks=400_000,
        max_model_len=1 << 20,
        max_running=64,
        kv_bytes_per_token=23040,
        device="cpu",
        transports=["shm"],
    )


LOADS: dict[str, Callable[[random.Random, int], tuple[int, int]]] = {
    "random": lambda rng, index: (rng.randrange(32), rng.randrange(8000)),
    "equal": lambda rng, index: (16, 4000),
    "skewed": lambda rng, index: (31, 8000) if index % 16 < 2 else (0, 0),
}
"""(sequences that run, prompt tokens queued) of each worker."""


def build(made: Contents, load: str = "random") -> Router:
    """A router whose workers hold that."""
    rng = random.Random(len(made.held))
    router = Router(RouterSettings(), tokens_per_hash=BLOCK_SIZE)
    for index, chains in enumerate(made.held):
        info = worker(index)
        router.worker_up(info)
        held = [one for chain in chains for one in hashes(chain)]
        router.apply_snapshot(info.worker_id, KvSnapshot(seq=0, hashes=held))
        running, queued = LOADS[load](rng, index)
        report = LoadReport(seq=1, running=running, queued_tokens=queued, free_blocks=200_000, total_blocks=400_000)
        router.apply_load(info.worker_id, report, 0.0)
    return router


Clock = Callable[[], int]
"""Nanoseconds."""


def timed_us(call: Callable[[int], object], count: int, clock: Clock = time.perf_counter_ns) -> list[float]:
    times = []
    for index in range(count):
        began = clock()
        call(index)
        times.append((clock() - began) / 1e3)
    return times


def cuts(times: list[float]) -> str:
    """p50 and p99."""
    parts = statistics.quantiles(times, n=100)
    return f"{parts[49]:>7.0f} {parts[98]:>7.0f}"


def lookups(made: Contents, router: Router, count: int, clock: Clock) -> None:
    """One line of the first table."""
    prompts = [hashes(prompt) for prompt in made.prompts]
    depths = router.index.table
    first = timed_us(lambda i: depths(prompts[i]), len(prompts), clock)
    again = []
    timed_us(lambda i: depths(prompts[i % len(prompts)]), 10 * len(prompts))  # until all scattered blocks have moved
    for _ in range(ROUNDS):
        again += timed_us(lambda i: depths(prompts[i % len(prompts)]), count, clock)

    def decide(index: int, asked: list[tuple[bytes, ...]] = prompts) -> None:
        hashed = asked[index % len(asked)]
        request = RouteRequest(f"r{index}", hashed, len(hashed) * BLOCK_SIZE, 256)
        now_s[0] += 0.01
        choice = router.select_and_reserve(request, now_s[0])
        assert isinstance(choice, Decision), choice
        router.on_first_token(request.request_id, now_s[0])
        router.on_end(request.request_id)

    now_s, whole, new, rng = [0.0], list[float](), list[float](), random.Random(2)
    timed_us(decide, 2 * len(prompts))
    for _ in range(ROUNDS):
        whole += timed_us(decide, count, clock)
        half = len(prompts[0]) // 2
        unseen = [prompts[i % len(prompts)][:half] + hashes(_chain(rng, half)) for i in range(count)]
        new += timed_us(partial(decide, asked=unseen), count, clock)
    line = f" {statistics.median(first):>7.0f} {cuts(again)}"
    print(f"{line} {cuts(whole)} {1e6 / statistics.mean(whole):>8.0f} {cuts(new)}", flush=True)


def event_rate(router: Router, seqs: list[int], num_events: int, num_blocks: int, clock: Clock) -> float:
    """Seconds for as many events that store as that remove. `seqs`: each worker's last number; carried on."""
    chains = [list(hashes(chain)) for chain in fresh(random.Random(1), num_events, num_blocks)]
    frames: list[tuple[str, bytes]] = []
    for kind in ("stored", "removed"):
        for index, chain in enumerate(chains):
            place = index % len(seqs)
            seqs[place] += 1
            frames.append((str(place), encode(KvEvents(seq=seqs[place], **{kind: chain}))))
    began = clock()
    for worker_id, frame in frames:
        message = decode_from_worker(frame)
        assert isinstance(message, KvEvents) and router.apply_events(worker_id, message)
    return (clock() - began) / 1e9


def cell(
    num_workers: int, tokens: int, shared: bool, load: str, count: int, clock: Clock = time.perf_counter_ns
) -> None:
    blocks = tokens // BLOCK_SIZE
    made = contents(num_workers, blocks, shared=shared, seed=0)
    router = build(made, load)
    print(f"{num_workers:>7} {tokens:>7} {'shared' if shared else 'own':>6} {load:>6}", end="")
    lookups(made, router, count, clock)
    seqs = [0] * num_workers
    for num_blocks, num_events in EVENTS if tokens < 10_000 and load == "random" else ():
        mine = 2 * num_events / event_rate(router, seqs, num_events, num_blocks, clock)
        print(f"{'':>7} events of {num_blocks} blocks: {mine:>9.0f} events/s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[8, 64, 512, 4096])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1000, 100_000])
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS))
    parser.add_argument("--requests", type=int, default=400, help="in each of the rounds")
    parser.add_argument(
        "--cpu-time", action="store_true", help="of our thread, which waits for other programs are no part of"
    )
    options = parser.parse_args()
    clock = time.thread_time_ns if options.cpu_time else time.perf_counter_ns
    head = f"{'workers':>7} {'tokens':>7} {'held':>6} {'load':>6} {'first':>7} {'lookup':>7} {'p99':>7}"
    print(head + f" {'decision':>7} {'p99':>7} {'a second':>8} {'new':>7} {'p99':>7}")
    for num_workers in options.workers:
        for tokens in options.tokens:
            for shared, load in itertools.product((False, True), options.loads):
                cell(num_workers, tokens, shared, load, options.requests, clock)


if __name__ == "__main__":
    main()
