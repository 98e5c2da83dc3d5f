"""Which of FlashInfer's modules a model needs: the one list, for workers, `kvrelay prepare` and benches.

A kernel of FlashInfer that the backend calls belongs here: over the fake CUDA runtime a test runs engines that find
these modules and no others. Touches no device where $FLASHINFER_CUDA_ARCH_LIST names the processors.
"""

import re
import subprocess
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvrelay.kernels.backend import Activation, AttentionShape, AttentionVariant
from kvrelay.kernels.cuda.jit import import_flashinfer
from kvrelay.kernels.cuda.plan import DECODE_KERNELS, HALF, HEAD_DIMS, LATENT_APPEND, has_attention, is_unpacked

HOPPER = "fa3"
HOPPER_MAJOR = 9  # compute capability 9.x, the only one with fa3
_LAST_STEP = re.compile(r"\[\d+/(\d+)\] ")


@dataclass(frozen=True, slots=True)
class KernelNeeds:
    """Of a model. shape, variants: of attention layers. rotary_dim: of a key. activation: of MLPs."""

    shape: AttentionShape
    variants: Collection[AttentionVariant]
    rotary_dim: int
    activation: Activation


@dataclass(frozen=True, slots=True)
class KernelModule:
    """One shared library of FlashInfer's.

    title: for people. spec: its JitSpec. is_optional: workers start without it. is_late: they try it out where it is
    there, and do not wait for it.
    """

    title: str
    spec: Any
    is_optional: bool = False
    is_late: bool = False

    @property
    def name(self) -> str:
        return str(self.spec.name)

    @property
    def library(self) -> Path:
        """The file: in an installed FlashInfer, else in its cache, where it may not be yet."""
        return Path(self.spec.get_library_path())

    def ninja(self, *options: str) -> list[str]:
        """The command that compiles it, in its own folder of FlashInfer's cache, where FlashInfer runs it, too.

        A run for several modules would leave ninja's log elsewhere, and FlashInfer would compile them again.
        """
        return ["ninja", *options, "-C", str(self.spec.build_dir), "-f", str(self.spec.ninja_path)]

    def files_to_compile(self) -> int:
        """How many files FlashInfer would compile or link before it loads the module; 0: it is there."""
        if self.spec.is_aot:
            return 0
        try:
            self.spec.write_ninja()
            planned = subprocess.run(self.ninja("-n"), capture_output=True, text=True).stdout
        except (OSError, RuntimeError):  # no ninja, no nvcc: the build names what is missing
            return 1
        return 0 if "no work to do" in planned else max([1, *map(int, _LAST_STEP.findall(planned))])


def kernel_modules(*models: KernelNeeds) -> list[KernelModule]:
    """What a worker and the steps of these models load; of what torch computes, nothing."""
    return list({module.name: module for needs in models for module in _of_model(needs)}.values())


def _of_model(needs: KernelNeeds) -> list[KernelModule]:
    jit, shape = import_flashinfer().jit, needs.shape
    found = [  # tried out at every start
        KernelModule("norms", jit.norm.gen_norm_module(), is_optional=True),
        KernelModule("silu", jit.gen_act_and_mul_module("silu")),
    ]
    if needs.activation == "gelu_tanh" and shape.dtype in HALF:
        found.append(KernelModule("gelu", jit.gen_act_and_mul_module("gelu_tanh")))
    if shape.dtype in HALF and needs.rotary_dim in HEAD_DIMS:
        found.append(KernelModule("rope", jit.rope.gen_rope_module()))
    if not has_attention(shape):
        return found
    has_append = not is_unpacked(shape)
    if shape.latent_dim is not None:
        types = (shape.dtype, shape.dtype, shape.dtype, torch.int32)
        spec = jit.gen_batch_mla_module(DECODE_KERNELS, *types, shape.latent_dim, needs.rotary_dim, False)
        found.append(KernelModule("latent attention", spec))
        has_append &= (shape.latent_dim, needs.rotary_dim) == LATENT_APPEND
    else:
        found += _attention(needs, DECODE_KERNELS, jit.attention.modules._gen_batch_prefill_primary_module)
        if has_append and any(window is None for _, window, _ in needs.variants):
            found.append(KernelModule("cascade", jit.cascade.gen_cascade_module()))
    if has_append:
        found.append(KernelModule("append", jit.page.gen_page_module()))
    return found + hopper_modules(needs)


def hopper_modules(needs: KernelNeeds) -> list[KernelModule]:
    """fa3's prefill kernels for this model, where one of the processors that are compiled for has them."""
    jit, shape = import_flashinfer().jit, needs.shape
    archs = jit.core.current_compilation_context.TARGET_CUDA_ARCHS
    if shape.latent_dim is not None or not has_attention(shape) or all(major != HOPPER_MAJOR for major, _ in archs):
        return []
    return _attention(needs, HOPPER, jit.gen_batch_prefill_module)


def _attention(needs: KernelNeeds, kernels: str, generate: Callable[..., Any]) -> list[KernelModule]:
    """FlashInfer compiles attention anew for a window and for a softcap."""
    shape, kinds = needs.shape, {(window is not None, cap is not None) for _, window, cap in needs.variants}
    types, dims = (shape.dtype, shape.dtype, shape.dtype, torch.int32), (shape.head_dim, shape.head_dim)
    return [
        KernelModule(
            f"{kernels} attention, heads of {shape.head_dim}{', window' * window}{', softcap' * cap}",
            generate(kernels, *types, *dims, 0, window, cap, False),
            is_late=kernels == HOPPER,
        )
        for window, cap in sorted(kinds)
    ]
