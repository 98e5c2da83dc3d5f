"""Every Triton kernel compiles for the processors that it is for, without spilling registers."""

import re

import pytest

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from kvrelay.kernels.cuda import sampling_triton  # noqa: E402
from kvrelay.kvtransfer.mover import checksums_triton  # noqa: E402
from kvrelay.kvtransfer.transports import cuda_ipc_triton  # noqa: E402

ROW = {"temperatures": "*fp32", "weights": "*i64", "totals": "*i64", "tokens": "*i64", "vocab": "i32", "scale": "fp32"}
MASKS = {"masks": "*i32", "mask_rows": "*i32"}
KERNELS = {
    sampling_triton._weigh: ROW | MASKS | {"logits": "*fp32", "stride": "i32", "top_ks": "*i64"},
    sampling_triton._choose: ROW | {"top_ps": "*fp32", "min_ps": "*fp32", "uniforms": "*fp64", "num_digits": "i32"},
    checksums_triton._sum: {
        "halves": "*i32",
        "begins": "*i64",
        "out": "*i64",
        "each": "i32",
        "piece_halves": "i32",
        "mix": "i64",
    },
}
SIZES = {"SMALL": sampling_triton._SMALL, "BLOCK": sampling_triton._BLOCK}


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize(
    ("kernel", "is_masked"), [*((kernel, False) for kernel in KERNELS), (sampling_triton._weigh, True)]
)
def test_it_compiles(kernel, is_masked, capability):
    types = KERNELS[kernel]
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    assert types.keys() <= signature.keys()
    constants = SIZES | {"IS_MASKED": is_masked}
    sizes = {name: constants[name] for name, kind in signature.items() if kind == "constexpr"}
    source = ASTSource(fn=kernel, signature=signature, constexprs=sizes)
    built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 8})
    assert len(built.asm["cubin"]) > 1000 and ".local" not in built.asm["ptx"]


@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize(("alignment", "access"), [(16, "v4.b32"), (4, "b32"), (1, "b8")])
def test_a_copy_over_cuda_ipc_takes_the_widest_words_that_are_aligned(alignment, access, capability):
    signature = {"table": "*i64", "ALIGNMENT": "constexpr", "BLOCK": "constexpr"}
    constants = {"ALIGNMENT": alignment, "BLOCK": cuda_ipc_triton._BLOCK}
    source = ASTSource(fn=cuda_ipc_triton._copy, signature=signature, constexprs=constants)
    options = {"num_warps": cuda_ipc_triton._NUM_WARPS}
    ptx = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).asm["ptx"]
    words = set(re.findall(r"(?:ld|st)\.global\.(\S+)", ptx)) - {"b64"}  # of the table
    assert words == {access} and ".local" not in ptx
