"""One contender of bench/engine/scheduler.py in a process of its own: `scheduler_side.py NAME`, jobs as JSON lines in,
times out.

A job is (decoding sequences, mixed or not, steps). Every sequence has a prompt of PROMPT tokens and a little more, so
that the ends of their blocks do not fall into one step, and each step gives it one token. In a mixed job another prompt
of LONG tokens, in chunks of what the token budget leaves over, is always under way. Requests are made, and their blocks
hashed, outside the times, which are of this thread's CPU: other work on the machine counts less. What is timed of a
step:

    schedule  what is computed next, and in which blocks
    apply     one token for each sequence: what ends, what may be cached now, what goes out to the client

kvrelay's engine runs its real `step` and the drain of its events, with stand-ins for model and sampler that only return
tokens; `batch`, the tensors about the batch that kernels and sampler need, is timed apart (vLLM's model runner makes
those: there it is not timed). vLLM runs its v1 Scheduler: `schedule` and `update_from_output`.
"""

import gc
import json
import os
import random
import sys
import time
from types import SimpleNamespace
from typing import Any, Protocol

BLOCK = 16
PROMPT = 256
LONG = 4096
BUDGET = 2048
MAX_MODEL_LEN = 8192
MAX_RUNNING = 1100
WARM_UP = 32


class Contender(Protocol):
    def add(self, name: str, tokens: list[int], max_tokens: int) -> None: ...

    def is_idle(self) -> bool:
        """Whether no request is queued and no prompt is under way."""

    def step(self) -> dict[str, float]:
        """Seconds of each part, and how many sequences took part."""


class Ours:
    """kvrelay's engine without kernels."""

    def __init__(self, num_blocks: int, draft_tokens: int = 0) -> None:
        import torch

        from kvrelay.engine.step.build import make_engine
        from kvrelay.engine.step.config import EngineConfig
        from kvrelay.hashing import block_hashes
        from kvrelay.plane.messages import Sampling, SequenceRequest

        shape = SimpleNamespace(
            dtype=torch.bfloat16, kv_dtype=torch.bfloat16, num_kv_heads=1, head_dim=1, latent_dim=None
        )
        spec = SimpleNamespace(
            num_layers=1, max_position=MAX_MODEL_LEN, eos_ids=(2,), latent=(), experts=None, vocab_size=1 << 20,
            query_scale=1.0, layer_windows=(None,), attention_softcap=None,
        )  # fmt: skip
        model = SimpleNamespace(
            attention_shape=shape, spec=spec, dtype=torch.bfloat16, logits=None, reserve_positions=None
        )
        backend = SimpleNamespace(
            name="none", device=torch.device("cpu"), share_prefixes=lambda **_: None, cascade_saved_tokens=0,
            asynchronous=None, decode_graphs=lambda spec: None,
        )  # fmt: skip
        config = EngineConfig(
            block_size=BLOCK,
            kv_memory_bytes=num_blocks * BLOCK * 4,
            token_budget=BUDGET,
            max_running=MAX_RUNNING,
            max_waiting=MAX_RUNNING,
            draft_tokens=draft_tokens,
        )
        self.engine: Any = make_engine(model, backend, config)  # type: ignore[arg-type]
        runner, self._sampler = self.engine.runner, self.engine.sampling.sampler
        self._batch = runner.batch
        runner.run, runner.logits, self._sampler.sample = self.run, self.logits, self.sample
        self._hashes, self._request, self._sampling = block_hashes, SequenceRequest, Sampling
        self._batch_s = self._schedule_s = 0.0
        schedule = self.engine.scheduler.schedule

        def timed() -> Any:
            began = time.thread_time()
            plan = schedule()
            self._schedule_s = time.thread_time() - began
            return plan

        self.engine.scheduler.schedule = timed

    # in place of the runner's and the sampler's methods

    def run(self, plan: Any, *_: Any) -> Any:
        began = time.thread_time()
        self._batch(plan)
        self._batch_s = time.thread_time() - began
        return self

    def logits(self, hidden: Any, rows: list[int]) -> None:
        """Events are not read."""

    def sample(self, logits: Any, seqs: list[Any], ahead: list[int] | None = None) -> tuple[list[int], list[None]]:
        began = time.thread_time()
        self._sampler._batch(seqs, ahead)
        self._batch_s += time.thread_time() - began
        return [7] * len(seqs), [None] * len(seqs)

    def add(self, name: str, tokens: list[int], max_tokens: int) -> None:
        request = self._request(
            request_id=name,
            token_ids=tokens,
            num_prompt_tokens=len(tokens),
            block_hashes=list(self._hashes(tokens, BLOCK)),
            sampling=self._sampling(max_tokens=max_tokens),
        )
        assert self.engine.refusal(request) is None, self.engine.refusal(request)
        self.engine.add(request)

    def is_idle(self) -> bool:
        scheduler = self.engine.scheduler
        return not scheduler.waiting and all(seq.num_uncomputed == 1 for seq in scheduler.running)

    def step(self) -> dict[str, float]:
        began = time.thread_time()
        result = self.engine.step()
        self.engine.drain_events()
        whole = time.thread_time() - began
        schedule, batch = self._schedule_s, self._batch_s
        rows = result.num_decode + (result.num_tokens > result.num_decode)
        return {"schedule": schedule, "apply": whole - schedule - batch, "batch": batch, "rows": rows}


class OursDrafting(Ours):
    """The same with speculation on, as it is by default, where it does not pay: but for a try now and then, nothing is
    drafted.
    """

    def __init__(self, num_blocks: int) -> None:
        from kvrelay.engine.speculation.speculation import SpeculationTimes

        class NothingPays(SpeculationTimes):
            def plain(self, num_sequences: int) -> float:
                super().plain(num_sequences)
                return 1.0

            def extra(self, num_sequences: int) -> tuple[float, float]:
                super().extra(num_sequences)
                return 0.0, 1.0  # seconds: a drafted token takes as long as a step

        super().__init__(num_blocks, draft_tokens=8)
        self.engine.drafts.speculation.times = NothingPays()


class Vllm:
    """vLLM's v1 scheduler with a configuration that says no more than it asks for."""

    def __init__(self, num_blocks: int) -> None:
        import torch
        from vllm.config import CacheConfig, SchedulerConfig
        from vllm.sampling_params import SamplingParams
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.outputs import ModelRunnerOutput
        from vllm.v1.request import Request

        function = get_hash_fn_by_name("sha256")
        init_none_hash(function)
        self._hasher = get_request_block_hasher(BLOCK, function)
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float16)
        blocks = KVCacheConfig(num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
        self._scheduler: Any = Scheduler(
            _vllm_config(num_blocks, SchedulerConfig, CacheConfig),
            blocks,
            SimpleNamespace(accept_tokens=lambda *_: True),
            BLOCK,
        )
        self._request, self._sampling, self._output = Request, SamplingParams, ModelRunnerOutput

    def add(self, name: str, tokens: list[int], max_tokens: int) -> None:
        params = self._sampling(max_tokens=max_tokens)
        self._scheduler.add_request(self._request(name, tokens, params, None, block_hasher=self._hasher))

    def is_idle(self) -> bool:
        running = self._scheduler.running
        return not self._scheduler.waiting and all(one.num_computed_tokens >= one.num_prompt_tokens for one in running)

    def step(self) -> dict[str, float]:
        scheduler, clock = self._scheduler, time.thread_time
        began = clock()
        plan = scheduler.schedule()
        scheduled = clock()
        names = list(plan.num_scheduled_tokens)
        requests = scheduler.requests
        sampled = [[7] if requests[name].num_computed_tokens >= requests[name].num_tokens else [] for name in names]
        output = self._output(names, {name: index for index, name in enumerate(names)}, sampled)
        ready = clock()
        scheduler.update_from_output(plan, output)
        return {"schedule": scheduled - began, "apply": clock() - ready, "rows": len(names)}


def _vllm_config(num_blocks: int, scheduler_kind: Any, cache_kind: Any) -> Any:
    """The parts of a VllmConfig that the scheduler reads."""
    scheduler = scheduler_kind(
        max_model_len=MAX_MODEL_LEN, is_encoder_decoder=False, max_num_batched_tokens=BUDGET, max_num_seqs=MAX_RUNNING
    )
    cache = cache_kind(block_size=BLOCK, enable_prefix_caching=True)
    cache.num_gpu_blocks = num_blocks
    parallel = SimpleNamespace(
        decode_context_parallel_size=1,
        prefill_context_parallel_size=1,
        pipeline_parallel_size=1,
        data_parallel_index=0,
        data_parallel_size=1,
    )
    model = SimpleNamespace(
        uses_mrope=False,
        is_encoder_decoder=False,
        is_mm_encoder_only=False,
        max_model_len=MAX_MODEL_LEN,
        is_diffusion=False,
        runner_type="generate",
        supports_multimodal_inputs=False,
        return_sampling_mask=False,
        enable_return_routed_experts=False,
    )
    observed = SimpleNamespace(
        per_request_spec_decode_metrics="none",
        kv_cache_metrics=False,
        enable_mfu_metrics=False,
        kv_cache_metrics_sample=0,
    )
    return SimpleNamespace(
        scheduler_config=scheduler,
        cache_config=cache,
        parallel_config=parallel,
        model_config=model,
        observability_config=observed,
        is_mm_encoder_only=False,
        lora_config=None,
        kv_events_config=None,
        kv_transfer_config=None,
        ec_transfer_config=None,
        speculative_config=None,
        ec_manager_config=SimpleNamespace(get_encoder_cache_manager_obj=lambda: None),
        num_speculative_tokens=0,
        num_lookahead_tokens=0,
        num_prefill_lookahead_tokens=0,
        max_in_flight_tokens=BUDGET,
        max_concurrent_batches=1,
        use_v2_model_runner=False,
        aux_output_config=SimpleNamespace(enabled=False),
    )


def tokens(source: random.Random, count: int) -> list[int]:
    return [source.randrange(10, 30_000) for _ in range(count)]


def blocks_needed(num_decodes: int, steps: int) -> int:
    """For all decodes to their ends, those tokens included that the first get while the last prompts are computed."""
    longest = PROMPT + 2 * BLOCK
    start_steps = -(-num_decodes * longest // (BUDGET - num_decodes))
    return num_decodes * -(-(longest + start_steps + WARM_UP + steps) // BLOCK) + 4 * LONG // BLOCK


def measure(contender: Contender, num_decodes: int, *, is_mixed: bool, steps: int) -> dict[str, float]:
    """Mean seconds of each part of a step; `rows`: sequences in it."""
    source = random.Random(num_decodes)
    for index in range(num_decodes):
        contender.add(f"decode-{index}", tokens(source, PROMPT + index % BLOCK), MAX_MODEL_LEN - 2 * PROMPT)
    while not contender.is_idle():
        contender.step()
    prompts = [tokens(source, LONG) for _ in range(steps + WARM_UP if is_mixed else 0)]
    total: dict[str, float] = {}
    gc.collect()
    gc.freeze()
    for number in range(WARM_UP + steps):
        if is_mixed and contender.is_idle():
            contender.add(f"long-{number}", prompts.pop(), 1)
        times = contender.step()
        if number >= WARM_UP:
            for name, value in times.items():
                total[name] = total.get(name, 0.0) + value
    gc.unfreeze()
    return {name: value / steps for name, value in total.items()}


def main() -> None:
    name = sys.argv[1]
    kind: type[Ours] | type[Vllm] = OursDrafting if name == "kvrelay, drafting" else Ours
    if not name.startswith("kvrelay"):
        import pydantic  # noqa: F401
        import transformers  # noqa: F401

        from bench import standins

        standins.install()
        kind = Vllm
    out, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        num_decodes, is_mixed, steps = json.loads(line)
        num_blocks = blocks_needed(num_decodes, steps)
        contender = kind(num_blocks)
        print(json.dumps(measure(contender, num_decodes, is_mixed=is_mixed, steps=steps)), file=out, flush=True)
    out.flush()
    os._exit(0)  # the stand-ins make exit handlers stumble


if __name__ == "__main__":
    main()
