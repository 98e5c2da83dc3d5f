"""Which tokens each row may draw, as bits: checked, moved to a device, and applied in plain torch."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvrelay.kernels.backend import SamplingBatch
from kvrelay.kernels.common.sampling_search import to_device


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """A batch's masks, as in SamplingBatch, on the logits' device."""

    words: Tensor
    rows: Tensor

    def applied(self, logits: Tensor) -> Tensor:
        """A copy of float32 logits [R, V] with -inf for masked tokens.

        A row whose largest allowed logit is not finite keeps one token, with logit 0: the first of the largest; where
        that is -inf, the lowest allowed id.
        """
        ids = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)
        bits = self.words[self.rows.clamp(min=0)][:, ids >> 5] >> (ids & 31)
        has_mask = (self.rows >= 0).unsqueeze(1)
        allowed = (bits & 1).bool() | ~has_mask
        masked = logits.masked_fill(~allowed, float("-inf"))
        largest, first = masked.max(dim=1, keepdim=True)
        only = torch.where(largest == float("-inf"), allowed.int().argmax(dim=1, keepdim=True), first)
        is_single = has_mask & ~largest.isfinite()
        return torch.where(is_single, torch.where(ids == only, 0.0, float("-inf")), masked)


def token_masks_of(batch: SamplingBatch, logits: Tensor) -> TokenMasks | None:
    """A batch's masks on the device of logits [R, V]; None: it has none. Does not wait for the device.

    Raises:
        ValueError: shapes or types are others than SamplingBatch's, or a row's mask is not among the masks.
    """
    words, rows = batch.masks, batch.mask_rows
    if words is None or rows is None:
        return None
    num_rows, vocab = logits.shape
    due = (words.shape[0], -(-vocab // 32)), (num_rows,)
    if (words.shape, rows.shape) != due or {words.dtype, rows.dtype} != {torch.int32}:
        found = f"{list(words.shape)} {words.dtype} and {list(rows.shape)} {rows.dtype}"
        raise ValueError(f"masks and mask_rows are [K, {due[0][1]}] and [{num_rows}] int32, not {found}")
    if num_rows and not -1 <= int(rows.min()) <= int(rows.max()) < words.shape[0]:
        raise ValueError(f"mask_rows are from -1 to {words.shape[0] - 1}, not {rows.tolist()}")
    return TokenMasks(to_device(words, logits.device), to_device(rows, logits.device))
