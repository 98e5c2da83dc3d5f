"""Routing with real workers: hit tokens as the workers report them against an oracle, and what the index claimed
wrongly.

    python -m bench.router.live_routing [--policies joint round_robin prefix_affinity] [--model M | --tiny] [--prefill
    2] [--decode 2]
                                 [--requests 30] [--rate 2.0] [--kv-memory 96MiB] [--seed 0] [--json FILE]

2 prefill workers (processes) and 2 decode workers (in this process) without Ray, behind one ingress without HTTP. The
load is made of conversations behind shared system prompts, arriving at their times whatever is under way; every policy
gets the same, from empty caches. Columns, in prompt tokens that need not be computed, as a share of all prompt tokens:

    requests    that got a first token
    hits        as the workers report them with the first token
    held        what the chosen worker held, by its own word, when the request was routed
    chosen      what its pool could have given: every prompt routed there before, least recently used first out
    best        what any worker's could have
    short       requests that hit less than `chosen`, and by how many tokens in all

The oracle follows the decisions, so a policy that scatters a conversation lowers its own `best`. It counts a prompt
from its routing at the worker that computes it, since later requests begin later, and at a decode worker from the
arrival of its KV.

The second table is of the index: how often it was wrong, and by how many tokens in all; + too many, - too few. A claim
is of one prompt at one worker, so each decision looks at as many as there are workers (see index_watch.py).

    fault       of claims: the index differs from what the worker holds with every event in. No matter of time; there
    must be none
    late        of claims: nothing is wrong with them but that an event was on its way when the request was routed
    begun       of requests: the chosen worker's pool had less, or more, when the prefill began than the router expected
    on the way  of those with less: what the index said was there, and what was missing was being computed for others

Takes about two minutes: requests that have not ended 12 s after the last arrival are given up and count as failed. On a
machine with other work the times mean little, the counts remain what they are.

At the end of each run an ingress starts anew beside one that has seen everything since the beginning: after how many ms
are all its workers EXACT, do both know the same blocks, and do both route each prompt of the run alike (the same
workers, or others at the same cost)? Ends with exit code 1 where they do not, or where the index is at fault.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.engine.inprocess import count_weights, prepare
from bench.figures import machine, show
from bench.router.hit_figures import Recent, Routed, Tally
from bench.router.index_watch import IndexWatch
from kvrelay.cluster.launch.local import LocalCluster, local_cluster
from kvrelay.cluster.workloads.sessions import SessionSpec, generate
from kvrelay.cluster.workloads.trace import TraceEntry, at_rate, scale_entries, with_own_blocks
from kvrelay.config import Settings, settings_from
from kvrelay.engine.checkpoints.tiny import tiny_checkpoint
from kvrelay.errors import KvrelayError
from kvrelay.hashing import block_hashes
from kvrelay.plane.messages import Sampling, SequenceRequest
from kvrelay.router.types import Decision, IndexState, RouteRequest, RoutingRefusal
from kvrelay.serve.requests.dispatcher import Dispatcher
from kvrelay.serve.telemetry.explain import Explain

BLOCK = 16
LENGTH_SCALE = BLOCK / 512
LATE_S = 12.0  # after the last arrival the run ends
SESSIONS = SessionSpec(
    sessions_per_s=1.0, one_off_share=0.2, first_continues=0.8, think_s=(8.0, 0.5), user_tokens=(1600.0, 0.8),
    document_tokens=(12000.0, 0.5), output_tokens=(400.0, 0.3), num_apps=6, system_tokens=(12000.0, 0.4),
    max_input_tokens=48_000,
)  # fmt: skip


class Run:
    """The same load through one policy."""

    def __init__(self, dispatcher: Dispatcher, entries: Sequence[TraceEntry], vocab_size: int) -> None:
        self._dispatcher, self._entries, self._vocab_size = dispatcher, entries, vocab_size
        self.pools = {info.worker_id: Recent(info.num_blocks) for info, _ in dispatcher.workers.live_workers()}
        self.tally = Tally(BLOCK)
        self.asked: list[RouteRequest] = []
        self._prompts: dict[str, SequenceRequest] = {}
        self._routed: dict[str, Routed] = {}
        self._cached: dict[str, int] = {}  # by attempt, as the worker says, with a first token
        self._watch = IndexWatch(dispatcher, self._decided, self._arrived)

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
        await self._watch.settled()
        found = self._watch.found
        for looks in found.values():
            self.tally.claimed(list(looks.values()))
        for attempt, cached in self._cached.items():
            routed = self._routed[attempt]
            self.tally.began(routed, found.get(attempt, {}).get(routed.worker), cached)
        return self.tally

    async def _one(self, number: int, entry: TraceEntry) -> None:
        request = self._request(number, entry)
        explain = Explain(time.monotonic())
        stream = self._dispatcher.generate(request, explain=explain)
        num_output = 0
        try:
            async for output in stream:
                if not num_output:
                    attempt = explain.decisions[-1].request_id
                    self._cached[attempt] = explain.cached_tokens
                    self.tally.answered(self._routed[attempt], len(request.token_ids), explain)
                num_output += len(output.token_ids)
        finally:
            await stream.aclose()
        decode = explain.decisions[-1].decode
        if decode is not None:  # what it wrote takes room in the pool, too
            num_blocks = (len(request.token_ids) + num_output) // BLOCK - len(request.block_hashes)
            self.pools[decode].add([*request.block_hashes, *((number, index) for index in range(num_blocks))])

    def _decided(self, decision: Decision) -> None:
        """From now on the prompt counts as in the pool of the worker that computes it: later requests begin later."""
        request = self._prompts[decision.request_id.partition("~")[0]]
        chain, usable = request.block_hashes, (len(request.token_ids) - 1) // BLOCK
        depths = {worker: min(usable, pool.depth(chain)) * BLOCK for worker, pool in self.pools.items()}
        routed = Routed(decision, 0, max(depths.values()))
        self._routed[decision.request_id] = replace(routed, chosen=depths[routed.worker])
        self.pools[routed.worker].add(chain)

    def _arrived(self, attempt: str) -> None:
        """Its decode worker has the KV of the whole prompt."""
        routed, request = self._routed.get(attempt), self._prompts.get(attempt.partition("~")[0])
        if routed is not None and routed.decision.decode is not None and request is not None:
            self.pools[routed.decision.decode].add(request.block_hashes)

    def _request(self, number: int, entry: TraceEntry) -> SequenceRequest:
        tokens = [token for block in entry.hash_ids for token in _words(block, self._vocab_size)][: entry.input_tokens]
        hashes = block_hashes(tokens, BLOCK)
        self.asked.append(RouteRequest(f"again{number}", tuple(hashes), len(tokens), entry.output_tokens))
        request = self._prompts[f"r{number}"] = SequenceRequest(
            request_id=f"r{number}", token_ids=tokens, num_prompt_tokens=len(tokens), block_hashes=list(hashes),
            sampling=Sampling(max_tokens=max(2, entry.output_tokens), temperature=0.0, ignore_eos=True),
        )  # fmt: skip
        return request


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
        for (
            worker,
            _,
        ) in dispatcher.workers.live_workers():  # the load that followed the snapshot is here with the answer
            await dispatcher.queries.status(worker.worker_id)
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
        return (
            isinstance(first, RoutingRefusal) and isinstance(second, RoutingRefusal) and first.reason == second.reason
        )
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
    tallies, restarts = [], []
    async with local_cluster(settings, folder, num_prefill=options.prefill, num_inside=options.decode) as cluster:
        await _warm_up(cluster.dispatcher, vocab_size)
        for policy in options.policies:
            own = settings_from(sections | {"router": {"policy": policy}})
            async with cluster.another_ingress(own) as dispatcher:
                for info, _ in dispatcher.workers.live_workers():
                    await dispatcher.queries.reset_cache(info.worker_id)
                async with asyncio.timeout(30):
                    while any(view.indexed_blocks for view in dispatcher.router.workers()):
                        await asyncio.sleep(0.01)
                run = Run(dispatcher, entries, vocab_size)
                tallies.append(await run.play())
            await _quiet(cluster.dispatcher)
            restarts.append(await restart(cluster, settings, run.asked))
    total = sum(entry.input_tokens for entry in entries)
    title = f"{folder.name}: {len(entries)} requests, {total} prompt tokens, {options.rate:g} requests/s"
    named = list(zip(options.policies, tallies, strict=True))
    show(title, [tally.row(policy) for policy, tally in named])
    show("The index", [tally.index_row(policy) for policy, tally in named])
    if options.json is not None:
        rows = [tally.row(name) | tally.index_row(name) | {"odd": tally.odd} for name, tally in named]
        options.json.write_text(json.dumps({"title": title, "machine": machine(), "rows": rows}, indent=1) + "\n")
    for policy, one in zip(options.policies, restarts, strict=True):
        print(
            f"restart after {policy}: EXACT in {one.exact_ms:.0f} ms, {one.blocks} blocks "
            f"{'as' if one.same_blocks else 'NOT AS'} one that never restarted, "
            f"{one.same_choices} of {one.prompts} prompts routed alike"
        )
    return all(one.is_good for one in restarts) and all(tally.is_sound for tally in tallies)


async def _quiet(dispatcher: Dispatcher) -> None:
    """Nothing is computed any more, and the last events have arrived."""
    async with asyncio.timeout(60):
        while any(
            load.running + load.waiting + load.receiving + load.held for _, load in dispatcher.workers.live_workers()
        ):
            await asyncio.sleep(0.05)
    await asyncio.sleep(0.5)


async def _warm_up(dispatcher: Dispatcher, vocab_size: int) -> None:
    """Every worker has computed prompts and every pair has moved KV before anything is counted."""
    async with asyncio.timeout(60):
        await dispatcher.workers.wait_for(lambda d: d.pairs.book.is_settled())
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
