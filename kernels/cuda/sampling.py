"""Sampling on the device without waiting for it: Triton's kernels where they work, else torch's.

UNVERIFIED ON A GPU.
"""

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from kvrelay.kernels.backend import SamplingBatch
from kvrelay.kernels.common import sampling_search
from kvrelay.kernels.common.sampling_search import SamplingSettings, SettingsCache, to_device

logger = logging.getLogger(__name__)

Draw = Callable[[Tensor, SamplingSettings, Tensor], Tensor]


class DeviceSampler:
    """Samples tokens [R] int64 on the device, from float32 logits [R, V] and a batch."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._settings = device, SettingsCache(device)
        self.kernels, self._draw = self._chosen()

    def __call__(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        settings = self._settings.of(batch)
        uniform = to_device(batch.uniform, self._device) if settings.draws else batch.uniform
        return self._draw(logits, settings, uniform)

    def _chosen(self) -> tuple[str, Draw]:
        """("triton" | "torch", the function). Builds Triton's kernels at start."""
        if self._device.type != "cuda":
            return "torch", sampling_search.draw
        try:
            from kvrelay.kernels.cuda import sampling_triton

            batch = SamplingBatch(
                torch.ones(1), torch.tensor([2]), torch.full((1,), 0.5), torch.full((1,), 0.1), torch.zeros(1).double()
            )
            settings = sampling_search.settings_of(batch, self._device)
            logits = torch.arange(64, dtype=torch.float32, device=self._device).unsqueeze(0)
            token = int(sampling_triton.draw(logits, settings, batch.uniform.to(self._device)))
            if token != 63:
                raise RuntimeError(f"token 63 is the only one that stays; it drew {token}")
        except Exception as error:  # not installed, or an error of its compiler or the driver
            logger.warning("tokens are drawn by torch, slower: triton's kernels do not work here (%s)", error)
            return "torch", sampling_search.draw
        return "triton", sampling_triton.draw
