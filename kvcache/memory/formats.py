"""KV import and export in the formats of other programs, under LMCache's names.

L layers, T tokens, D = KV heads * head_dim, heads side by side:

    KV_2LTD     [2, L, T, D]  keys, then values; a whole prompt
    KV_T2D      [T, 2, D]     one layer
    KV_2TD      [2, T, D]     one layer
    KV_MLA_FMT  [1, L, T, D]  latent KV (MLA); a whole prompt

A pool of fp8 is exported as bfloat16, which is exact, since scales are powers of two. Imports may have any float dtype:
they are rounded to the pool's, and clamped where it is float16.
"""

import enum
from collections.abc import Sequence

import torch
from torch import Tensor

from kvrelay import fp8
from kvrelay.errors import LayoutMismatch
from kvrelay.kvcache.memory.storage import KvStorage
from kvrelay.types import KvLayout


class KvFormat(enum.StrEnum):
    KV_2LTD = "KV_2LTD"
    KV_T2D = "KV_T2D"
    KV_2TD = "KV_2TD"
    KV_MLA_FMT = "KV_MLA_FMT"

    @property
    def is_layerwise(self) -> bool:
        """Whether a tensor holds one layer."""
        return self in (KvFormat.KV_T2D, KvFormat.KV_2TD)


def shape_of(layout: KvLayout, num_tokens: int, fmt: KvFormat) -> tuple[int, ...]:
    """The shape of this format for `num_tokens` tokens. Raises LayoutMismatch: the format does not fit the pool."""
    if layout.is_latent != (fmt is KvFormat.KV_MLA_FMT):
        what = "latent KV: KV_MLA_FMT" if layout.is_latent else "keys and values: KV_2LTD, KV_T2D or KV_2TD"
        raise LayoutMismatch("format", f"{fmt} is not for this pool, which holds {what}")
    width = layout.num_kv_heads * layout.head_dim
    if fmt is KvFormat.KV_T2D:
        return num_tokens, 2, width
    if fmt is KvFormat.KV_2TD:
        return 2, num_tokens, width
    return layout.num_parts, layout.num_layers, num_tokens, width


def export_kv(
    storage: KvStorage, blocks: Sequence[int], num_tokens: int, fmt: KvFormat, *, layer: int | None = None
) -> Tensor:
    """A copy of the first `num_tokens` tokens of a prompt, on the pool's device, in the pool's dtype (fp8: bfloat16).

    Args:
        blocks: the prompt's block table.
        layer: of the pool; required by layerwise formats, and only allowed there.

    Raises LayoutMismatch, or ValueError when the blocks hold fewer tokens.
    """
    layout = storage.memory.layout
    shape_of(layout, num_tokens, fmt)
    layers = _layers(layout, fmt, layer)
    block, offset = _locations(storage, blocks, num_tokens)
    rows = fp8.loaded(_by_token(storage)[block, layers, :, offset])  # [T, L, parts, heads, head_dim]
    if layout.dtype == "fp8_e4m3":
        rows = rows.to(torch.bfloat16)
    whole = rows.flatten(3).permute(2, 1, 0, 3)  # [parts, L, T, D]
    return _from_whole(whole, fmt).contiguous()


def import_kv(
    storage: KvStorage, blocks: Sequence[int], kv: Tensor, fmt: KvFormat, *, layer: int | None = None, first: int = 0
) -> None:
    """Write a prompt's KV into its blocks, from token `first` on; the inverse of `export_kv`.

    Args:
        kv: the whole prompt's, of the format's shape, any float dtype, any device.

    Raises LayoutMismatch: another shape than the pool's; ValueError when the blocks hold fewer tokens.
    """
    layout = storage.memory.layout
    num_tokens = kv.shape[0 if fmt is KvFormat.KV_T2D else -2] if kv.dim() > 1 else 0
    if tuple(kv.shape) != (expected := shape_of(layout, num_tokens, fmt)) or not kv.is_floating_point():
        mismatch = f"{kv.dtype} {list(kv.shape)} does not fit {list(expected)} of this pool as {fmt}"
        raise LayoutMismatch("shape", mismatch)
    layers = _layers(layout, fmt, layer)
    block, offset = _locations(storage, blocks, num_tokens)
    rows = _to_whole(kv.to(storage.tensor.device), fmt).permute(2, 1, 0, 3)[first:]
    rows = rows.unflatten(3, (layout.num_kv_heads, layout.head_dim))
    if layout.dtype == "float16":
        rows = rows.clamp(-65504.0, 65504.0)
    _by_token(storage)[block[first:], layers, :, offset[first:]] = fp8.stored(rows, storage.tensor.dtype)


def _layers(layout: KvLayout, fmt: KvFormat, layer: int | None) -> slice:
    if fmt.is_layerwise != (layer is not None):
        raise ValueError(f"{fmt} is of {'one layer: pass layer=' if layer is None else 'all layers'}")
    if layer is None:
        return slice(None)
    if not 0 <= layer < layout.num_layers:
        raise ValueError(f"layer {layer} of {layout.num_layers}")
    return slice(layer, layer + 1)


def _by_token(storage: KvStorage) -> Tensor:
    """[blocks, layers, parts, tokens, heads, row] view of the pool."""
    return storage.tensor if storage.memory.layout.order == "NHD" else storage.tensor.transpose(3, 4)


def _locations(storage: KvStorage, blocks: Sequence[int], num_tokens: int) -> tuple[Tensor, Tensor]:
    """[T] block and [T] offset in the block of every token."""
    size, device = storage.memory.layout.block_size, storage.tensor.device
    if num_tokens > len(blocks) * size:
        raise ValueError(f"{num_tokens} tokens do not fit {len(blocks)} blocks of {size}")
    tokens = torch.arange(num_tokens, device=device)
    return torch.tensor(list(blocks), dtype=torch.int64, device=device)[tokens // size], tokens % size


def _from_whole(whole: Tensor, fmt: KvFormat) -> Tensor:
    """[parts, L, T, D] -> the format's order."""
    if fmt is KvFormat.KV_T2D:
        return whole[:, 0].transpose(0, 1)
    return whole[:, 0] if fmt is KvFormat.KV_2TD else whole


def _to_whole(kv: Tensor, fmt: KvFormat) -> Tensor:
    """The format's order -> [parts, L, T, D]."""
    if fmt is KvFormat.KV_T2D:
        kv = kv.transpose(0, 1)
    return kv.unsqueeze(1) if fmt.is_layerwise else kv
