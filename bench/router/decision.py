"""How long one routing decision takes, and its index beside Dynamo's: python -m bench.router.decision [--dynamo
PYTHON].

What the workers hold: see bench/router/contents.py. Half of the workers prefill, half decode. For each number of
workers and
length of prompt, in microseconds: `first`, the index's lookup of a prompt that it has not seen yet; `lookup`, the
same again; with --dynamo, its `RadixTree.find_matches` in a process of its own (`first`, again `bare`, and with the
scores read, `read`), in turns with ours and checked to find the same depths; `ratio`, bare over lookup; `decision`,
the whole of `select_and_reserve`, `on_first_token` and `on_end`, 10 ms of the router's time apart, and how many of
them a core makes in a second; with --dynamo, `theirs`: `select_and_reserve`, `prefill_complete` and
`free_reservation` of its `SelectionService`, which picks one worker (ours a pair), knows what workers hold from its
own decisions alone, and is given hashes, too. Then events: how many a second from the wire's bytes to the index,
half of them storing a chain and half removing it. PYTHON is that of an environment with ai-dynamo-runtime (pip
install ai-dynamo-runtime==1.6.1). --memory: bytes instead.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.router.contents import Contents, contents, fresh
from kvrelay.plane.messages import KvEvents, KvSnapshot, LoadReport, WorkerInfo, decode_from_worker, encode
from kvrelay.router.decision.router import Router
from kvrelay.router.index.prefix_index import PrefixIndex
from kvrelay.router.types import Decision, RouteRequest
from kvrelay.settings.router import RouterSettings
from kvrelay.types import Fingerprint

BLOCK_SIZE = 16
FINGERPRINT = Fingerprint(1, "m", "bfloat16", BLOCK_SIZE, 2, 2, 8, "seed")
ROUNDS = 3
EVENTS = ((4, 2000), (128, 200))
"""(blocks in one event, number of events)."""

Chain = tuple[bytes, ...]


def hashes(chain: list[int]) -> Chain:
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


def build(made: Contents) -> Router:
    """A router whose workers hold that, with loads as they may be."""
    rng = random.Random(len(made.held))
    router = Router(RouterSettings(), tokens_per_hash=BLOCK_SIZE)
    for index, chains in enumerate(made.held):
        info = worker(index)
        router.worker_up(info)
        held = [one for chain in chains for one in hashes(chain)]
        router.apply_snapshot(info.worker_id, KvSnapshot(seq=0, hashes=held))
        report = LoadReport(
            seq=1,
            running=rng.randrange(32),
            queued_tokens=rng.randrange(8000),
            free_blocks=200_000,
            total_blocks=400_000,
        )
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


class Other:
    """The child process with Dynamo's index."""

    def __init__(self, python: str) -> None:
        root = Path(__file__).resolve().parents[2]
        settings = os.environ | {"DYN_LOG": "error", "DYN_ROUTER_USE_KV_EVENTS": "false"}
        self._child = subprocess.Popen(
            [python, "-m", "bench.router.dynamo"],
            cwd=root,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=settings,
        )

    def query(self, do: str, **fields: Any) -> Any:
        assert self._child.stdin is not None and self._child.stdout is not None
        self._child.stdin.write(json.dumps({"do": do, **fields}) + "\n")
        self._child.stdin.flush()
        return json.loads(self._child.stdout.readline())

    def close(self) -> None:
        self._child.kill()
        self._child.wait()


def lookups(
    made: Contents, router: Router, count: int, other: Other | None, their_first: list[float], clock: Clock
) -> None:
    """One line of the first table. `their_first`: nanoseconds."""
    prompts = [hashes(prompt) for prompt in made.prompts]
    depths = router.index.depths
    first = timed_us(lambda i: depths(prompts[i]), len(prompts), clock)
    again, bare, read = [], [], []
    timed_us(lambda i: depths(prompts[i % len(prompts)]), 10 * len(prompts))  # until all scattered blocks have moved
    for _ in range(ROUNDS):
        again += timed_us(lambda i: depths(prompts[i % len(prompts)]), count, clock)
        if other is not None:
            found = other.query("find", count=count)
            bare += [one / 1e3 for one in found["bare"]]
            read += [one / 1e3 for one in found["read"]]

    def decide(index: int) -> None:
        hashed = prompts[index % len(prompts)]
        request = RouteRequest(f"r{index}", hashed, len(hashed) * BLOCK_SIZE, 256)
        now_s[0] += 0.01
        choice = router.select_and_reserve(request, now_s[0])
        assert isinstance(choice, Decision), choice
        router.on_first_token(request.request_id, now_s[0])
        router.on_end(request.request_id)

    now_s, whole, theirs = [0.0], [], []
    timed_us(decide, 2 * len(prompts))
    if other is not None:
        other.query("decide", count=2 * len(prompts))
    for _ in range(ROUNDS):
        whole += timed_us(decide, count, clock)
        if other is not None:
            theirs += [one / 1e3 for one in other.query("decide", count=count)["whole"]]
    line = f" {statistics.median(first):>7.0f} {cuts(again)}"
    if other is not None:
        line += f" {statistics.median(their_first) / 1e3:>7.0f} {cuts(bare)} {cuts(read)}"
        line += f" {statistics.median(bare) / statistics.median(again):>6.1f}"
    line += f" {cuts(whole)} {1e6 / statistics.mean(whole):>8.0f}"
    print(line + (f" {cuts(theirs)}" if other is not None else ""), flush=True)


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
    num_workers: int,
    tokens: int,
    shared: bool,
    count: int,
    other: Other | None,
    clock: Clock = time.perf_counter_ns,
) -> None:
    blocks = tokens // BLOCK_SIZE
    made = contents(num_workers, blocks, shared=shared, seed=0)
    router = build(made)
    their_first: list[float] = []
    if other is not None:
        theirs = other.query("build", num_workers=num_workers, prompt_blocks=blocks, shared=shared, seed=0)
        ours = [router.index.match(hashes(prompt)) for prompt in made.prompts]
        assert ours == theirs["depths"], "the two indexes do not find the same"
        their_first = theirs["first"]
        other.query("workers", num_workers=num_workers)
        router = build(made)  # nothing has been looked up in it
    print(f"{num_workers:>7} {tokens:>7} {'shared' if shared else 'own':>6}", end="")
    lookups(made, router, count, other, their_first, clock)
    seqs = [0] * num_workers
    for num_blocks, num_events in EVENTS if tokens < 10_000 else ():
        mine = 2 * num_events / event_rate(router, seqs, num_events, num_blocks, clock)
        line = f"{'':>7} events of {num_blocks} blocks: {mine:>9.0f} events/s"
        if other is not None:
            asked = {"num_workers": num_workers, "num_events": num_events, "num_blocks": num_blocks, "seed": 1}
            line += f", Dynamo {2 * num_events / other.query('ingest', **asked)['seconds']:>9.0f}"
        print(line, flush=True)


def used_bytes(index: PrefixIndex) -> int:
    """Of all that was allocated since tracemalloc was started."""
    return tracemalloc.get_traced_memory()[0] + index.native_bytes


def memory(num_blocks: int = 100_000) -> None:
    """Bytes of the index for each block and worker that holds it; and after many workers have come and gone."""
    rng = random.Random(0)
    print(f"{'sharing':>8} {'B/block':>8} {'B/(block, worker)':>18}")
    for num_workers in (1, 8, 64):
        chain = [rng.randbytes(16) for _ in range(num_blocks)]
        tracemalloc.start()
        index = PrefixIndex()
        for name in range(num_workers):
            index.add_worker(str(name), max_blocks=num_blocks)
            index.apply_snapshot(str(name), 0, [bytes(bytearray(one)) for one in chain])
        index.depths(chain)
        used = used_bytes(index)
        tracemalloc.stop()
        print(f"{num_workers:>8} {used / num_blocks:>8.1f} {used / num_blocks / num_workers:>18.1f}")
    churn(num_blocks // 10)


def churn(num_blocks: int) -> None:
    """A worker stays; hundreds with blocks of their own come, publish events, and leave."""
    rng = random.Random(1)
    tracemalloc.start()
    index = PrefixIndex()

    def come(name: str) -> None:
        index.add_worker(name, max_blocks=num_blocks)
        index.apply_snapshot(name, 0, [rng.randbytes(16) for _ in range(num_blocks)])

    come("stays")
    before = used_bytes(index)
    for number in range(200):
        come(str(number))
    most, most_blocks = used_bytes(index), len(index)
    for number in range(200):
        index.remove_worker(str(number))
    after = used_bytes(index)
    tracemalloc.stop()
    print(
        f"{len(index)} blocks: {before / 1e6:.2f} MB; with {most_blocks}: {most / 1e6:.2f} MB; "
        f"those gone: {after / 1e6:.2f} MB"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[8, 64, 512, 4096])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1000, 100_000])
    parser.add_argument("--requests", type=int, default=400, help="in each of the rounds")
    parser.add_argument("--dynamo", metavar="PYTHON", help="measure its index, too")
    parser.add_argument("--memory", action="store_true", help="bytes for each block instead")
    parser.add_argument(
        "--cpu-time", action="store_true", help="of our thread, which waits for other programs are no part of"
    )
    options = parser.parse_args()
    clock = time.thread_time_ns if options.cpu_time else time.perf_counter_ns
    if options.memory:
        memory()
        return
    other = Other(options.dynamo) if options.dynamo else None
    head = f"{'workers':>7} {'tokens':>7} {'held':>6} {'first':>7} {'lookup':>7} {'p99':>7}"
    head += f" {'first':>7} {'bare':>7} {'p99':>7} {'read':>7} {'p99':>7} {'ratio':>6}" if other else ""
    head += f" {'decision':>7} {'p99':>7} {'a second':>8}" + (f" {'theirs':>7} {'p99':>7}" if other else "")
    print(head)
    try:
        for num_workers in options.workers:
            for tokens in options.tokens:
                for shared in (False, True):
                    cell(num_workers, tokens, shared, options.requests, other, clock)
    finally:
        if other is not None:
            other.close()


if __name__ == "__main__":
    main()
