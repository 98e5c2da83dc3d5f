"""Log-probabilities of whole texts by the reference backend, each text in one step, without an engine."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from kvrelay.engine.checkpoints.loading import load_model
from kvrelay.engine.execution.runner import kv_layout
from kvrelay.engine.models.decoder import DecoderModel
from kvrelay.kernels.oracle.grid_steps import KernelCase, make_step
from kvrelay.kernels.oracle.reference import ReferenceBackend
from kvrelay.kvcache.memory.storage import DTYPES, KV_DTYPES, KvStorage


class WholeTexts:
    """One model. Its weights and what it has computed stay.

    Args:
        folder: a prepared checkpoint.
        dtype, kv_dtype: keys of DTYPES and KV_DTYPES.
    """

    def __init__(self, folder: Path, device: str, dtype: str = "float32", kv_dtype: str = "float32") -> None:
        self._folder, self._backend = folder, ReferenceBackend(device)
        self._dtype, self._kv_dtype = DTYPES[dtype], KV_DTYPES[kv_dtype]
        self._model: DecoderModel | None = None
        self._known: dict[tuple[int, ...], Tensor] = {}

    def __call__(self, text: Sequence[int], first: int) -> Tensor:
        """Log-probabilities [len(text) - first, vocabulary] in float64 on the CPU, of tokens number `first` and on.

        Raises ModelError.
        """
        key = (first, *text)
        if key not in self._known:
            self._known[key] = self._computed(text, first).cpu()
        return self._known[key].double()

    @torch.inference_mode()
    def _computed(self, text: Sequence[int], first: int) -> Tensor:
        backend, num_tokens = self._backend, len(text) - 1
        self._model = model = self._model or load_model(self._folder, backend, self._dtype, kv_dtype=self._kv_dtype)
        batch = make_step(KernelCase(((num_tokens, num_tokens),))).batch
        layout = replace(kv_layout(model), num_blocks=int(batch.block_tables.max()) + 1)
        plan, storage = backend.plan(batch, model.attention_shape), KvStorage(layout, backend.device)
        hidden = model.forward(torch.tensor(text[:-1]), batch, plan, storage.layers)
        return model.logits(hidden[first - 1 :]).log_softmax(-1)
