"""How long one routing decision takes: python -m bench.router, or python bench/router.py.

Prompts of 865 blocks (13,840 tokens of 16), half of them held by one prefill worker, an eighth by a decode
worker; N workers, half of each role, each with 20,000 blocks in the index. Prints microseconds:
the prefix match alone, and the whole `select_and_reserve` + `on_first_token` + `on_end`.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable

from kvrelay.config import RouterSettings
from kvrelay.router.router import Router
from kvrelay.router.types import Decision, RouteRequest
from kvrelay.types import Fingerprint
from kvrelay.wire import KvSnapshot, LoadReport, WorkerInfo

BLOCK_SIZE = 16
FINGERPRINT = Fingerprint(1, "m", "bfloat16", BLOCK_SIZE, 2, 2, 8, "seed")
BLOCKS_PER_PROMPT = 865
BLOCKS_PER_WORKER = 20_000


def worker(index: int) -> WorkerInfo:
    return WorkerInfo(
        worker_id=f"w{index:03}",
        role="prefill" if index % 2 == 0 else "decode",
        epoch="e",
        host="127.0.0.1",
        port=0,
        node_id=f"n{index // 8}",
        model="bench",
        fingerprint=FINGERPRINT,
        block_size=BLOCK_SIZE,
        num_blocks=2 * BLOCKS_PER_WORKER,
        max_model_len=32768,
        max_running=64,
        kv_bytes_per_token=23040,
        device="cpu",
        transports=["shm"],
    )


def build(num_workers: int, prompts: list[tuple[bytes, ...]], rng: random.Random) -> Router:
    """A router whose workers hold prefixes of the prompts and unrelated blocks."""
    router = Router(RouterSettings(), tokens_per_hash=BLOCK_SIZE)
    held: list[list[bytes]] = [[] for _ in range(num_workers)]
    for prompt in prompts:
        held[2 * rng.randrange(num_workers // 2)] += prompt[: len(prompt) // 2]
        held[2 * rng.randrange(num_workers // 2) + 1] += prompt[: len(prompt) // 8]
    for index in range(num_workers):
        filler = [rng.randbytes(16) for _ in range(BLOCKS_PER_WORKER - len(held[index]))]
        info = worker(index)
        router.worker_up(info)
        router.apply_snapshot(info.worker_id, KvSnapshot(seq=0, hashes=held[index] + filler))
        report = LoadReport(
            seq=1,
            running=rng.randrange(32),
            queued_tokens=rng.randrange(8000),
            free_blocks=BLOCKS_PER_WORKER,
            total_blocks=2 * BLOCKS_PER_WORKER,
        )
        router.apply_load(info.worker_id, report, 0.0)
    return router


def timed_us(calls: list[Callable[[], object]]) -> tuple[float, float]:
    """p50 and p99 in microseconds."""
    times = []
    for call in calls:
        began = time.perf_counter()
        call()
        times.append((time.perf_counter() - began) * 1e6)
    cuts = statistics.quantiles(times, n=100)
    return cuts[49], cuts[98]


def measure(num_workers: int, num_requests: int) -> str:
    rng = random.Random(num_workers)
    prompts = [tuple(rng.randbytes(16) for _ in range(BLOCKS_PER_PROMPT)) for _ in range(min(num_requests, 16))]
    router = build(num_workers, prompts, rng)
    tokens = BLOCKS_PER_PROMPT * BLOCK_SIZE

    def decide(index: int) -> None:
        request = RouteRequest(f"r{index}", prompts[index % len(prompts)], tokens, 256)
        choice = router.select_and_reserve(request, 0.0)
        assert isinstance(choice, Decision), choice
        router.on_first_token(request.request_id, 1.0)
        router.on_end(request.request_id)

    match = router._index.match
    found = timed_us([lambda i=i: match(prompts[i % len(prompts)]) for i in range(num_requests)])
    whole = timed_us([lambda i=i: decide(i) for i in range(num_requests)])
    return f"{num_workers:>8} {found[0]:>10.0f} {found[1]:>10.0f} {whole[0]:>13.0f} {whole[1]:>13.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 8, 32, 64, 128, 256])
    parser.add_argument("--requests", type=int, default=400)
    options = parser.parse_args()
    print(f"{'workers':>8} {'match p50':>10} {'p99 us':>10} {'decision p50':>13} {'p99 us':>13}")
    for num_workers in options.workers:
        print(measure(num_workers, options.requests), flush=True)


if __name__ == "__main__":
    main()
