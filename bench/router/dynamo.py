"""The other side of bench/router/decision.py --dynamo: Dynamo's index (`dynamo._core.RadixTree`) and its selection of a
worker (`dynamo._core.SelectionService`), asked over stdin and stdout in JSON.

Run by the Python of an environment with ai-dynamo-runtime; imports nothing of ours but the contents beside this file.
"""

import asyncio
import json
import random
import sys
import time
from typing import Any

from dynamo._core import RadixTree, SelectionService

from bench.router.contents import Chain, contents, fresh

BLOCK_SIZE = 16


class Dynamo:
    """One index and one selection service, built anew for each cell."""

    def __init__(self) -> None:
        self.tree: Any = None
        self.prompts: list[Chain] = []
        self.events = 0
        self.service: Any = None
        self.requests = 0

    def build(self, num_workers: int, prompt_blocks: int, shared: bool, seed: int) -> dict[str, Any]:
        """Store what every worker holds. Returns the depths that it finds, and nanoseconds of each prompt's first
        lookup.
        """
        self.tree = RadixTree()
        made = contents(num_workers, prompt_blocks, shared=shared, seed=seed)
        self.prompts = made.prompts
        for worker, chains in enumerate(made.held):
            for chain in chains:
                self.tree.apply_event(worker, self.stored(chain))
        self.tree.find_matches([0], False)  # after all events: they are applied by a thread of its own
        first = self.find(len(self.prompts))["bare"]
        return {"depths": [self.scores(prompt) for prompt in self.prompts], "first": first}

    def stored(self, chain: Chain) -> bytes:
        """An event of its format: a whole chain, from the root on."""
        blocks = [{"block_hash": one, "tokens_hash": one, "mm_extra_info": None} for one in chain]
        return self.event({"stored": {"parent_hash": None, "blocks": blocks}})

    def event(self, data: dict[str, Any]) -> bytes:
        self.events += 1
        return json.dumps({"event_id": self.events, "data": data, "dp_rank": 0}).encode()

    def scores(self, prompt: Chain) -> dict[str, int]:
        found = self.tree.find_matches(prompt, False).scores
        return {str(key[0] if isinstance(key, tuple) else key): depth for key, depth in found.items()}

    def find(self, count: int) -> dict[str, Any]:
        """Nanoseconds of each lookup: the call alone, and with the scores read into a dict."""
        bare, read = [], []
        for index in range(count):
            prompt = self.prompts[index % len(self.prompts)]
            began = time.perf_counter_ns()
            found = self.tree.find_matches(prompt, False)
            between = time.perf_counter_ns()
            found.scores  # noqa: B018
            read.append(time.perf_counter_ns() - began)
            bare.append(between - began)
        return {"bare": bare, "read": read}

    def workers(self, num_workers: int) -> dict[str, Any]:
        """A selection service of so many workers. It learns what they hold from its own decisions: events would need
        sockets.
        """
        asyncio.run(self._workers(num_workers))
        return {}

    async def _workers(self, num_workers: int) -> None:
        self.service = SelectionService(indexer_threads=1)
        for number in range(num_workers):
            await self.service.upsert_worker(
                {
                    "worker_id": number,
                    "model_name": "bench",
                    "endpoint": f"http://host{number}",
                    "block_size": BLOCK_SIZE,
                    "total_kv_blocks": 400_000,
                    "max_num_batched_tokens": 8192,
                }
            )

    def decide(self, count: int) -> dict[str, Any]:
        """Nanoseconds of each decision: select and reserve, prefill complete, free. It is given hashes, as ours is."""
        return {"whole": asyncio.run(self._decide(count))}

    async def _decide(self, count: int) -> list[int]:
        service, times = self.service, []
        for index in range(count):
            self.requests += 1
            chain, name = [one >> 1 for one in self.prompts[index % len(self.prompts)]], f"r{self.requests}"
            request = {
                "model_name": "bench",
                "selection_id": name,
                "block_hashes": chain,
                "sequence_hashes": chain,
                "isl_tokens": len(chain) * BLOCK_SIZE,
                "expected_output_tokens": 256,
            }
            began = time.perf_counter_ns()
            await service.select_and_reserve(request)
            await service.prefill_complete(name)
            await service.free_reservation(name)
            times.append(time.perf_counter_ns() - began)
        return times

    def ingest(self, num_workers: int, num_events: int, num_blocks: int, seed: int) -> dict[str, Any]:
        """Seconds for so many events that store a chain each and as many that remove it; encoded beforehand."""
        chains = fresh(random.Random(seed), num_events, num_blocks)
        stored = [self.stored(chain) for chain in chains]
        removed = [self.event({"removed": {"block_hashes": chain}}) for chain in chains]
        self.tree.find_matches(self.prompts[0], False)
        began = time.perf_counter()
        for events in (stored, removed):
            for index, event in enumerate(events):
                self.tree.apply_event(index % num_workers, event)
        self.tree.find_matches(self.prompts[0], False)  # after all of them: they are applied by a thread of its own
        return {"seconds": time.perf_counter() - began}


def main() -> None:
    dynamo = Dynamo()
    for line in sys.stdin:
        request = json.loads(line)
        answer = getattr(dynamo, request.pop("do"))(**request)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
