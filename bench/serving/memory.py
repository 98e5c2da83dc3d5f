"""Resident memory of a cluster's processes by what it is, after one kind of request after the other.

    python -m bench.serving.memory [--kv 64MiB] [--requests 1000]

Starts one ingress, one prefill and one decode worker with a tiny model of random weights, and sends each kind twice:
what grows with the first time alone has an end. Linux only.
"""

import argparse
import asyncio
import random
import re
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp

from bench.figures import show
from kvrelay.cluster.chaos.cluster import ServeCluster
from kvrelay.engine.checkpoints.tiny import tiny_checkpoint

DRAW, CLIENTS, SETTLE_S = random.Random(1), 16, 3.0
PARTS = ("prefill", "decode", "ingress", "registry")
_MAPPING = re.compile(r"([0-9a-f]+)-\S+ \S+ \S+ \S+ \S+ *(.*)")


def tokens(least: int, most: int) -> list[int]:
    return [DRAW.randrange(3, 250) for _ in range(DRAW.randint(least, most))]


def sampled() -> dict[str, Any]:
    """Odd sampling parameters."""
    odd = {
        "temperature": 2 * DRAW.random(),
        "top_k": DRAW.randint(1, 50),
        "min_p": DRAW.random(),
        "logprobs": 4,
        "n": 3,
    }
    odd |= {"stop": ["ab"], "prompt_logprobs": 2, "cache_salt": str(DRAW.random()), "logit_bias": {"9": 3.0}}
    return {"prompt": tokens(1, 300), **{key: value for key, value in odd.items() if DRAW.random() < 0.3}}


def malformed() -> dict[str, Any]:
    names = ("prompt", "n", "stop", "logit_bias", "max_tokens", "response_format", "structured_outputs", "x")
    values = (None, True, -1, 1 << 70, 0.5, "", "a" * 300, [], [[]], {}, {"type": "json_schema"}, {"regex": "("})
    return {"prompt": "a", **{name: DRAW.choice(values) for name in DRAW.sample(names, DRAW.randint(1, 3))}}


def constrained() -> dict[str, Any]:
    words = [f"{DRAW.random()}" for _ in range(DRAW.randint(1, 300))]
    return {"prompt": "a", "max_tokens": 30, "structured_outputs": {"choice": words}}


KINDS: dict[str, Callable[[], dict[str, Any]]] = {
    "short": lambda: {"prompt": [7] * 20},
    "long": lambda: {"prompt": tokens(900, 900)},
    "every length": lambda: {"prompt": tokens(1, 960), "max_tokens": DRAW.randint(1, 40)},
    "sampling": sampled,
    "malformed": malformed,
    "grammars": constrained,
    "clients leave": lambda: {"prompt": tokens(1, 200), "max_tokens": 200, "stream": True},
}


async def send(url: str, model: str, kind: str, count: int) -> Counter[int]:
    """Returns how often each status came."""
    bodies = [{"model": model, "max_tokens": 4, "ignore_eos": True} | KINDS[kind]() for _ in range(count)]
    found = Counter[int]()

    async def client() -> None:
        while bodies:
            async with session.post(f"{url}/v1/completions", json=bodies.pop()) as answer:
                found[answer.status] += 1
                if kind == "clients leave":
                    await answer.content.readany()
                    answer.close()
                else:
                    await answer.read()

    async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as group:
        for _ in range(CLIENTS):
            group.create_task(client())
    return found


def resident(pid: int) -> Counter[str]:
    """MiB of a process by what is mapped."""
    found, what = Counter[str](), ""
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if mapping := _MAPPING.fullmatch(line):
            name, is_arena = mapping[2], int(mapping[1], 16) % (64 << 20) == 0  # as glibc aligns its arenas
            memfd = "pools" if "kvrelay-pool" in name else "host tier, swap" if name.startswith("/memfd") else ""
            what = memfd or ("files" if name.startswith("/") else "malloc" if name or is_arena else "other anonymous")
        elif line.startswith("Rss:"):
            found["RSS"] += (size := int(line.split()[1]) / 1024)
            found[what] += size
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kv", default="64MiB", help="each worker's pool")
    parser.add_argument("--requests", type=int, default=1000, help="of each kind, each time")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = list[dict[str, Any]]()
    settings = {"model.max_model_len": 1024, "engine.num_threads": 1, "engine.kv_memory": options.kv}
    with TemporaryDirectory() as folder:
        model = str(tiny_checkpoint("llama", Path(folder) / "tiny"))
        with ServeCluster(model, {"ingress": 1, "prefill": 1, "decode": 1}, settings) as cluster:
            for kind in ("nothing", *(name for one in KINDS for name in (one, f"{one}, again"))):
                if kind != "nothing":
                    print(
                        kind,
                        dict(asyncio.run(send(cluster.url, cluster.model(), kind.split(",")[0], options.requests))),
                    )
                time.sleep(SETTLE_S)
                rows += [
                    {"after": kind, "process": part, **{name: round(size, 1) for name, size in resident(pid).items()}}
                    for part in PARTS
                    for pid in cluster.part(part)
                ]
    show("resident memory, MiB", rows, options.json)


if __name__ == "__main__":
    main()
