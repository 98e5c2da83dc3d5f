"""Which of FlashInfer's kernels compute the attention of prompts: fa2, or on Hopper fa3 where that is faster."""

import logging
import time
from typing import Any

import torch
from torch import Tensor

from kvrelay.kernels.backend import AttentionShape, AttentionVariant
from kvrelay.kernels.cuda.modules import HOPPER, HOPPER_MAJOR, KernelNeeds, hopper_modules
from kvrelay.kernels.cuda.plan import in_memory_order, paged_index, plan_prefill

logger = logging.getLogger(__name__)

PLAIN = "fa2"
_TOKENS = 2048  # of the prompt for timing
_REPEATS = 3
_NEAR = 2e-2  # largest difference of two kernels' results, relative to the largest number
_Key = tuple[torch.dtype, int, bool, bool]


def _key(shape: AttentionShape, variant: AttentionVariant) -> _Key:
    """The parameters that FlashInfer builds a kernel for."""
    return shape.dtype, shape.head_dim, variant[1] is not None, variant[2] is not None


class PrefillKernels:
    """The kernels per variant; fa2 for those not tried. Uses the backend's workspace: not while a step is planned."""

    def __init__(self, flashinfer: Any, workspace: Tensor) -> None:
        self._flashinfer, self._workspace = flashinfer, workspace
        self._chosen: dict[_Key, str] = {}

    def of(self, shape: AttentionShape, variant: AttentionVariant) -> str:
        return self._chosen.get(_key(shape, variant), PLAIN)

    def describe(self) -> str:
        return "/".join(sorted(set(self._chosen.values()))) or PLAIN

    def try_out(self, shape: AttentionShape, variant: AttentionVariant) -> dict[str, float]:
        """Seconds for a prompt of 2,048 tokens by each kernel that works here; selects the fastest for later steps.

        fa3 is left alone where it is not compiled: that takes minutes.
        """
        is_hopper = torch.cuda.get_device_capability(self._workspace.device)[0] == HOPPER_MAJOR
        needs = KernelNeeds(shape, [variant], 0, "silu")
        if not is_hopper or any(module.files_to_compile() for module in hopper_modules(needs)):
            return {}
        expected, seconds = self._prompt(PLAIN, shape, variant)
        found = {PLAIN: seconds}
        try:
            out, found[HOPPER] = self._prompt(HOPPER, shape, variant)
            if not (out - expected).abs().max() <= _NEAR * expected.abs().max():  # also NaN
                raise RuntimeError("its results differ from fa2's")
        except Exception as error:  # its compiler and the driver raise errors of many types
            found.pop(HOPPER, None)
            logger.warning("prefill takes FlashInfer's fa2 kernels, slower: fa3 does not work here (%s)", error)
        self._chosen[_key(shape, variant)] = min(found, key=lambda kernels: found[kernels])
        return found

    def _prompt(self, kernels: str, shape: AttentionShape, variant: AttentionVariant) -> tuple[Tensor, float]:
        """The output and the shortest time."""
        device, size = self._workspace.device, shape.block_size
        num_blocks = -(-_TOKENS // size)
        generator = torch.Generator().manual_seed(0)
        q, kv = (
            (2 * torch.randn(*sizes, generator=generator)).to(
                device=device, dtype=shape.dtype
            )  # so that few keys matter to a query
            for sizes in (
                (_TOKENS, shape.num_heads, shape.head_dim),
                (num_blocks, 2, size, shape.num_kv_heads, shape.head_dim),
            )
        )
        if shape.kv_layout == "HND":
            kv = kv.transpose(2, 3).contiguous().transpose(2, 3)
        lens = torch.tensor([_TOKENS], dtype=torch.int32)
        tables, queries = torch.arange(num_blocks, dtype=torch.int32).unsqueeze(0), torch.tensor([0, _TOKENS])
        index = paged_index(lens, tables, size, queries.to(torch.int32))
        wrapper = self._flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            self._workspace, shape.kv_layout, backend=kernels
        )
        plan_prefill(wrapper, index, shape, variant)
        out, seconds = torch.empty_like(q), float("inf")
        for _ in range(_REPEATS):
            torch.cuda.synchronize(device)
            began_s = time.perf_counter()
            wrapper.run(q, in_memory_order(kv, shape.kv_layout), out=out)
            torch.cuda.synchronize(device)
            seconds = min(seconds, time.perf_counter() - began_s)
        return out.float(), seconds
