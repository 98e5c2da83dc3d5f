"""Bringing a prompt's KV nearer before its request comes. On the engine's thread, between two steps."""

import math
from collections.abc import Callable

from kvrelay.engine.scheduling.sequence import Sequence
from kvrelay.engine.step.engine import Engine
from kvrelay.engine.step.requests import request_fault
from kvrelay.plane.messages import Prefetch, Prefetched


def prefetch(engine: Engine, message: Prefetch, answer: Callable[[Prefetched], None]) -> None:
    """Have the prompt's blocks brought from the stores into the host tier, and keep them for `message.hold_s`.

    `answer` is called once, when it is known where they are. Nothing is held that does not end by itself.
    """
    request = message.request
    fault = request_fault(request, engine.config.block_size, engine.model.spec.vocab_size)
    if not 0 < message.hold_s < math.inf:
        fault = "hold_s must be positive and finite"
    if fault is not None:
        answer(Prefetched(query_id=message.query_id, problem="invalid", message=fault))
        return
    size = engine.config.block_size
    seq = Sequence(request, size, arrival=0)
    num_in_pool = len(engine.pool.match(seq.block_chain()))
    num_in_host = 0
    engine.requests.pin_ahead(seq, num_in_pool, message.hold_s)

    def answer_coming(num_coming: int) -> None:
        answer(
            Prefetched(
                query_id=message.query_id,
                pool_tokens=num_in_pool * size,
                host_tokens=num_in_host * size,
                coming_tokens=num_coming * size,
            )
        )

    if engine.tiers is None:
        answer_coming(0)
        return
    num_in_host = engine.tiers.keep_ahead(seq, num_in_pool, message.hold_s)
    if not engine.tiers.prefetch(seq, num_in_pool + num_in_host, message.hold_s, answer_coming):
        answer(Prefetched(query_id=message.query_id, problem="full", message="too many prefetches are under way"))
