"""Loads a model: reads a checkpoint's tensors and packs them by the backend; each original is freed once packed."""

import contextlib
import logging
import math
import time
from collections.abc import Iterator
from hashlib import blake2b
from io import BufferedReader
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvrelay.engine.checkpoints.files import expected_shapes, format_of, locate_tensors, model_digest, shared_name
from kvrelay.engine.checkpoints.packed_weights import shared_weights
from kvrelay.engine.checkpoints.stored_tensors import PARTS, PLAIN
from kvrelay.engine.checkpoints.unpacking import unpacked
from kvrelay.engine.models.decoder import DecoderModel, ExpertMlp, GatedMlp, HeadAttention, LatentAttention, Layer, Mlp
from kvrelay.engine.models.spec import ModelSpec
from kvrelay.engine.models.spec_parts import ExpertSpec, LatentSpec
from kvrelay.errors import CheckpointCorrupt
from kvrelay.kernels.backend import Backend, Facts, HeadLinears, KvOrder, Linear, PackedWeights
from kvrelay.kernels.common.quant_scheme import Scheme, WeightError
from kvrelay.kernels.common.quantized import HeadByHead
from kvrelay.kernels.common.stored_weights import AnyWeight, dequantised, plain_weight, shape_of, stacked
from kvrelay.machine import own_cores

logger = logging.getLogger(__name__)

_LOG_EVERY_S = 5.0  # while weights are loaded
LEAST_SHARED_BYTES = 32 << 20  # of weights: fewer are not worth a file
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.float8_e8m0fnu, "I8": torch.int8, "I32": torch.int32,
    "I64": torch.int64,
}  # fmt: skip


class WeightReader(contextlib.ExitStack):
    """The tensors of one checkpoint folder, read one at a time, so that loading never holds the checkpoint twice.

    A context manager that holds the files open. packs: linear weights will be packed from their bytes; else they are on
    the meta device, not read.

    Raises: see `locate_tensors`, before any weight is read.
    """

    def __init__(self, folder: Path, spec: ModelSpec, *, packs: bool = True) -> None:
        super().__init__()
        self._spec, self._shapes, self._where = spec, expected_shapes(spec), locate_tensors(folder, spec)
        self._packs = packs
        self._files: dict[Path, BufferedReader] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def weight(self, name: str, dtype: torch.dtype | None, device: torch.device) -> AnyWeight:
        """A linear layer's weight; not restored if it is quantised."""
        stored, module = self._where.get(name), name.removesuffix(".weight")
        form = None if stored is not None and stored.dtype in PLAIN else format_of(self._spec, module)
        if form is None and not self._packs:
            tensor = self._where[name]
            return torch.empty(tensor.shape, dtype=dtype or _DTYPES[tensor.dtype], device="meta")
        if form is None:
            return self.read(name, dtype, device)
        names = {part: f"{module}.{part}" for part in ("weight", *PARTS)}
        parts = {part: self.read(at, None, device) for part, at in names.items() if at in self._where}
        return unpacked(form, module, self._shapes[name], parts.get)

    def read(self, name: str, dtype: torch.dtype | None, device: torch.device) -> Tensor:
        """A copy of one tensor, in its stored dtype if `dtype` is None. Read, not mapped: mapped files count as
        resident.
        """
        stored = self._where[name]
        tensor = torch.empty(stored.shape, dtype=_DTYPES[stored.dtype])
        flat: Any = tensor.reshape(-1).view(torch.uint8).numpy()
        view = memoryview(flat)
        try:
            file = self._file(stored.path)
            file.seek(stored.begin)
            count = file.readinto(view)
        except OSError as error:
            raise CheckpointCorrupt(str(stored.path), f"tensor {stored.name} cannot be read: {error}") from error
        if count != len(view):
            raise CheckpointCorrupt(str(stored.path), f"tensor {stored.name} ends early")
        return tensor.to(device=device, dtype=dtype)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._where[name].shape

    def _file(self, path: Path) -> BufferedReader:
        if path not in self._files:
            self._files[path] = self.enter_context(path.open("rb"))
        return self._files[path]


class Packer:
    """The parts of one checkpoint, for one backend."""

    def __init__(
        self, reader: WeightReader, spec: ModelSpec, backend: Backend, dtype: torch.dtype, scheme: Scheme | None = None
    ) -> None:
        self._reader, self._spec, self._backend, self._dtype, self._scheme = reader, spec, backend, dtype, scheme
        self._plain_dtype = dtype if scheme is None else torch.float32
        self.error = WeightError()  # of all quantised weights so far

    def tensor(self, name: str) -> Tensor:
        return self._reader.read(name, self._dtype, self._backend.device)

    def embedding(self, weights: PackedWeights | None) -> Tensor:
        """The token embeddings, in `weights` if given."""
        name = "embed_tokens.weight"
        if weights is None:
            return self.tensor(name)
        shape = self._reader.shape(name)

        def fill(packed: Tensor) -> Facts:
            packed.copy_(self.tensor(name).flatten().view(torch.uint8))
            return {}

        placed, _ = weights.place(math.prod(shape) * self._dtype.itemsize, fill)
        return placed.view(self._dtype).view(shape)

    def norm(self, name: str) -> Tensor:
        """A norm's weight; Gemma's 1 + w is folded in, in float32."""
        if self._spec.norm_offset:
            return self._reader.read(name, torch.float32, self._backend.device) + 1.0
        return self.tensor(name)

    def linear(self, *names: str) -> Linear:
        """One packed product of several matrices stacked by rows, with their biases."""
        weight = stacked([self._weight(f"{name}.weight") for name in names], self._plain_dtype)
        has_bias = f"{names[0]}.bias" in self._reader
        return self._pack(weight, torch.cat([self.tensor(f"{name}.bias") for name in names]) if has_bias else None)

    def head(self, embedding: Tensor) -> Linear:
        """The LM head; some models share its weights with `embedding`."""
        if not self._spec.is_tied:
            return self.linear("lm_head")
        return self._pack(embedding if self._scheme is None else self._weight("embed_tokens.weight"), None)

    def _weight(self, name: str) -> AnyWeight:
        """A linear weight; not rounded to the model's dtype if it will be quantised."""
        return self._reader.weight(name, self._dtype if self._scheme is None else None, self._backend.device)

    def _pack(self, weight: AnyWeight, bias: Tensor | None) -> Linear:
        """A packed product; a quantised weight is quantised anew only where the settings ask for it."""
        if self._scheme is not None:
            quantized = self._backend.pack_quantized(plain_weight(weight), bias, self._scheme, self._dtype)
            self.error += quantized.error
            return quantized
        if isinstance(weight, Tensor):
            return self._backend.pack_linear(weight, bias)
        linear, error = self._backend.pack_stored(weight, bias, self._dtype)
        self.error += error
        return linear

    def _restored(self, weight: AnyWeight) -> Tensor:
        """A weight whose rows no stored form can be taken from."""
        if isinstance(weight, Tensor):
            return weight
        plain, error = dequantised(weight, self._plain_dtype)
        self.error += error if self._scheme is None else WeightError()  # else the error of quantising it counts
        return plain

    def _pack_heads(self, weight: Tensor) -> HeadLinears:
        if self._scheme is None:
            return self._backend.pack_heads(weight)
        return HeadByHead([self._pack(head, None) for head in weight])

    def layers(self) -> Iterator[Layer]:
        """All layers, in order."""
        logged_s = time.monotonic()
        for index in range(self._spec.num_layers):
            yield self._layer(index)
            if time.monotonic() - logged_s > _LOG_EVERY_S:
                logged_s = time.monotonic()
                logger.info("%d of %d layers are loaded", index + 1, self._spec.num_layers)

    def _layer(self, index: int) -> Layer:
        at, latent, sandwich = f"layers.{index}", self._spec.latent, self._spec.sandwich_norms
        before_mlp = "pre_feedforward_layernorm" if sandwich else "post_attention_layernorm"
        own = f"{at}.self_attn"
        return Layer(
            input_norm=self.norm(f"{at}.input_layernorm.weight"),
            attention=self._head_attention(own) if latent is None else self._latent_attention(own, latent),
            post_attention_norm=self.norm(f"{at}.post_attention_layernorm.weight") if sandwich else None,
            mlp_norm=self.norm(f"{at}.{before_mlp}.weight"),
            mlp=self._mlp(f"{at}.mlp", index),
            post_mlp_norm=self.norm(f"{at}.post_feedforward_layernorm.weight") if sandwich else None,
        )

    def _head_attention(self, at: str) -> HeadAttention:
        qkv, has_norms = self.linear(*(f"{at}.{name}_proj" for name in "qkv")), self._spec.has_qk_norm
        norms = (self.norm(f"{at}.q_norm.weight"), self.norm(f"{at}.k_norm.weight")) if has_norms else None
        return HeadAttention(qkv=qkv, head_norms=norms, o=self.linear(f"{at}.o_proj"))

    def _mlp(self, at: str, layer: int) -> Mlp:
        experts = self._spec.experts
        if experts is None or layer not in experts.layers:
            return self._gated_mlp(at)
        return self._expert_mlp(at, experts)

    def _gated_mlp(self, at: str) -> GatedMlp:
        gate_up, down = self.linear(f"{at}.gate_proj", f"{at}.up_proj"), self.linear(f"{at}.down_proj")
        return GatedMlp(self._backend, self._spec.activation, gate_up, down)

    def _expert_mlp(self, at: str, spec: ExpertSpec) -> ExpertMlp:
        device, correction = self._backend.device, f"{at}.gate.e_score_correction_bias"
        experts = self._backend.pack_experts(
            self._expert_weights(at, spec), self._spec.activation, self._dtype, self._scheme
        )
        self.error += experts.error
        return ExpertMlp(
            self._backend,
            spec.choice,
            self._wide_linear(f"{at}.gate"),
            self._reader.read(correction, torch.float32, device) if correction in self._reader else None,
            experts,
            self._gated_mlp(f"{at}.{shared_name(spec)}") if spec.shared_ffn_size else None,
            self._wide_linear(f"{at}.shared_expert_gate") if spec.has_shared_gate else None,
        )

    def _expert_weights(self, at: str, spec: ExpertSpec) -> Iterator[tuple[AnyWeight, AnyWeight]]:
        """(gate and up, down) of each expert, read lazily."""
        for index in range(spec.choice.num_experts):
            gate, up, down = (
                self._weight(f"{at}.experts.{index}.{part}_proj.weight") for part in ("gate", "up", "down")
            )
            yield stacked((gate, up), self._plain_dtype), down

    def _wide_linear(self, name: str) -> Linear:
        """A linear layer in float32 for any model dtype: routing must not depend on rounding."""
        weight = self._reader.weight(f"{name}.weight", torch.float32, self._backend.device)
        return self._backend.pack_linear(plain_weight(weight))

    def _latent_attention(self, at: str, spec: LatentSpec) -> LatentAttention:
        has_down = spec.query_rank is not None
        heads, kv_up = self._spec.num_heads, self._restored(self._weight(f"{at}.kv_b_proj.weight"))
        keys, values = kv_up.unflatten(0, (heads, -1)).split((spec.nope_dim, spec.value_dim), dim=1)
        return LatentAttention(
            query_down=self.linear(f"{at}.q_a_proj") if has_down else None,
            query_norm=self.norm(f"{at}.q_a_layernorm.weight") if has_down else None,
            query=self._rotary_linear(f"{at}.{'q_b_proj' if has_down else 'q_proj'}", spec, heads),
            kv_down=self._rotary_linear(f"{at}.kv_a_proj_with_mqa", spec, 1),
            kv_norm=self.norm(f"{at}.kv_a_layernorm.weight"),
            key_up=self._pack_heads(keys.transpose(1, 2).contiguous()),
            value_up=self._pack_heads(values.contiguous()),
            o=self.linear(f"{at}.o_proj"),
        )

    def _rotary_linear(self, name: str, spec: LatentSpec, heads: int) -> Linear:
        """A linear layer whose outputs end, head by head, in a rotary part."""
        weight = self._weight(f"{name}.weight")
        bias = self.tensor(f"{name}.bias") if f"{name}.bias" in self._reader else None
        if not spec.is_interleaved:
            return self._pack(weight, bias)
        index = self._in_halves(torch.arange(shape_of(weight)[0], device=self._backend.device), spec, heads)
        rows = None if isinstance(weight, Tensor) else weight.rows(index)
        return self._pack(rows or self._restored(weight)[index], None if bias is None else bias[index])

    @staticmethod
    def _in_halves(rows: Tensor, spec: LatentSpec, heads: int) -> Tensor:
        """Pairs of each head's last `rope_dim` rows [N] separated into two halves.

        Our kernels rotate halves; the scores are the same when queries and keys are permuted alike.
        """
        plain, turned = rows.unflatten(0, (heads, -1)).split((rows.shape[0] // heads - spec.rope_dim, spec.rope_dim), 1)
        return torch.cat((plain, turned[:, 0::2], turned[:, 1::2]), dim=1).flatten(0, 1)


def shared_name_of(
    folder: Path, spec: ModelSpec, backend: Backend, dtype: torch.dtype, scheme: Scheme | None
) -> str | None:
    """The name of the file of these packed weights; None: they are small, or no packing of this backend can be shared.

    Integers that a checkpoint stores are packed by each worker. Each NUMA node has a file of its own, so that its
    memory is near.
    """
    packing = backend.packing_of(dtype)
    num_bytes = sum(math.prod(shape) for shape in expected_shapes(spec).values()) * dtype.itemsize
    if packing is None or spec.quantization is not None or num_bytes < LEAST_SHARED_BYTES:
        return None
    nodes = "-".join(str(node) for node in sorted({core.node for core in own_cores()}))
    written = [path.stat().st_mtime_ns for path in sorted(folder.glob("*.safetensors"))]  # the digest reads samples
    parts = (model_digest(folder), str(written), str(dtype), str(scheme), packing, nodes)
    return f"{folder.name}-{blake2b(' '.join(parts).encode(), digest_size=12).hexdigest()}"


def load_model(
    folder: Path,
    backend: Backend,
    dtype: torch.dtype,
    *,
    block_size: int = 16,
    kv_layout: KvOrder = "NHD",
    kv_dtype: torch.dtype | None = None,
    quantization: Scheme | None = None,
    is_shared: bool = False,
) -> DecoderModel:
    """The model of a checkpoint folder, packed for `backend`, with weights quantised by `quantization`, if given.

    `block_size` (tokens), `kv_layout` and `kv_dtype` (None: `dtype`) are the KV cache's. is_shared: large weights lie
    in memory that this machine's workers share, where the backend can.

    Raises:
        UnsupportedModel, CheckpointCorrupt, ModelNotFound: see ModelSpec.from_folder and WeightReader.
    """
    spec, start_s = ModelSpec.from_folder(folder), time.monotonic()

    def packed(weights: PackedWeights | None, *, packs: bool = True) -> tuple[DecoderModel, WeightError]:
        where = contextlib.nullcontext() if weights is None else backend.packing(weights)
        with torch.no_grad(), WeightReader(folder, spec, packs=packs) as reader, where:
            packer = Packer(reader, spec, backend, dtype, quantization)
            embedding = packer.embedding(weights)
            model = DecoderModel(
                spec,
                backend,
                dtype,
                embedding=embedding,
                layers=tuple(packer.layers()),
                final_norm=packer.norm("norm.weight"),
                lm_head=packer.head(embedding),
                block_size=block_size,
                kv_layout=kv_layout,
                kv_dtype=kv_dtype,
            )
            return model, packer.error

    def pack(weights: PackedWeights) -> None:
        """As `packed` does, one layer after the other, so that memory holds one."""
        with torch.no_grad(), WeightReader(folder, spec) as reader, backend.packing(weights):
            packer = Packer(reader, spec, backend, dtype, quantization)
            embedding = packer.embedding(weights)
            for _ in packer.layers():
                pass
            packer.head(embedding)

    name = shared_name_of(folder, spec, backend, dtype, quantization) if is_shared else None
    found = name and shared_weights(name, pack, lambda weights: packed(weights, packs=False))
    model, error = found or packed(None)
    if spec.quantization is not None and spec.quantization.has_kv_scheme:
        logger.info("kv_cache_scheme of the checkpoint is ignored: an fp8 cache has a scale for each vector here")
    if error.num_weights:
        model.weight_error = error
        logger.info(
            "weights are %s: relative RMS error %.3f%%, %.0f MiB instead of %.0f; took %.1f s",
            quantization or spec.quantization,
            100 * error.relative,
            error.num_bytes / 2**20,
            error.num_weights * dtype.itemsize / 2**20,
            time.monotonic() - start_s,
        )
    return model
