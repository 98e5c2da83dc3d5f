"""Routing with real workers: hit tokens as the workers report them against an oracle, and what the index claimed wrongly.

    python bench/live_routing.py [--policies joint round_robin prefix_affinity] [--model M | --tiny] [--prefill 2] [--decode 2]
                                 [--requests 30] [--rate 2.0] [--kv-memory 96MiB] [--seed 0] [--json FILE]

2 prefill workers (processes) and 2 decode workers (in this process) without Ray, behind one ingress without HTTP. The load is made of
conversations behind shared system prompts, arriving at their times whatever is under way; every policy gets the same, from empty
caches. Columns, in prompt tokens that need not be computed, as a share of all prompt tokens:

    requests    that got a first token
    hits        as the workers report them with the first token
    chosen      what the chosen worker's pool could have given: all prompts that it had got before, least recently used first out
    best        what any worker's could have, when the request was routed
    more,       requests for which the router expected more, or fewer, cached tokens than the worker then had, and by how many
    fewer       tokens in all; it also expects what is about to be computed for others

The oracle follows the decisions, so a policy that scatters a conversation lowers its own `best`. It knows nothing of time, and
counts a block as soon as its prompt is computed.

Takes about two minutes: requests that have not ended 12 s after the last arrival are given up and count as failed. On a machine
with other work the times mean little, the counts remain what they are.

At the end of each run an ingress starts anew beside one that has seen everything since the beginning: after how many ms are all its
workers EXACT, do both know the same blocks, and do both route each prompt of the run alike (the same workers, or others at the same
cost)? Ends with exit code 1 where they do not.
"""

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from figures import show
from inprocess import count_weights, prepare

from kvrelay.cluster.loadgen_sessions import SessionSpec, generate
from kvrelay.cluster.local import LocalCluster, local_cluster
from kvrelay.cluster.workloads.trace import TraceEntry, at_rate, scale_entries, with_own_blocks
from kvrelay.config import Settings, settings_from
from kvrelay.engine.checkpoint_tiny import tiny_checkpoint
from kvrelay.errors import KvrelayError
from kvrelay.hashing import block_hashes
from kvrelay.router.types import Decision, IndexState, Refusal, RouteRequest
from kvrelay.serve.dispatcher import Dispatcher
from kvrelay.serve.explain import Explain
from kvrelay.wire import Sampling, SequenceRequest

BLOCK = 16
LENGTH_SCALE = BLOCK / 512
LATE_S = 12.0  # after the last arrival nobody is waited for any longer
SESSIONS = SessionSpec(
    sessions_per_s=1.0, one_off_share=0.2, first_continues=0.8, think_s=(8.0, 0.5), user_tokens=(1600.0, 0.8),
    document_tokens=(12000.0, 0.5), output_tokens=(400.0, 0.3), num_apps=6, system_tokens=(12000.0, 0.4),
    max_input_tokens=48_000,
)  # fmt: skip


class Recent:
    """Blocks of one pool, the least recently used first out; of a prompt its end before its beginning."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._blocks: OrderedDict[object, None] = OrderedDict()

    def depth(self, chain: Sequence[bytes]) -> int:
        """Leading blocks of it that are here."""
        return next((index for index, block in enumerate(chain) if block not in self._blocks), len(chain))

    def add(self, chain: Sequence[object]) -> None:
        for block in reversed(chain):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)


@dataclass(slots=True)
class Tally:
    """One policy's requests. Tokens."""

    prompt: int = 0
    hits: int = 0
    chosen: int = 0
    best: int = 0
    too_many: list[int] = field(default_factory=list)  # by how many, for each such request
    too_few: list[int] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)
    local: int = 0
    failed: int = 0
    retried: int = 0

    def row(self, policy: str) -> dict[str, Any]:
        def share(tokens: int) -> str:
            return f"{tokens / max(1, self.prompt):.1%}"

        times = sorted(self.ttft_s)
        return {
            "policy": policy, "requests": len(times), "hits": share(self.hits), "chosen": share(self.chosen),
            "best": share(self.best), "of best": f"{self.hits / max(1, self.best):.1%}",
            "more": f"{len(self.too_many)} ({sum(self.too_many)})",
            "fewer": f"{len(self.too_few)} ({sum(self.too_few)})",
            "local": self.local, "TTFT s": times[len(times) // 2] if times else None,
            "p90": times[int(0.9 * len(times))] if times else None, "failed": self.failed, "retried": self.retried,
        }  # fmt: skip


class Run:
    """The same load through one policy."""

    def __init__(self, dispatcher: Dispatcher, entries: Sequence[TraceEntry], vocab_size: int) -> None:
        self._dispatcher, self._entries, self._vocab_size = dispatcher, entries, vocab_size
        self.pools = {info.worker_id: Recent(info.num_blocks) for info, _ in dispatcher.live_workers()}
        self.tally = Tally()
        self.asked: list[RouteRequest] = []

    async def play(self) -> Tally:
        began_s = time.monotonic()
        tasks = []
        for number, entry in enumerate(self._entries):
            await asyncio.sleep(max(0.0, began_s + entry.arrival_s - time.monotonic()))
            tasks.append(asyncio.create_task(self._one(number, entry)))
        _, late = await asyncio.wait(tasks, timeout=LATE_S)
        for task in late:
            task.cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(outcome, BaseException):
                self.tally.failed += 1
                if isinstance(outcome, asyncio.CancelledError):
                    continue  # late
                if not isinstance(outcome, KvrelayError):
                    raise outcome
                print(f"failed: {outcome}", file=sys.stderr)
        return self.tally

    async def _one(self, number: int, entry: TraceEntry) -> None:
        request = self._request(number, entry)
        explain = Explain(time.monotonic())
        stream = self._dispatcher.generate(request, explain=explain)
        best, chain, num_output = 0, request.block_hashes, 0
        try:
            async for output in stream:
                if not num_output:
                    self._first_token(request, explain, best)
                num_output += len(output.token_ids)
        finally:
            await stream.aclose()
        decode = explain.decisions[-1].decode
        if decode is not None:  # what it wrote takes room in the pool, too
            num_blocks = (len(request.token_ids) + num_output) // BLOCK - len(chain)
            self.pools[decode].add([*chain, *((number, index) for index in range(num_blocks))])

    def _first_token(self, request: SequenceRequest, explain: Explain, best: int) -> None:
        """Note what was hit, and what could have been."""
        decision, chain, tally = explain.decisions[-1], request.block_hashes, self.tally
        usable = (len(request.token_ids) - 1) // BLOCK
        computing = decision.prefill or decision.decode
        assert computing is not None
        chosen = min(usable, self.pools[computing].depth(chain)) * BLOCK
        best = max(min(usable, pool.depth(chain)) * BLOCK for pool in self.pools.values())
        for worker in filter(None, (decision.prefill, decision.decode)):
            self.pools[worker].add(chain)
        tally.prompt += len(request.token_ids)
        tally.hits += explain.cached_tokens
        tally.chosen += chosen
        tally.best += best
        tally.local += decision.path == "local"
        tally.ttft_s.append(explain.ttft_us() / 1e6)
        if len(explain.decisions) > 1:
            tally.retried += 1
            return
        wrong = decision.cached_tokens_prefill - explain.cached_tokens
        if wrong:
            (tally.too_many if wrong > 0 else tally.too_few).append(abs(wrong))

    def _request(self, number: int, entry: TraceEntry) -> SequenceRequest:
        tokens = [token for block in entry.hash_ids for token in _words(block, self._vocab_size)][: entry.input_tokens]
        hashes = block_hashes(tokens, BLOCK)
        self.asked.append(RouteRequest(f"again{number}", tuple(hashes), len(tokens), entry.output_tokens))
        return SequenceRequest(
            request_id=f"r{number}", token_ids=tokens, num_prompt_tokens=len(tokens), block_hashes=list(hashes),
            sampling=Sampling(max_tokens=max(2, entry.output_tokens), temperature=0.0, ignore_eos=True),
        )  # fmt: skip


def _words(block: int, vocab_size: int) -> list[int]:
    """The tokens that a block of this id stands for."""
    return random.Random(f"block:{block}").choices(range(3, vocab_size), k=BLOCK)


def load(count: int, rate_per_s: float, seed: int) -> list[TraceEntry]:
    entries = with_own_blocks(generate(replace(SESSIONS, seed=seed), count))
    return scale_entries(at_rate(entries, rate_per_s), length_scale=LENGTH_SCALE)


@dataclass(frozen=True, slots=True)
class Restart:
    """What an ingress that started anew has in common with one that did not."""

    exact_ms: float
    blocks: int
    same_blocks: bool
    prompts: int
    same_choices: int

    @property
    def is_good(self) -> bool:
        return self.same_blocks and self.same_choices == self.prompts


async def restart(cluster: LocalCluster, settings: Settings, asked: Sequence[RouteRequest]) -> Restart:
    """Start another ingress while all is quiet; compare it with the one that has been there since the beginning."""
    began_s = time.perf_counter()
    async with cluster.another_ingress(settings) as dispatcher, asyncio.timeout(30):
        while any(view.index_state is not IndexState.EXACT for view in dispatcher.router.workers()):
            await asyncio.sleep(0.001)
        exact_s = time.perf_counter() - began_s
        for worker, _ in dispatcher.live_workers():  # the load that followed the snapshot is here with the answer
            await dispatcher.status(worker.worker_id)
        held = [
            {view.worker_id: view.indexed_blocks for view in one.router.workers()}
            for one in (cluster.dispatcher, dispatcher)
        ]
        alike = sum(_alike(cluster.dispatcher, dispatcher, request) for request in asked)
        return Restart(1e3 * exact_s, sum(held[0].values()), held[0] == held[1], len(asked), alike)


def _alike(one: Dispatcher, other: Dispatcher, request: RouteRequest) -> bool:
    """The same workers; or the same cost, where it is all the same which."""
    found = []
    for dispatcher in (one, other):
        choice = dispatcher.router.select_and_reserve(request, time.monotonic())
        dispatcher.router.on_end(request.request_id)
        found.append(choice)
    first, second = found
    if not isinstance(first, Decision) or not isinstance(second, Decision):
        return isinstance(first, Refusal) and isinstance(second, Refusal) and first.reason == second.reason
    same_workers = (first.prefill, first.decode) == (second.prefill, second.decode)
    is_alike = same_workers or abs(first.score - second.score) < 1e-6
    if not is_alike:
        for choice in found:
            print(
                f"not alike: {choice.prefill} {choice.decode} {choice.score:.6f} {choice.policy_terms}", file=sys.stderr
            )
    return is_alike


async def compare(options: argparse.Namespace, folder: Path) -> bool:
    entries, vocab_size = load(options.requests, options.rate, options.seed), count_weights(folder).vocab_size
    sections: dict[str, Any] = {
        "model": {"dtype": "float32" if options.tiny else "bfloat16"},
        "engine": {"kv_memory": options.kv_memory, "num_threads": 1, "block_size": BLOCK},
    }
    settings = settings_from(sections)
    rows, restarts = [], []
    async with local_cluster(settings, folder, num_prefill=options.prefill, num_inside=options.decode) as cluster:
        await _warm_up(cluster.dispatcher, vocab_size)
        for policy in options.policies:
            own = settings_from(sections | {"router": {"policy": policy}})
            async with cluster.another_ingress(own) as dispatcher:
                for info, _ in dispatcher.live_workers():
                    await dispatcher.reset_cache(info.worker_id)
                async with asyncio.timeout(30):
                    while any(view.indexed_blocks for view in dispatcher.router.workers()):
                        await asyncio.sleep(0.01)
                run = Run(dispatcher, entries, vocab_size)
                rows.append((await run.play()).row(policy))
            await _quiet(cluster.dispatcher)
            restarts.append(await restart(cluster, settings, run.asked))
    total = sum(entry.input_tokens for entry in entries)
    title = f"{folder.name}: {len(entries)} requests, {total} prompt tokens, {options.rate:g} requests/s"
    show(title, rows, options.json)
    for policy, one in zip(options.policies, restarts, strict=True):
        print(
            f"restart after {policy}: EXACT in {one.exact_ms:.0f} ms, {one.blocks} blocks "
            f"{'as' if one.same_blocks else 'NOT AS'} one that never restarted, "
            f"{one.same_choices} of {one.prompts} prompts routed alike"
        )
    return all(one.is_good for one in restarts)


async def _quiet(dispatcher: Dispatcher) -> None:
    """Nothing is computed any more, and the last news have arrived."""
    async with asyncio.timeout(60):
        while any(load.running + load.waiting + load.receiving + load.held for _, load in dispatcher.live_workers()):
            await asyncio.sleep(0.05)
    await asyncio.sleep(0.5)


async def _warm_up(dispatcher: Dispatcher, vocab_size: int) -> None:
    """Every worker has computed prompts and every pair has moved KV before anything is counted."""
    async with asyncio.timeout(60):
        await dispatcher.wait_for(lambda d: d.pairs.book.is_settled())
    run = Run(
        dispatcher, [TraceEntry(0.0, 200, 4, tuple(range(100 * n, 100 * n + 13)), BLOCK) for n in range(12)], vocab_size
    )
    await run.play()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", nargs="+", default=["joint", "round_robin", "prefix_affinity"])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--tiny", action="store_true", help="random weights of a tiny model: all but the speed is real")
    parser.add_argument("--prefill", type=int, default=2)
    parser.add_argument("--decode", type=int, default=2)
    parser.add_argument("--requests", type=int, default=30)
    parser.add_argument("--rate", type=float, default=2.0, help="requests per second")
    parser.add_argument("--kv-memory", default="96MiB", help="of each worker")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = tiny_checkpoint("llama", Path(scratch) / "tiny-llama") if options.tiny else prepare(options.model)
        return 0 if asyncio.run(compare(options, folder)) else 1


if __name__ == "__main__":
    sys.exit(main())
