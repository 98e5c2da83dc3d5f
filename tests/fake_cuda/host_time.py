"""Host time of a decode step of a Llama-8B shape: scheduling, plans, launches and collecting, while kernels do nothing.

    tests/fake_cuda/run.sh --run tests.fake_cuda.host_time [--baseline FOLDER]

FOLDER: another checkout, whose steps are run in turn with this one's. Weights and KV are memory that is never touched.
"""

import argparse
import contextlib
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
BATCHES = (1, 64, 256)
CONTEXTS = (1000, 2000)  # tokens, drawn evenly
WARM_STEPS = 8
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "bos_token_id": 1,
    "eos_token_id": 2, "dtype": "bfloat16", "hidden_act": "silu",
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
}  # fmt: skip


# ---- the process that steps: it imports kvrelay of its own checkout, and nothing else of it


def serve() -> None:
    """Reads "batch steps" from standard input, writes the steps' seconds, by the clock and of the processor, and the
    peak of its memory in MiB as JSON.
    """
    engine = _engine()
    for line in sys.stdin:
        batch, num_steps = map(int, line.split())
        with _decoding(engine, batch, WARM_STEPS + num_steps) as step:
            for _ in range(WARM_STEPS):
                step()
            found = []
            for _ in range(num_steps):
                begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
                step()
                found.append((time.perf_counter() - begin_s, time.process_time() - begin_cpu_s))
        print(json.dumps([found, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024]), flush=True)
    engine.close()


def _engine() -> Any:
    import torch

    from kvrelay.engine.checkpoints import files, loading
    from kvrelay.engine.step.build import make_engine
    from kvrelay.engine.step.config import EngineConfig
    from kvrelay.kernels.cuda import backend as cuda_backend
    from kvrelay.kernels.cuda import staging
    from kvrelay.kernels.select import select_backend

    class Untouched(contextlib.ExitStack):
        """Weights that are memory of the device only."""

        def __init__(self, folder: Path, spec: Any) -> None:
            super().__init__()
            self._shapes = files.expected_shapes(spec)

        def __contains__(self, name: str) -> bool:
            return name in self._shapes

        def read(self, name: str, dtype: torch.dtype | None, device: torch.device) -> torch.Tensor:
            return torch.empty(self._shapes[name], dtype=dtype, device=device)

        weight = read

    wait = staging.PinnedTokens.wait
    staging.PinnedTokens.wait = lambda self: [7] * len(wait(self))  # no kernel has drawn any
    cuda_backend._try_out = lambda draw, device: None
    loading.WeightReader = Untouched
    backend = select_backend("cuda", "cuda:0")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(CONFIG))
        model = loading.load_model(Path(folder), backend, torch.bfloat16, block_size=16, kv_layout="NHD")
    config = EngineConfig(
        kv_memory_bytes=56 << 30, token_budget=512, max_running=max(BATCHES), max_waiting=1024, prefix_caching=False
    )
    return make_engine(model, backend, config)


@contextmanager
def _decoding(engine: Any, batch: int, num_tokens: int) -> Iterator[Any]:
    """Sequences that decode behind contexts which a transfer is taken to have brought."""
    from kvrelay.hashing import block_hashes
    from kvrelay.plane.messages import Sampling, SequenceRequest

    chance, names = random.Random(batch), []
    for index in range(batch):
        prompt = [chance.randrange(3, 100000) for _ in range(chance.randint(*CONTEXTS))]
        names.append(f"{time.monotonic_ns()}-{index}")
        request = SequenceRequest(
            request_id=names[-1],
            token_ids=prompt,
            num_prompt_tokens=len(prompt),
            block_hashes=list(block_hashes(prompt, 16)),
            tokens_per_hash=16,
            sampling=Sampling(max_tokens=num_tokens + 8, temperature=0.0, ignore_eos=True),
        )
        engine.reserve(request)
    granted = 0
    while new := engine.step().reservations:
        granted += len(new)
    assert granted == batch, f"room for {granted} of {batch} sequences"
    for name in names:
        engine.requests.activate(name, [7])
    try:
        yield engine.step
    finally:
        for name in names:
            engine.abort(name)


# ---- the process that compares


class Checkout:
    """One checkout's process."""

    def __init__(self, folder: Path) -> None:
        subprocess.run(["make", "-s", "links"], cwd=folder, check=True)
        environment = os.environ | {"PYTHONPATH": f"{folder / '.imports'}:{folder}"}
        command = [sys.executable, "-W", "ignore", str(ROOT / "tests/fake_cuda/host_time.py"), "--serve"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = subprocess.Popen(command, env=environment, cwd=folder, text=True, **pipes)
        self.resident_mib = 0.0

    def seconds(self, batch: int, num_steps: int) -> list[tuple[float, float]]:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(batch, num_steps, file=self._process.stdin, flush=True)
        found, self.resident_mib = json.loads(self._process.stdout.readline())
        return found

    def close(self) -> None:
        self._process.communicate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--baseline", type=Path, help="another checkout")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40, help="of a round")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve()
        return
    checkouts = {"this": Checkout(ROOT)}
    if options.baseline is not None:
        checkouts["baseline"] = Checkout(options.baseline.resolve())
    print("| batch |", " | ".join(f"{name}: ms (5th to 95th percentile), ms of processors" for name in checkouts), "|")
    print("|---|" + "---|" * len(checkouts))
    for batch in BATCHES:
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in checkouts}
        for _ in range(options.rounds):
            for name, checkout in checkouts.items():
                found[name] += checkout.seconds(batch, options.steps)
        print(f"| {batch} |", " | ".join(map(_cell, found.values())), "|", flush=True)
    for name, checkout in checkouts.items():
        checkout.close()
        print(f"{name}: {checkout.resident_mib:.0f} MiB resident at most", file=sys.stderr)


def _cell(steps: list[tuple[float, float]]) -> str:
    """Medians, and a range."""
    wall_ms, cpu_ms = ([1e3 * seconds for seconds in column] for column in zip(*steps, strict=True))
    parts = statistics.quantiles(wall_ms, n=20)
    return f"{statistics.median(wall_ms):.2f} ({parts[0]:.2f} to {parts[-1]:.2f}), {statistics.median(cpu_ms):.2f}"


if __name__ == "__main__":
    main()
