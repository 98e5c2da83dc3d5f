"""Every kernel of the device's backend against the reference on the same device, over a grid of shapes; controls
included.
"""

import itertools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bench.gpu.choices import random_masks
from bench.gpu.section import Context
from kvrelay.kernels.backend import AttentionBatch, AttentionShape, Backend, SamplingBatch
from kvrelay.kernels.oracle.grid import DTYPES, FAMILIES, judge
from kvrelay.kernels.oracle.reference import ReferenceBackend
from kvrelay.kernels.select import select_backend

TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-3}
SCALE = 0.1
_COMPILE_S = 60.0  # what one kernel may take; nothing can be interrupted meanwhile


@dataclass(frozen=True, slots=True)
class KernelStep:
    """(new tokens, context with them) of each sequence; single tokens first."""

    name: str
    sequences: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Variant:
    """FlashInfer compiles attention anew for each of these."""

    dtype: torch.dtype
    head_dim: int
    window: int | None = None
    softcap: float | None = None

    def __str__(self) -> str:
        extras = [f"window {self.window}"] if self.window else []
        extras += [f"softcap {self.softcap}"] if self.softcap else []
        return ", ".join([str(self.dtype).removeprefix("torch."), f"heads of {self.head_dim}", *extras])


_BF16, _FP16 = torch.bfloat16, torch.float16
VARIANTS = (
    Variant(_BF16, 128), Variant(_BF16, 64), Variant(_BF16, 128, window=20), Variant(_BF16, 256, softcap=5.0),
    Variant(_FP16, 128), Variant(_BF16, 256), Variant(_FP16, 64), Variant(_BF16, 128, window=33, softcap=20.0),
)  # fmt: skip


def steps(*, tiny: bool) -> list[KernelStep]:
    if tiny:
        return [
            KernelStep("decode, ragged", ((1, 1), (1, 17), (1, 40))),
            KernelStep("mixed", ((1, 33), (5, 5), (16, 48))),
        ]
    return [
        KernelStep("decode 1", ((1, 1000),)),
        KernelStep("decode, ragged", tuple((1, length) for length in (1, 2, 15, 16, 17, 31, 33, 500, 4097, 32768))),
        KernelStep("decode 64", tuple((1, 100 + 37 * index) for index in range(64))),
        KernelStep("chunk", ((512, 512),)),
        KernelStep("chunk after context", ((300, 5000),)),
        KernelStep("mixed", ((1, 33), (1, 700), (1, 1), (5, 5), (16, 48), (17, 49), (400, 3000))),
    ]


def batch_of(step: KernelStep, block_size: int, generator: torch.Generator) -> tuple[AttentionBatch, int]:
    """Metadata with shuffled blocks; and how many blocks there must be."""
    needed = [-(-context // block_size) for _, context in step.sequences]
    order = torch.randperm(sum(needed) + 2, generator=generator).to(torch.int32)
    tables = torch.zeros(len(needed), max(needed), dtype=torch.int32)
    slots, positions, used = [], [], 0
    for row, ((new, context), count) in enumerate(zip(step.sequences, needed, strict=True)):
        tables[row, :count] = order[used : used + count]
        used += count
        own = torch.arange(context - new, context)
        positions.append(own)
        slots.append(tables[row, own // block_size].long() * block_size + own % block_size)
    new_tokens = torch.tensor([new for new, _ in step.sequences], dtype=torch.int32)
    starts = torch.zeros(len(needed) + 1, dtype=torch.int32)
    starts[1:] = new_tokens.cumsum(0)
    contexts = torch.tensor([context for _, context in step.sequences], dtype=torch.int32)
    return AttentionBatch(
        starts,
        contexts,
        tables,
        torch.cat(slots),
        torch.cat(positions),
        num_decode=int((new_tokens == 1).sum()),
        max_query_len=int(new_tokens.max()),
        max_context_len=int(contexts.max()),
    ), len(order)


@dataclass(slots=True)
class Tally:
    """The worst of one group of cases."""

    name: str
    num_cases: int = 0
    worst: float = 0.0
    wrong: list[str] | None = None

    def compare(self, case: str, found: Tensor, expected: Tensor) -> float:
        """Largest difference, relative to the largest value expected."""
        dtype = found.dtype
        size = max(float(expected.float().abs().max()), 1e-6)
        error = float((found.float() - expected.float()).abs().max()) / size
        self.num_cases += 1
        self.worst = max(self.worst, error)
        if not error <= TOLERANCE[dtype]:  # NaN, too
            self.wrong = [*(self.wrong or []), case]
        return error

    def add_to(self, context: Context) -> None:
        context.add(
            kernel=self.name,
            cases=self.num_cases,
            worst_relative_error=self.worst,
            ok=not self.wrong,
            wrong="; ".join((self.wrong or [])[:3]),
        )


class Grid:
    """The kernels of one backend beside the reference."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.backend: Backend = select_backend("cuda" if context.is_cuda else "cpu", context.device)
        self.reference = ReferenceBackend(context.device)
        self.generator = torch.Generator().manual_seed(0)
        self._on_device = torch.Generator(context.device).manual_seed(0)

    def random(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(*shape, generator=self._on_device, device=self.context.device).to(dtype)

    def attend(
        self,
        backend: Backend | ReferenceBackend,
        shape: AttentionShape,
        batch: AttentionBatch,
        q: Tensor,
        kv: Tensor,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        plan = backend.plan(batch, shape)
        if shape.latent_dim is not None:
            return backend.latent_attention(*q.tensor_split((shape.latent_dim,), dim=-1), kv, plan, scale=SCALE)
        return backend.attention(q, kv, plan, scale=SCALE, window=window, softcap=softcap)

    def attention(self, variants: tuple[Variant, ...]) -> None:
        """One row for each kernel that FlashInfer compiles by itself; those left out for lack of time are printed."""
        for variant in variants:
            if self.context.is_cuda and self.context.left_s < _COMPILE_S:
                self.context.add(kernel=f"attention: {variant}", left_out="no time left to compile it")
            else:
                self.variant(variant)

    def variant(self, variant: Variant) -> None:
        tiny = self.context.tiny
        tally = Tally(f"attention: {variant}")
        heads = [(4, 2), (4, 1)] if tiny else [(32, 8), (16, 16), (8, 1)]
        for (num_heads, kv_heads), block, step in itertools.product(heads, (16, 32), steps(tiny=tiny)):
            shape = AttentionShape(num_heads, kv_heads, variant.head_dim, block, variant.dtype)
            batch, num_blocks = batch_of(step, block, self.generator)
            kv = self.random(num_blocks, 2, block, kv_heads, variant.head_dim, dtype=variant.dtype)
            q = self.random(int(batch.query_starts[-1]), num_heads, variant.head_dim, dtype=variant.dtype)
            found, expected = (
                self.attend(one, shape, batch, q, kv, variant.window, variant.softcap)
                for one in (self.backend, self.reference)
            )
            tally.compare(f"{num_heads}/{kv_heads} heads, blocks of {block}, {step.name}", found, expected)
        tally.add_to(self.context)

    def latent_attention(self) -> None:
        tally = Tally("latent attention")
        for num_heads, step in itertools.product(
            [4] if self.context.tiny else [16, 128], steps(tiny=self.context.tiny)
        ):
            latent, rope = (32, 16) if self.context.tiny else (512, 64)
            shape = AttentionShape(num_heads, 1, latent + rope, 16, torch.bfloat16, latent_dim=latent)
            batch, num_blocks = batch_of(step, 16, self.generator)
            kv = self.random(num_blocks, 1, 16, 1, latent + rope, dtype=shape.dtype)
            q = self.random(int(batch.query_starts[-1]), num_heads, latent + rope, dtype=shape.dtype)
            found, expected = (
                self.attend(one, shape, batch, q, kv, None, None) for one in (self.backend, self.reference)
            )
            tally.compare(f"{num_heads} heads, {step.name}", found, expected)
        tally.add_to(self.context)

    def control(self) -> None:
        """A changed key must show: the comparison can fail."""
        dim = 64 if self.context.tiny else 128
        shape = AttentionShape(4, 2, dim, 16, torch.bfloat16)
        batch, num_blocks = batch_of(KernelStep("control", ((1, 40),)), 16, self.generator)
        kv = self.random(num_blocks, 2, 16, 2, dim, dtype=shape.dtype)
        q = self.random(1, 4, dim, dtype=shape.dtype)
        expected = self.attend(self.reference, shape, batch, q, kv, None, None)
        kv[int(batch.block_tables[0, 1]), 1] += 1.0
        tally = Tally("control")
        tally.compare("a changed block", self.attend(self.backend, shape, batch, q, kv, None, None), expected)
        self.context.add(
            kernel="control: a changed block is seen", cases=1, worst_relative_error=tally.worst, ok=bool(tally.wrong)
        )

    def elementwise(self) -> None:
        dtypes = [torch.bfloat16] if self.context.tiny else [torch.bfloat16, torch.float16, torch.float32]
        widths = [64] if self.context.tiny else [576, 2048, 4096, 8192]
        norm, activation = Tally("rms_norm, add_rms_norm"), Tally("gated activation")
        for dtype, width, rows in itertools.product(dtypes, widths, (1, 7, 300)):
            x, residual, weight = (
                self.random(*shape, dtype=dtype) for shape in ((rows, width), (rows, width), (width,))
            )
            case = f"{dtype} {rows} x {width}"
            norm.compare(case, self.backend.rms_norm(x, weight, 1e-5), self.reference.rms_norm(x, weight, 1e-5))
            found = self.backend.add_rms_norm(x.clone(), residual.clone(), weight, 1e-5)
            for a, b in zip(found, self.reference.add_rms_norm(x.clone(), residual.clone(), weight, 1e-5), strict=True):
                norm.compare(f"add, {case}", a, b)
            gate_up = self.random(rows, 2 * width, dtype=dtype)
            for kind in ("silu", "gelu_tanh"):
                activation.compare(
                    f"{kind} {case}",
                    self.backend.gated_activation(gate_up, kind),
                    self.reference.gated_activation(gate_up, kind),
                )
        norm.add_to(self.context)
        activation.add_to(self.context)

    def rope_and_append(self) -> None:
        rope, append = Tally("rope"), Tally("append to the cache")
        for dim, dtype in itertools.product(
            [64] if self.context.tiny else [64, 128, 256], (torch.bfloat16, torch.float32)
        ):
            batch, num_blocks = batch_of(KernelStep("mixed", ((1, 33), (5, 5), (16, 48))), 16, self.generator)
            shape = AttentionShape(8, 2, dim, 16, dtype)
            q, k, v = (self.random(22, heads, dim, dtype=dtype) for heads in (8, 2, 2))
            table = torch.rand(64, dim, generator=self.generator).to(self.context.device)
            caches = [torch.zeros(num_blocks, 2, 16, 2, dim, dtype=dtype, device=self.context.device) for _ in range(2)]
            for backend, cache in ((self.backend, caches[0]), (self.reference, caches[1])):
                backend.plan(batch, shape)
                backend.store_kv(k, v, cache, batch.slot_mapping)
            append.compare(f"{dtype} {dim}", *caches)
            self.backend.plan(batch, shape)
            found = self.backend.rope(q.clone(), k.clone(), table, batch.positions)
            expected = self.reference.rope(q.clone(), k.clone(), table, batch.positions)
            for a, b in zip(found, expected, strict=True):
                rope.compare(f"{dtype} {dim}", a, b)
        rope.add_to(self.context)
        append.add_to(self.context)

    def sampling(self) -> None:
        """The very tokens: the draw is a function of logits and one number."""
        rows, vocab = (8, 320) if self.context.tiny else (64, 128256)
        logits = 4 * self.random(rows, vocab, dtype=torch.float32)
        wrong: list[str] = []
        for top_k, top_p, min_p in ((0, 1.0, 0.0), (50, 1.0, 0.0), (0, 0.9, 0.0), (200, 0.95, 0.02)):
            batch = SamplingBatch(
                torch.tensor([0.0, 0.8] * (rows // 2)),
                torch.full((rows,), top_k),
                torch.full((rows,), top_p),
                torch.full((rows,), min_p),
                torch.rand(rows, generator=self.generator, dtype=torch.float64),
            )
            own = torch.arange(rows, dtype=torch.int32) - 1  # the first row has no mask
            masked = replace(batch, masks=random_masks(rows, vocab, self.generator), mask_rows=own)
            for name, one in (("", batch), (", masked", masked)):
                if not torch.equal(self.backend.sample(logits, one), self.reference.sample(logits, one)):
                    wrong.append(f"top_k {top_k}, top_p {top_p}, min_p {min_p}{name}")
        self.context.add(kernel="sampling, the same tokens", cases=8, ok=not wrong, wrong="; ".join(wrong))

    def definitions(self) -> None:
        """The CPUs' grid (kernels/oracle/grid.py), attention aside: each kernel against float64, within bounds that
        follow from rounding.
        """
        for family in (name for name in FAMILIES if not name.startswith("attention")):
            dtypes = [torch.bfloat16] if self.context.tiny else DTYPES
            verdicts = {dtype: judge(family, self.backend, dtype) for dtype in dtypes}
            worst_in, worst = max(verdicts.items(), key=lambda one: one[1].ratio)
            num_cases = sum(verdict.num_cases for verdict in verdicts.values())
            if num_cases:
                self.context.add(
                    kernel=f"{family}, by its definition",
                    cases=num_cases,
                    worst_share_of_bound=worst.ratio,
                    ok=worst.ok,
                    wrong="" if worst.ok else f"{worst.case}, {worst_in}",
                )


def run(context: Context) -> None:
    grid = Grid(context)
    with torch.inference_mode():
        grid.control()
        grid.elementwise()
        grid.rope_and_append()
        grid.sampling()
        grid.latent_attention()
        grid.attention(VARIANTS[1:2] if context.tiny else VARIANTS[:2])
        grid.definitions()  # computed in float64, some of it on the host
        if not context.tiny:
            grid.attention(VARIANTS[2:])  # which have to be compiled
