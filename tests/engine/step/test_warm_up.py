"""A model's first steps before its worker takes requests."""

import os
import subprocess
import sys

import pytest

from kvrelay.engine.checkpoints.tiny import tiny_checkpoint
from kvrelay.engine.execution.runner import Runner
from kvrelay.engine.step.build import load_engine
from kvrelay.engine.step.config import EngineConfig
from kvrelay.engine.step.warm_up import PROMPT_TOKENS, warm_up
from kvrelay.environment import cache_dir
from kvrelay.kernels.cpu.backend import CpuBackend


@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "qwen3_moe"])
@pytest.mark.parametrize("token_budget", [16, 512])
def test_the_first_steps_run_every_kind_of_step_and_leave_nothing_in_the_workers_engine(
    tmp_path, family, token_budget, monkeypatch
):
    import torch

    backend = CpuBackend(1)
    config = EngineConfig(token_budget=token_budget, max_running=4, kv_memory_bytes=4 << 20)
    engine = load_engine(tiny_checkpoint(family, tmp_path), backend, torch.float32, config)
    before, run, batches = engine.reports.load(), Runner.run, []

    def noted(self, plan, *rest):
        batches.append((plan.num_tokens, plan.num_single))
        return run(self, plan, *rest)

    monkeypatch.setattr(Runner, "run", noted)
    warm_up(engine.model, backend, engine.config)
    prompts, decoding = (max(size for size, row in batches if bool(row) is one) for one in (False, True))
    assert prompts == min(token_budget, PROMPT_TOKENS) and decoding == 3
    after = engine.reports.load()
    assert (after.prefix_query_tokens, after.cached_blocks, after.decode_step_s) == (
        before.prefix_query_tokens,
        before.cached_blocks,
        before.decode_step_s,
    )
    engine.check()
    engine.close()


START = """
import sys, torch
from pathlib import Path
from kvrelay.engine.checkpoints import loading
from kvrelay.engine.step.build import load_engine
from kvrelay.engine.step.config import EngineConfig
from kvrelay.engine.step.warm_up import warm_up
from kvrelay.kernels.cpu.backend import CpuBackend
loading.LEAST_SHARED_BYTES = 0
backend, config = CpuBackend(1), EngineConfig(max_running=4, kv_memory_bytes=4 << 20, shares_weights=True)
for _ in range(2):  # packs, then maps
    made = load_engine(Path(sys.argv[1]), backend, torch.float32, config)
    warm_up(made.model, backend, config)
print(*sorted({"torch._dynamo", "sympy", "transformers", "ray"} & set(sys.modules)))
"""


def test_a_start_imports_no_compiler_of_torch(tmp_path):
    """It takes 1 to 5 s of CPU and 100 MiB in each worker."""
    folder = tiny_checkpoint("llama", tmp_path / "model")
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "native").symlink_to(cache_dir() / "native")
    environment = {**os.environ, "KVRELAY_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-c", START, str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "\n"), done.stderr
    assert list((tmp_path / "cache" / "packed").glob("*.weights"))
