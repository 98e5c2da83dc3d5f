"""Every kernel by its definition, in float64, with error bounds that follow from rounding.

A result in a dtype with unit roundoff u has an error of up to u relative to itself. Inside, kernels compute in float32
(v = 2**-24): a sum of n terms adds n rounding errors, each at most v times the terms' total size. Errors of different
operations are independent and undirected, so that a sum of errors e_i exceeds LAMBDA * sqrt(sum e_i^2) with a
probability of 2 * exp(-LAMBDA^2 / 2) = 3e-14 (Hoeffding). Worst-case bounds, n * v, would be as large as the results of
a context of 32k tokens and detect nothing. Errors that all terms have in common count in full.

Source: Higham, Mary: A New Approach to Probabilistic Rounding Error Analysis (SIAM J. Sci. Comput. 41(5), 2019).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from kvrelay import fp8
from kvrelay.kernels.backend import Activation
from kvrelay.kernels.oracle.grid_steps import KernelCase, KernelStep

LAMBDA = 8.0
V = 2.0**-24  # unit roundoff of float32, the dtype of sums
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
_TINY = {torch.float32: 2.0**-126, torch.bfloat16: 2.0**-126, torch.float16: 2.0**-24}  # lost to underflow


@dataclass(frozen=True, slots=True)
class Exact:
    """The exact result of a kernel, float64, and the error bound of each number."""

    value: Tensor
    bound: Tensor

    def ratio(self, found: Tensor) -> float:
        """The largest error relative to its bound; infinite for NaN. Correct if at most 1."""
        if found.shape != self.value.shape:
            raise ValueError(f"a result of shape {tuple(found.shape)} where {tuple(self.value.shape)} is due")
        error = (found.double() - self.value.to(found.device)).abs()
        shares = torch.where(error == 0, 0.0, error / self.bound.to(found.device))
        return float(shares.nan_to_num(math.inf, math.inf).amax()) if shares.numel() else 0.0


def rounded(value: Tensor, inner: Tensor | float, dtype: torch.dtype) -> Exact:
    """A result in `dtype` whose unrounded form has an error of up to `inner`."""
    return Exact(value, inner + UNIT[dtype] * (value.abs() + inner) + _TINY[dtype])


def unrounded(value: Tensor) -> Exact:
    """A result that must match exactly."""
    return Exact(value.double(), torch.zeros_like(value, dtype=torch.float64))


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, held: Tensor | None = None, lost: Tensor | None = None
) -> Exact:
    """x [..., in] times weight [out, in], plus bias [out].

    held: for a quantised weight, the size of the terms of each number; it may be rounded to x's dtype on the way.
    lost: error of each number of x, where it is quantised, too.
    """
    wide, heavy = x.double(), weight.double()
    offset = 0.0 if bias is None else bias.double()
    value = wide @ heavy.T + offset
    total = wide.abs() @ heavy.abs().T + (0.0 if bias is None else bias.double().abs())
    inner = 2 * LAMBDA * math.sqrt(x.shape[-1] + 1) * V * total
    if held is not None:
        inner = inner + LAMBDA * UNIT[x.dtype] * (wide.square() @ held.double().square().T).sqrt()
    if lost is not None:
        inner = inner + LAMBDA * (lost.square() @ heavy.square().T).sqrt()
    return rounded(value, inner, x.dtype)


def lost_as_fp8(x: Tensor, group: int) -> Tensor:
    """What numbers x [R, K] lose as e4m3, at most, with a scale for each `group` of a row: [R, K] float64."""
    wide = x.double().abs()
    most = F.pad(wide, (0, -wide.shape[1] % group)).unflatten(1, (-1, group)).amax(-1)
    scales = most.repeat_interleave(group, 1)[:, : wide.shape[1]] / torch.finfo(torch.float8_e4m3fn).max
    lost: Tensor = wide * 2.0**-4 + scales * 2.0**-10  # half a unit of its three bits, or of the smallest numbers
    return lost


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, x_roundings: int = 0) -> Exact:
    """x_roundings: how often x was rounded to its dtype before; kernels may skip each."""
    wide = x.double()
    value = wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()
    inner = (LAMBDA * math.sqrt(x.shape[-1]) + 8) * V + 2 * x_roundings * UNIT[x.dtype]
    return rounded(value, inner * value.abs(), x.dtype)


def rope(x: Tensor, cos_sin: Tensor, positions: Tensor) -> Exact:
    """x [T, heads, dim] rotated as complex numbers; dims past the rotary ones are unchanged."""
    half = cos_sin.shape[1] // 2
    table = cos_sin[positions].double().unsqueeze(1)
    turn = torch.complex(table[..., :half], table[..., half:])
    first, second, rest = x[..., :half].double(), x[..., half : 2 * half].double(), x[..., 2 * half :].double()
    turned = torch.complex(first, second) * turn
    value = torch.cat((turned.real, turned.imag), -1)
    size = turn.real.abs().maximum(turn.imag.abs()) * (first.abs() + second.abs())
    exact = rounded(value, 4 * V * torch.cat((size, size), -1), x.dtype)
    return Exact(torch.cat((exact.value, rest), -1), torch.cat((exact.bound, torch.zeros_like(rest)), -1))


def gated_activation(gate_up: Tensor, kind: Activation) -> Exact:
    gate, up = gate_up.double().chunk(2, -1)
    if kind == "silu":
        value = gate / (1 + (-gate).exp()) * up
    else:
        value = 0.5 * gate * (1 + (math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)).tanh()) * up
    return rounded(value, 16 * V * (gate * up).abs() + 8 * V * gate.abs() * value.abs(), gate_up.dtype)


def attention(step: KernelStep, scale: float) -> Exact:
    """Causal attention of a step, sequence by sequence, over its cache -> [T, heads, dim of values]."""
    case, batch = step.case, step.batch
    size = (int(batch.query_starts[-1]), case.heads, case.latent_dim or case.head_dim)
    value, bound = (torch.empty(size, dtype=torch.float64, device=step.q.device) for _ in range(2))
    for row in range(batch.context_lens.shape[0]):
        own = slice(int(batch.query_starts[row]), int(batch.query_starts[row + 1]))
        keys, values = _read(step, row)
        value[own], bound[own] = _attend(case, step.q[own].double(), keys, values, scale)
    return rounded(value, bound, case.dtype)


def _read(step: KernelStep, row: int) -> tuple[Tensor, Tensor]:
    """Keys and values [context, kv_heads, dim] of one sequence, float64, read token by token."""
    case, tokens = step.case, torch.arange(int(step.batch.context_lens[row]))
    blocks = step.batch.block_tables[row, tokens // case.block_size].long()
    read = fp8.loaded(step.kv_layer[blocks.to(step.q.device), :, (tokens % case.block_size).to(step.q.device)]).double()
    return read[:, 0], read[:, -1, :, : case.latent_dim]


def _attend(case: KernelCase, q: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """(attention [Q, heads, dim], its error bound before rounding) of q, the context's last tokens."""
    (num_queries, heads, dim), (context, kv_heads, _) = q.shape, keys.shape
    q = q.view(num_queries, kv_heads, heads // kv_heads, dim)
    scores = torch.einsum("qkgd,ckd->qkgc", q, keys) * scale
    lengths = torch.einsum("qkg,k->qkg", q.norm(dim=-1), keys.norm(dim=-1).amax(0)) * scale  # a bound on |q| |k|
    if case.softcap is not None:
        scores = case.softcap * (scores / case.softcap).tanh()
    position = torch.arange(context - num_queries, context, device=q.device).unsqueeze(1)
    token = torch.arange(context, device=q.device)
    seen = token <= position
    if case.window is not None:
        seen &= token > position - case.window
    seen = seen[:, None, None]
    probs = scores.masked_fill(~seen, -math.inf).softmax(-1)
    out = torch.einsum("qkgc,ckd->qkgd", probs, values)

    size = torch.einsum("qkgc,ckd->qkgd", probs, values.abs()) + out.abs()
    spread = 2 * (
        torch.einsum("qkgc,ckd->qkgd", probs.square(), values.square())
        + out.square() * probs.square().sum(-1, keepdim=True)
    )
    largest = scores.masked_fill(~seen, 0.0).abs().amax(-1, keepdim=True) + (case.softcap or 0.0)
    alone = V * (math.sqrt(dim) * lengths.unsqueeze(-1) + 4 * largest + 8) + UNIT[case.dtype]
    shared = V * (2 * largest + 8 + 2 * LAMBDA * math.sqrt(context))
    bound = LAMBDA * alone * spread.sqrt() + shared * size
    return out.flatten(1, 2), bound.flatten(1, 2)
