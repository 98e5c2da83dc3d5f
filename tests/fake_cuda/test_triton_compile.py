"""Every Triton kernel compiles for the processors that it is for, without spilling registers."""

import itertools
import re

import pytest

triton = pytest.importorskip("triton")

import torch  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from kvrelay.kernels.backend import SamplingBatch  # noqa: E402
from kvrelay.kernels.common.sampling_search import settings_of  # noqa: E402
from kvrelay.kernels.common.token_masks import token_masks_of  # noqa: E402
from kvrelay.kernels.cuda import backend, sampling_triton  # noqa: E402
from kvrelay.kvtransfer.mover import checksums_triton  # noqa: E402
from kvrelay.kvtransfer.transports import cuda_ipc_triton  # noqa: E402

LOGITS = {"logits": "*fp32", "stride": "i32", "masks": "*i32", "mask_rows": "*i32"}
ROW = {"temperatures": "*fp32", "totals": "*i64", "vocab": "i32", "num_chunks": "i32"}
SEARCH = {"tallies": "*i64", "above": "*i64", "founds": "*i64"}
PEAKS = {"peaks": "*fp32", "firsts": "*i32", "vocab": "i32", "num_chunks": "i32"}
TALLY = {"before": "*i64", "after": "*i64", "index": "i32", "shift": "i32", "above": "*i64"}
WEIGHTS = {"weights": "*i64", "scale": "fp32", "is_stored": "i32"}
FILTERS = {"top_ps": "*fp32", "min_ps": "*fp32", "kept_totals": "*i64"}
KERNELS = {
    sampling_triton._peak: LOGITS | PEAKS,
    sampling_triton._tally: LOGITS
    | ROW
    | TALLY
    | {"limits": "*i64", "weights": "*i64", "found_before": "*i64", "found_after": "*i64"},
    sampling_triton._weigh: LOGITS | ROW | SEARCH | WEIGHTS | {"peaks": "*fp32", "top_ks": "*i64"},
    sampling_triton._filter: ROW | SEARCH | FILTERS | {"weights": "*i64", "scale": "fp32"},
    sampling_triton._choose: LOGITS | ROW | PEAKS | WEIGHTS | {"uniforms": "*fp64", "tokens": "*i64"},
    checksums_triton._sum: {
        "halves": "*i32",
        "begins": "*i64",
        "out": "*i64",
        "each": "i32",
        "piece_halves": "i32",
        "mix": "i64",
    },
}
SIZES = {
    "SMALL": sampling_triton._SMALL,
    "CHUNK": sampling_triton._CHUNK,
    "CHUNKS": sampling_triton._CHUNKS,
    "BLOCK": 2048,
}
MASKED = [sampling_triton._peak, sampling_triton._tally, sampling_triton._weigh, sampling_triton._choose]


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize(
    ("kernel", "is_masked"), [*((kernel, False) for kernel in KERNELS), *((kernel, True) for kernel in MASKED)]
)
def test_it_compiles(kernel, is_masked, capability):
    types = KERNELS[kernel]
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    assert types.keys() <= signature.keys()
    constants = SIZES | {"IS_MASKED": is_masked, "COUNTS": is_masked}
    sizes = {name: constants[name] for name, kind in signature.items() if kind == "constexpr"}
    source = ASTSource(fn=kernel, signature=signature, constexprs=sizes)
    built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 8})
    assert len(built.asm["cubin"]) > 1000 and ".local" not in built.asm["ptx"]


def compiled():
    return {kernel.__name__: len(kernel.device_caches[0][0]) for kernel in (*MASKED, sampling_triton._filter)}


@pytest.mark.parametrize("vocab", [32_000, 128_256, 262_208])
def test_drawing_compiles_nothing_after_the_start(vocab):
    device = torch.device("cuda", 0)
    right = iter((63, 62))
    backend._try_out(lambda *args: [sampling_triton.draw(*args), next(right)][1], device)  # nothing is computed here
    before = compiled()
    assert all(before.values())
    for rows, is_masked in itertools.product((1, 2, 16, 33), (False, True)):
        masks = (torch.zeros(1, -(-vocab // 32)).int(), torch.zeros(rows).int()) if is_masked else (None, None)
        for top_k, top_p, min_p, heat in (
            (0, 1.0, 0.0, 0.0),
            (0, 1.0, 0.0, 1.0),
            (5, 0.9, 0.0, 1.0),
            (0, 1.0, 0.1, 1.0),
        ):
            settings = (torch.full((rows,), value) for value in (heat, top_k, top_p, min_p))
            batch = SamplingBatch(*settings, torch.zeros(rows).double(), *masks)
            logits = torch.zeros(rows, vocab, device=device)
            uniform, chosen = batch.uniform.to(device), settings_of(batch, device)
            sampling_triton.draw(logits, chosen, uniform, token_masks_of(batch, logits))
    assert compiled() == before


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
