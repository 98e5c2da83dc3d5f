"""Whether a tenant can measure what another tenant's cache holds: times to first token of right and of wrong guesses.

    python -m bench.serving.tenants [--guesses 1000] [--tokens 400] [--json FILE]

One worker with a small random model. Tenant a has asked every prompt. Then, in turns: tenant b guesses one of a's
prompts, with a's cache_salt; b guesses a prompt that was never asked; a asks again, as a control. The noise is the
difference between two halves of the wrong guesses, and the standard error of a difference of means.
"""

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from pathlib import Path

from bench.figures import show
from kvrelay.cluster.launch.local import LocalCluster, local_cluster
from kvrelay.config import settings_from
from kvrelay.engine.checkpoints.tiny import tiny_checkpoint
from kvrelay.hashing import block_hashes
from kvrelay.plane.messages import Sampling, SequenceRequest
from kvrelay.serve.tenants.access import Access, Caller
from kvrelay.serve.tenants.key_file import TenantEntry, file_text, key_hash

BLOCK = 16
LARGER = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4}  # computing a prompt takes time
SETTINGS = {
    "model": {"dtype": "float32", "max_model_len": 1024},
    "engine": {"kv_memory": "2GiB", "num_threads": 1, "block_size": BLOCK},
}


async def ttft_ms(cluster: LocalCluster, caller: Caller, prompt: list[int], name: str, cache_salt: str) -> float:
    """Of one request of this tenant."""
    salt = caller.salt(cache_salt)
    hashes = list(block_hashes(prompt, BLOCK, salt))
    sampling = Sampling(max_tokens=1, temperature=0.0)
    size = len(prompt)
    request = SequenceRequest(
        request_id=name, token_ids=prompt, num_prompt_tokens=size, block_hashes=hashes, sampling=sampling, salt=salt
    )
    began_s = time.perf_counter()
    async for _ in cluster.dispatcher.generate(request):
        return 1000 * (time.perf_counter() - began_s)
    raise AssertionError("no token")


async def measure(num_guesses: int, num_tokens: int) -> dict[str, list[float]]:
    """Milliseconds, by kind of guess."""
    draw = random.Random(0)
    prompts, wrong = ([draw.choices(range(3, 200), k=num_tokens) for _ in range(num_guesses)] for _ in range(2))
    found: dict[str, list[float]] = {"b, right": [], "b, wrong": [], "a again": []}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "keys.yaml"
        file.write_text(file_text(TenantEntry(name=name, key_sha256=key_hash(name)) for name in "ab"))
        model = tiny_checkpoint("llama", Path(folder) / "model", **LARGER)
        async with local_cluster(settings_from(SETTINGS), model, num_prefill=0, num_inside=1) as cluster:
            access = Access(None, str(file), cluster.secret)
            a, b = access.caller("a"), access.caller("b")
            for index, prompt in enumerate(prompts):
                await ttft_ms(cluster, a, prompt, f"a{index}", str(index))
            for index, (prompt, other) in enumerate(zip(prompts, wrong, strict=True)):
                kinds = [("b, right", b, prompt), ("b, wrong", b, other), ("a again", a, prompt)]
                for kind, caller, tokens in draw.sample(kinds, k=3):
                    found[kind].append(await ttft_ms(cluster, caller, tokens, f"{kind} {index}", str(index)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--guesses", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=400, help="of each prompt")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = asyncio.run(measure(args.guesses, args.tokens))
    wrong = found["b, wrong"]
    halves = [statistics.fmean(wrong[first::2]) for first in (0, 1)]
    rows = [
        {
            "guess": kind,
            "mean ms": statistics.fmean(times),
            "median ms": statistics.median(times),
            "mean minus wrong's": statistics.fmean(times) - statistics.fmean(wrong),
            "standard error": ((statistics.variance(times) + statistics.variance(wrong)) / len(times)) ** 0.5,
        }
        for kind, times in found.items()
    ]
    rows.append({"guess": "b, wrong: half minus half", "mean minus wrong's": halves[0] - halves[1]})
    show(f"TTFT of {args.guesses} guesses of each kind, {args.tokens} tokens", rows, args.json)


if __name__ == "__main__":
    main()
