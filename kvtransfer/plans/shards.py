"""Shards: which share of a model each worker's pool holds, and from which of them a target takes what it lacks.
Pure.

Tensor-parallel workers hold a range of the KV heads, or, where there are more workers than heads, share one; latent
KV (MLA) is held whole by each. Pipeline stages hold a range of the layers.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from kvrelay.errors import LayoutMismatch
from kvrelay.kvtransfer.plans.copy_plan import overlap
from kvrelay.types import KvLayout


def shard(
    model: KvLayout, *, tensor_parallel: int = 1, rank: int = 0, pipeline_stages: int = 1, stage: int = 0
) -> KvLayout:
    """The layout of one worker of several that hold `model` together. Raises LayoutMismatch where heads do not
    divide.
    """
    heads = _head_range(model, tensor_parallel, rank)
    layers = _layer_range(model.num_layers, pipeline_stages, stage)
    return dataclasses.replace(
        model,
        num_kv_heads=len(heads),
        first_kv_head=heads.start,
        total_kv_heads=model.num_kv_heads,
        num_layers=len(layers),
        first_layer=layers.start,
        total_layers=model.num_layers,
    )


def _head_range(model: KvLayout, num_ranks: int, rank: int) -> range:
    total = model.num_kv_heads
    if num_ranks <= total and total % num_ranks == 0:
        width = total // num_ranks
        return range(rank * width, (rank + 1) * width)
    if num_ranks > total and num_ranks % total == 0:
        return range(rank * total // num_ranks, rank * total // num_ranks + 1)
    raise LayoutMismatch("num_kv_heads", f"{total} heads cannot be shared evenly by {num_ranks} workers")


def _layer_range(total: int, num_stages: int, stage: int) -> range:
    """As even as can be; the first stages hold one more."""
    width, more = divmod(total, num_stages)
    start = stage * width + min(stage, more)
    return range(start, start + width + (stage < more))


def sources_of(target: KvLayout, sources: Sequence[KvLayout], turn: int = 0) -> list[int]:
    """Which of `sources` the target reads, each for what the two have in common; every head and layer from exactly
    one.

    Args:
        sources: the layouts of all workers of one source, by rank.
        turn: where several hold the same share, this decides among them: targets with other turns (their ranks) ask
        others.

    Raises LayoutMismatch when the sources do not hold everything, or shares of two overlap in part.
    """
    replicas: dict[tuple[range, range], list[int]] = {}
    for index, source in enumerate(sources):
        replicas.setdefault((source.kv_heads, source.layers), []).append(index)
    times = np.zeros((target.num_layers, target.num_kv_heads), dtype=np.int64)
    chosen = []
    for (heads, layers), group in replicas.items():
        if not _meet(heads, target.kv_heads) or not _meet(layers, target.layers):
            continue
        both = overlap(sources[group[0]], target)
        rows, columns = both.layers, both.heads
        first_layer, first_head = target.first_layer, target.first_kv_head
        times[
            rows.start - first_layer : rows.stop - first_layer, columns.start - first_head : columns.stop - first_head
        ] += 1
        chosen.append(group[turn % len(group)])
    if (times != 1).any():
        layer, head = (int(index) for index in np.argwhere(times != 1)[0])
        where = f"head {head + target.first_kv_head} of layer {layer + target.first_layer}"
        raise LayoutMismatch("kv_heads", f"{int(times[layer, head])} shares of the source hold {where}, not one")
    return sorted(chosen)


def _meet(one: range, other: range) -> bool:
    return one.start < other.stop and other.start < one.stop
