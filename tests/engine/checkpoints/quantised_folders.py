"""Writes small checkpoints in the published quantised formats, each beside a plain one of the same numbers.

The integers, scales and zero points are chosen here, plain weights are computed from them before anything is packed,
and loops that follow the formats' definitions pack them: nothing is shared with the code that reads them.
"""

import json
import math
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

E4M3 = torch.float8_e4m3fn
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def pack_rows(values, bits, order=range(8)):
    """[rows, columns] integers >= 0 -> [rows, words] int32, the first column in the lowest bits."""
    per = 32 // bits
    rows, columns = values.shape
    words = np.zeros((rows, math.ceil(columns / per)), dtype=np.uint32)
    for column in range(columns):
        word, place = divmod(column, per)
        shift = bits * (list(order).index(place) if bits == 4 else place)
        words[:, word] |= values[:, column].numpy().astype(np.uint32) << np.uint32(shift)
    return torch.from_numpy(words.view(np.int32).copy())


def fp8_parts(weight, block):
    """(values, scales float32 [tiles], the plain weight)."""
    rows, columns = block
    scales = torch.zeros(math.ceil(weight.shape[0] / rows), math.ceil(weight.shape[1] / columns))
    values, plain = torch.zeros_like(weight), torch.zeros_like(weight)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            at = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
            scales[i, j] = weight[at].abs().max() / 448
            values[at] = (weight[at] / scales[i, j]).to(E4M3).float()
            plain[at] = values[at] * scales[i, j]
    return values.to(E4M3), scales, plain


def whole(weight):
    values, scale, plain = fp8_parts(weight, weight.shape)
    return {"weight": values, "weight_scale": scale.reshape(()), "input_scale": torch.tensor(0.125)}, plain


def channel(weight):
    values, scales, plain = fp8_parts(weight, (1, weight.shape[1]))
    return {"weight": values, "weight_scale": scales}, plain


def fp8_blocks(size):
    """The format with scales for blocks of size x size."""

    def write(weight):
        values, scales, plain = fp8_parts(weight, (size, size))
        return {"weight": values, "weight_scale_inv": scales}, plain

    return {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [size, size]}, write


def integers(weight, bits, group, *, symmetric, dtype=torch.float16):
    """(integers >= 0 [N, K], scales [N, G], zero points [N, G] >= 0, the plain weight)."""
    n, k = weight.shape
    group, most = group or k, (1 << bits) - 1
    q, plain = torch.zeros(n, k, dtype=torch.int64), torch.zeros(n, k)
    scales, zeros = torch.zeros(n, k // group, dtype=dtype), torch.zeros(n, k // group, dtype=torch.int64)
    for g in range(k // group):
        at = slice(g * group, (g + 1) * group)
        low, high = weight[:, at].amin(1).clamp(max=0), weight[:, at].amax(1).clamp(min=0)
        size = torch.maximum(high, -low) * 2 / most if symmetric else (high - low) / most
        scales[:, g] = size.to(dtype)
        scale = scales[:, g].float()
        zeros[:, g] = (most + 1) // 2 if symmetric else (-low / scale).round().long().clamp(1, most)
        q[:, at] = ((weight[:, at] / scale[:, None]).round().long() + zeros[:, g, None]).clamp(0, most)
        plain[:, at] = (q[:, at] - zeros[:, g, None]).float() * scale[:, None]
    return q, scales, zeros, plain


def compressed(weight, bits=4, group=32, *, symmetric=True, packed=True):
    q, scales, zeros, plain = integers(weight, bits, group, symmetric=symmetric, dtype=torch.bfloat16)
    half = 1 << (bits - 1)
    parts = {"weight_scale": scales}
    if packed:
        parts |= {"weight_packed": pack_rows(q, bits), "weight_shape": torch.tensor(weight.shape)}
        zero_points = pack_rows(zeros.T, bits).T.contiguous()
    else:
        parts |= {"weight": (q - half).to(torch.int8)}
        zero_points = (zeros - half).to(torch.int8)
    return parts | ({} if symmetric else {"weight_zero_point": zero_points}), plain


def gptq(weight, bits=4, group=32, shift=1, *, symmetric=False):
    q, scales, zeros, plain = integers(weight, bits, group, symmetric=symmetric)
    index = torch.arange(weight.shape[1], dtype=torch.int32) // (group or weight.shape[1])
    words = pack_rows(q, bits).T.contiguous()
    parts = {"qweight": words, "qzeros": pack_rows(zeros.T - shift, bits), "g_idx": index}
    return parts | {"scales": scales.T.contiguous()}, plain


def awq(weight, group=32):
    q, scales, zeros, plain = integers(weight, 4, group, symmetric=False)
    words, zero_points = (pack_rows(x.T, 4, AWQ_ORDER) for x in (q, zeros))
    return {"qweight": words, "qzeros": zero_points, "scales": scales.T.contiguous()}, plain


def mxfp4(weight):
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    (n, k), codes = weight.shape, torch.zeros(weight.shape, dtype=torch.int64)
    scales, plain = torch.zeros(n, k // 32, dtype=torch.uint8), torch.zeros(n, k)
    for g in range(k // 32):
        at = slice(32 * g, 32 * g + 32)
        power = torch.ceil(torch.log2(weight[:, at].abs().amax(1) / 6))
        scales[:, g] = (power + 127).to(torch.uint8)
        nearest = (weight[:, at, None] / torch.exp2(power)[:, None, None] - table).abs().argmin(-1)
        codes[:, at], plain[:, at] = nearest, table[nearest] * torch.exp2(power)[:, None]
    return {"weight_packed": (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8), "weight_scale": scales}, plain


def scheme(weights, stored, inputs=None, **others):
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    config = {"quant_method": "compressed-tensors", "format": stored, "config_groups": {"group_0": group}}
    return config | {"quantization_status": "compressed", "ignore": ["lm_head"]} | others


DYNAMIC = {"dynamic": True, "num_bits": 8, "strategy": "token", "symmetric": True, "type": "float"}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
FORMATS = {  # name: (quantization_config, writer of one weight)
    "fp8": ({"quant_method": "fp8", "activation_scheme": "static"}, whole),
    "fp8 blocks": fp8_blocks(16),
    "fp8 channels": (
        scheme({"num_bits": 8, "type": "float", "strategy": "channel"}, "float-quantized", DYNAMIC), channel,
    ),
    "int8": (
        scheme({"num_bits": 8, "type": "int", "strategy": "channel"}, "int-quantized"),
        lambda w: compressed(w, 8, 0, packed=False),
    ),
    "int4": (scheme(INT4, "pack-quantized"), compressed),
    "int4 with zeros": (
        scheme(INT4 | {"symmetric": False}, "pack-quantized"), lambda w: compressed(w, symmetric=False),
    ),
    "int4 channels": (
        scheme(INT4 | {"strategy": "channel", "group_size": None}, "pack-quantized"),
        lambda w: compressed(w, group=0),
    ),
    "int8 packed": (scheme(INT4 | {"num_bits": 8}, "pack-quantized"), lambda w: compressed(w, 8)),
    "gptq": (GPTQ, gptq),
    "gptq v2": (GPTQ | {"checkpoint_format": "gptq_v2"}, lambda w: gptq(w, shift=0)),
    "gptq 8 bits": (GPTQ | {"bits": 8, "group_size": -1, "sym": True}, lambda w: gptq(w, 8, 0, symmetric=True)),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}, awq),
    "mxfp4": (
        scheme({"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}, "mxfp4-pack-quantized"),
        mxfp4,
    ),
}  # fmt: skip


def is_linear(name, tensor):
    return tensor.dim() == 2 and name.split(".")[-2].endswith(("_proj", "w1", "w2", "w3", "kv_a_proj_with_mqa"))


def quantised_folder(source: Path, target: Path, kind: str, change=lambda tensors: None):
    """(folder in that format, folder of the same numbers) of a plain one; `change` spoils the former. kind: of FORMATS,
    or such a pair.
    """
    config, write = FORMATS[kind] if isinstance(kind, str) else kind
    stored, plain = {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        stored[name] = plain[name] = tensor
        if is_linear(name, tensor):
            parts, plain[name] = write(stored.pop(name).float())
            stored |= {f"{name.removesuffix('weight')}{part}": value for part, value in parts.items()}
    change(stored)
    base = json.loads((source / "config.json").read_text())
    for folder, tensors, own in (
        (target / "quantised", stored, {"quantization_config": config}),
        (target / "plain", plain, {}),
    ):
        folder.mkdir(parents=True)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(base | own))
        (folder / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
    return target / "quantised", target / "plain"
