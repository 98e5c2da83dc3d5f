"""The Triton kernels of quantised weights compile for the processors that they are for, without spilling registers."""

import math

import pytest

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from kvrelay.kernels.cuda import quantized_triton  # noqa: E402

INTEGERS = (
    "stride",
    "num_rows",
    "num_inputs",
    "num_outputs",
    "width",
    "num_groups",
    "weight_bytes",
    "weight_scales",
    "num_experts",
    "num_tiles",
    "scale_stride",
)
TILES = {"int8": (1, 32), "int4": (1, 128), "fp8": (128, 128), "mxfp4": (1, 32)}


def compiled(kernel, capability, types, constants, *, num_warps, num_stages=3):
    """With pointers and row lengths that are multiples of 16, as a model's are."""
    types = dict.fromkeys(INTEGERS, "i32") | types
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    aligned = [name[0] == "*" for name in signature.values()]
    attributes = {(index,): [["tt.divisibility", 16]] for index, found in enumerate(aligned) if found}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    target, options = GPUTarget("cuda", capability, 32), {"num_warps": num_warps, "num_stages": num_stages}
    built = triton.compile(source, target=target, options=options)
    assert ".local" not in built.asm["ptx"]
    return built


@pytest.mark.parametrize("capability", [80, 89, 90, 100])
@pytest.mark.parametrize("kind", TILES)
@pytest.mark.parametrize(("num_rows", "num_experts"), [(1, 0), (40, 0), (130, 0), (130, 128)])
def test_products_with_quantised_weights_compile(kind, num_rows, num_experts, capability):
    sizes = quantized_triton.blocks_of(num_rows, packed=kind in ("int4", "mxfp4"))
    options = {name: sizes.pop(name) for name in ("num_warps", "num_stages")}
    constants = sizes | {
        "KIND": kind,
        "HAS_FP8": capability >= 89,
        "HAS_OFFSETS": kind == "int4",
        "HAS_BIAS": num_experts == 0,
        "EXPERTS": num_experts,
        "TILE_N": TILES[kind][0],
        "TILE_K": TILES[kind][1],
        "SHARED": math.gcd(TILES[kind][1], sizes["BLOCK_K"]),
    }
    halves = dict.fromkeys(("rows", "out", "bias"), "*bf16") | dict.fromkeys(("scales", "offsets"), "*fp16")
    types = halves | {"values": "*i8" if kind == "int8" else "*u8", "ends": "*i32", "unit": "fp32"}
    built = compiled(quantized_triton._multiply, capability, types, constants, **options)
    assert built.metadata.shared <= 99 << 10  # what the smallest of them gives a block


@pytest.mark.parametrize("capability", [89, 90, 100])
@pytest.mark.parametrize(("group", "has_given"), [(0, False), (0, True), (128, False)])
def test_rows_to_fp8_compile(group, has_given, capability):
    types = {"x": "*bf16", "given": "*fp32", "values": "*fp8e4nv", "scales": "*fp32"}
    constants = {"HAS_GIVEN": has_given, "GROUP": group, "BLOCK": group or 1024}
    built = compiled(quantized_triton._quantize, capability, types, constants, num_warps=1 if group else 8)
    assert "cvt.rn.satfinite.e4m3x2" in built.asm["ptx"]
