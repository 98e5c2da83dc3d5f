"""A layer's mixture of experts: our compiled form against loops over experts and Hugging Face's block, in one run.

    python bench/experts.py [--shape small full] [--dtype float32 bfloat16] [--tokens 1 4 16 64 512] [--quantization int8 int4]
                            [--threads N] [--rounds N] [--json FILE]

Router, choice, experts and weighted sum of one layer (128 experts of which a token takes 8; `full`: Qwen3-30B-A3B's sizes,
`small`: a quarter of them). Every call gets other tokens, which choose other experts, so that weights come from memory as
they do in a model. Contenders alternate; each figure is the shortest of the rounds, since others use the machine too.
Before that all results are compared. "loop over packed": one Python step for each expert, over the backend's own packed
products, which is what kvrelay did before; "loop in torch": the same over F.linear. Exit code 1 when a result is wrong.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from figures import available_cores, show
from torch import Tensor
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

import inprocess  # noqa: F401  isort: skip
from kvrelay.engine.models.mlp import ExpertMlp
from kvrelay.kernels.backend import Experts
from kvrelay.kernels.common.expert_choice import ExpertChoice
from kvrelay.kernels.common.experts import ExpertLoop
from kvrelay.kernels.common.quant_scheme import Scheme
from kvrelay.kernels.cpu.backend import CpuBackend
from kvrelay.kernels.oracle.reference import ReferenceBackend


@dataclass(frozen=True, slots=True)
class Shape:
    hidden: int
    ffn: int
    choice: ExpertChoice


_CHOICE = ExpertChoice(128, 8, normalise=True)
SHAPES = {"small": Shape(512, 192, _CHOICE), "full": Shape(2048, 768, _CHOICE)}
BITS = {"int8": 8, "int4": 4}
NEAR = {torch.float32: 1e-4, torch.bfloat16: 3e-2}  # relative error
_MOST_S = 15.0  # for one row of the table, after two rounds
Mlp = Callable[[Tensor], Tensor]


def hugging_face(shape: Shape, dtype: torch.dtype, implementation: str) -> Any:
    config = transformers.Qwen3MoeConfig(
        hidden_size=shape.hidden,
        moe_intermediate_size=shape.ffn,
        num_experts=shape.choice.num_experts,
        num_experts_per_tok=shape.choice.num_chosen,
        norm_topk_prob=shape.choice.normalise,
    )
    config._experts_implementation = implementation
    with torch.device("meta"):
        block = Qwen3MoeSparseMoeBlock(config).to(dtype)
    return block.to_empty(device="cpu").eval()


def fill(block: Any, shape: Shape) -> None:
    generator = torch.Generator().manual_seed(0)
    for parameter in block.parameters():
        for part in parameter:  # one expert at a time: a small scratch
            part.copy_(torch.randn(part.shape, generator=generator) * parameter.shape[-1] ** -0.5)
    block.gate.weight.mul_(4.0)  # decided choices


def contenders(shape: Shape, dtype: torch.dtype, threads: int, quantizations: list[str]) -> dict[str, Mlp]:
    theirs = {name: hugging_face(shape, dtype, name) for name in ("eager", "grouped_mm")}
    first = theirs["eager"]
    fill(first, shape)
    theirs["grouped_mm"].load_state_dict(first.state_dict(), assign=True)
    cpu, reference = CpuBackend(threads), ReferenceBackend("cpu")
    weights = list(zip(first.experts.gate_up_proj.detach(), first.experts.down_proj.detach(), strict=True))
    router = first.gate.weight.detach().float()

    def ours(backend: Any, experts: Experts) -> Mlp:
        return ExpertMlp(backend, shape.choice, backend.pack_linear(router), None, experts, None, None)

    def act(x: Tensor) -> Tensor:
        return cpu.gated_activation(x, "silu")

    packed = ExpertLoop(((cpu.pack_linear(gate_up), cpu.pack_linear(down)) for gate_up, down in weights), act)
    found: dict[str, Mlp] = {
        "compiled": ours(cpu, cpu.pack_experts(iter(weights), "silu", dtype)),
        "loop over packed": ours(cpu, packed),
        "loop in torch": ours(reference, reference.pack_experts(iter(weights), "silu", dtype)),
    }
    for name in quantizations:
        found[name] = ours(cpu, cpu.pack_experts(iter(weights), "silu", dtype, Scheme(BITS[name])))
    for name, block in theirs.items():
        found[f"HF {name}"] = lambda x, block=block: block(x.unsqueeze(0)).squeeze(0)
    return found


def check(found: dict[str, Mlp], x: Tensor) -> None:
    """The median token's result is Hugging Face's, of quantised ones nearly; in bfloat16 a few tokens choose another expert.

    Raises SystemExit.
    """
    expected = found["HF eager"](x).float()
    for name, mlp in found.items():
        off = float(((mlp(x).float() - expected).norm(dim=-1) / expected.norm(dim=-1)).median())
        if not off < (0.3 if name in BITS else NEAR[x.dtype]):
            raise SystemExit(f"{name} is {off:.1e} off")


def measure(found: dict[str, Mlp], shape: Shape, dtype: torch.dtype, tokens: int, rounds: int) -> dict[str, float]:
    """Seconds of the shortest call of each."""
    generator, best = torch.Generator().manual_seed(tokens), dict.fromkeys(found, float("inf"))
    end = time.perf_counter() + _MOST_S
    for done in range(rounds):
        if done > 1 and time.perf_counter() > end:
            break
        x = torch.randn(tokens, shape.hidden, generator=generator).to(dtype)
        for name, mlp in found.items():
            start = time.perf_counter()
            mlp(x)
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=["small"])
    parser.add_argument("--dtype", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 16, 64, 512])
    parser.add_argument("--quantization", nargs="*", choices=BITS, default=[])
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with torch.inference_mode():
        for name in options.shape:
            for dtype in (getattr(torch, of) for of in options.dtype):
                shape = SHAPES[name]
                found = contenders(shape, dtype, options.threads, options.quantization)
                check(found, torch.randn(15, shape.hidden).to(dtype))
                for tokens in options.tokens:
                    rounds = max(3, options.rounds * 16 // max(tokens, 16))
                    best = measure(found, shape, dtype, tokens, rounds)
                    ratios = {
                        f"{other} / compiled": s / best["compiled"] for other, s in best.items() if other != "compiled"
                    }
                    what = f"{name} {str(dtype).removeprefix('torch.')}"
                    rows.append({"layer": what, "tokens": tokens, "compiled, ms": 1e3 * best["compiled"], **ratios})
    show(f"One layer of experts, {options.threads} threads", rows, options.json)


if __name__ == "__main__":
    main()
