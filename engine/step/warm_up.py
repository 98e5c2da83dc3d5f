"""First steps of a model before its worker takes requests: what only the first steps cost is paid here.

Weights are read into memory, kernels choose and build what they keep, threads start. A request for a worker that has
just started then finds one that has run.
"""

import logging
import time
from dataclasses import replace

from kvrelay.engine.execution.runner import kv_layout
from kvrelay.engine.models.decoder import DecoderModel
from kvrelay.engine.step.build import make_engine
from kvrelay.engine.step.config import EngineConfig
from kvrelay.kernels.backend import Backend
from kvrelay.plane.messages import Sampling, SequenceRequest

logger = logging.getLogger(__name__)

PROMPT_TOKENS = 64  # a whole step of prompts takes 1 s of CPU more, and its next run is no faster
OUTPUT_TOKENS = 4
_PROMPTS = (1, 3)  # sequences that decode together: alone, and as a batch


def warm_up(model: DecoderModel, backend: Backend, config: EngineConfig) -> None:
    """Run steps of prompts, and decode steps of one and of several sequences, in an engine that is dropped afterwards:
    the worker's own has measured nothing and cached nothing.
    """
    start_s, layout = time.monotonic(), kv_layout(model)
    most = min(model.spec.max_position, config.max_model_len or 1 << 62) - OUTPUT_TOKENS
    length = max(min(PROMPT_TOKENS, config.token_budget, most), 1)
    blocks = 2 * (-(-(length + OUTPUT_TOKENS * len(_PROMPTS)) // config.block_size) + sum(_PROMPTS))
    own = replace(config, kv_memory_bytes=blocks * layout.block_bytes, prefix_caching=False)
    engine = make_engine(model, backend, own)
    try:
        for count in _PROMPTS:
            for number in range(count):
                prompt = [(7 * place + number) % model.spec.vocab_size for place in range(max(length // count, 1))]
                engine.add(_request(f"warm-up-{count}-{number}", prompt))
            while engine.scheduler.has_work and not engine.step().is_stuck:
                pass
    finally:
        engine.close()
    logger.info("warm after %.1f s: %d prompt tokens and decode steps", time.monotonic() - start_s, length)


def _request(request_id: str, prompt: list[int]) -> SequenceRequest:
    sampling = Sampling(max_tokens=OUTPUT_TOKENS, min_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
    return SequenceRequest(
        request_id=request_id, token_ids=prompt, num_prompt_tokens=len(prompt), block_hashes=[], sampling=sampling
    )
