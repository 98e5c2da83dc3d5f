"""The Triton kernels of quantised weights compile for the processors that they are for, without spilling registers."""

import math
import re
import subprocess
import tempfile
from pathlib import Path

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
ANY_SIZE = ("num_rows", "num_groups", "num_experts", "num_tiles")
TILES = {"int8": (1, 32), "int4": (1, 128), "fp8": (128, 128), "mxfp4": (1, 32)}


def compiled(kernel, capability, types, constants, *, num_warps, num_stages=3, unaligned=ANY_SIZE):
    """With pointers and row lengths that are multiples of 16, as a model's are."""
    types = dict.fromkeys(INTEGERS, "i32") | types
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    aligned = [kind[0] == "*" or (kind == "i32" and name not in unaligned) for name, kind in signature.items()]
    attributes = {(index,): [["tt.divisibility", 16]] for index, found in enumerate(aligned) if found}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    target, options = GPUTarget("cuda", capability, 32), {"num_warps": num_warps, "num_stages": num_stages}
    return triton.compile(source, target=target, options=options)


def spilled_bytes(cubin):
    """What its threads keep in memory because registers are short."""
    tools = Path(triton.backends.__file__).parent / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile() as file:
        file.write(cubin)
        file.flush()
        command = [tools / "cuobjdump", "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return sum(map(int, re.findall(r"(?:STACK|LOCAL):(\d+)", usage)))


def compiled_product(kind, num_rows, num_experts, capability, unaligned=ANY_SIZE):
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
    return compiled(quantized_triton._multiply, capability, types, constants, **options, unaligned=unaligned)


@pytest.mark.parametrize("capability", [80, 89, 90, 100])
@pytest.mark.parametrize("kind", TILES)
@pytest.mark.parametrize(("num_rows", "num_experts"), [(1, 0), (20, 0), (40, 0), (130, 0), (130, 128)])
def test_products_with_quantised_weights_compile(kind, num_rows, num_experts, capability):
    built = compiled_product(kind, num_rows, num_experts, capability)
    assert spilled_bytes(built.asm["cubin"]) <= 8  # Triton 3.6 spills two registers in one of them
    assert built.metadata.shared <= 99 << 10  # what the smallest of them gives a block
    ahead = re.findall(r"%([a-z]+)\w* = ttg.async_copy_global_to_local", built.asm["ttgir"])
    assert {"x", "stored"} <= set(ahead), "rows and weights are read ahead of their products"


def test_the_control_spills():
    """As weights whose rows begin anywhere would be read."""
    built = compiled_product("fp8", 40, 0, 90, unaligned=INTEGERS)
    assert spilled_bytes(built.asm["cubin"]) > 100


@pytest.mark.parametrize("capability", [89, 90, 100])
@pytest.mark.parametrize(("group", "has_given"), [(0, False), (0, True), (128, False)])
def test_rows_to_fp8_compile(group, has_given, capability):
    types = {"x": "*bf16", "given": "*fp32", "values": "*fp8e4nv", "scales": "*fp32"}
    constants = {"HAS_GIVEN": has_given, "GROUP": group, "BLOCK": group or 1024}
    built = compiled(quantized_triton._quantize, capability, types, constants, num_warps=1 if group else 8)
    assert spilled_bytes(built.asm["cubin"]) == 0
    assert "cvt.rn.satfinite.e4m3x2" in built.asm["ptx"]
