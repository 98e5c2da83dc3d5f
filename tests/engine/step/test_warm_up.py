"""A model's first steps before its worker takes requests."""

import pytest

from kvrelay.engine.checkpoints.tiny import tiny_checkpoint
from kvrelay.engine.step.build import load_engine
from kvrelay.engine.step.config import EngineConfig
from kvrelay.engine.step.warm_up import warm_up
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
    before, forward, batches = engine.reports.load(), type(engine.model).forward, []
    monkeypatch.setattr(
        type(engine.model),
        "forward",
        lambda self, ids, batch, *rest: (
            batches.append((len(ids), batch.num_decode)),
            forward(self, ids, batch, *rest),
        )[1],
    )
    warm_up(engine.model, backend, engine.config)
    assert max(tokens for tokens, _ in batches) >= token_budget * 3 // 4, "a whole step of a prompt"
    after = engine.reports.load()
    assert (after.prefix_query_tokens, after.cached_blocks, after.decode_step_s) == (
        before.prefix_query_tokens,
        before.cached_blocks,
        before.decode_step_s,
    )
    engine.check()
    engine.close()
