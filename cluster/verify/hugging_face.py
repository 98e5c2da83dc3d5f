"""What Hugging Face transformers computes in float32 on the CPU: the reference that rows are compared with."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvrelay.cluster.verify.prompts import VerifyPrompt

if TYPE_CHECKING:
    import torch


def expected_tokens(model_dir: Path, prompts: Sequence[VerifyPrompt], num_output: int) -> list[list[int]]:
    """Greedy tokens of each prompt, end-of-sequence ignored."""
    return [beams[0] for beams in expected_beams(model_dir, prompts, num_output, width=1)]


def expected_beams(
    model_dir: Path, prompts: Sequence[VerifyPrompt], num_output: int, *, width: int
) -> list[list[list[int]]]:
    """For each prompt the `width` best sequences of beam search, best first, end-of-sequence ignored."""
    import torch

    model = _float32(model_dir)
    for name in ("eos_token_id", "temperature", "top_p", "top_k"):
        setattr(model.generation_config, name, None)
    found: list[list[list[int]]] = []
    for prompt in prompts:
        ids = torch.tensor([prompt.token_ids])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_output,
            do_sample=False,
            num_beams=width,
            num_return_sequences=width,
            pad_token_id=0,
        )
        found.append(out[:, len(prompt.token_ids) :].tolist())
    return found


def logit_gaps(model_dir: Path, prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> list[float]:
    """For each answer: how far its tokens' logits are below the best ones, given the tokens before.

    The mean over the answer, in standard deviations of the logits. 0: the greedy choice; random tokens are about 3 off.
    """
    import torch

    model = _float32(model_dir)
    found: list[float] = []
    for prompt, answer in zip(prompts, answers, strict=True):
        ids, chosen = torch.tensor([prompt + answer]), torch.tensor(answer)
        with torch.inference_mode():
            logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
        gap = logits.amax(1) - logits.gather(1, chosen[:, None])[:, 0]
        found.append(float((gap / logits.std(1)).mean()))
    return found


def log_probabilities(model_dir: Path, texts: Sequence[list[int]], dtype: str = "float32") -> list["torch.Tensor"]:
    """Log-probabilities [positions, vocabulary] in float64 of the token after each of a text's tokens but the last.

    A 16-bit dtype is emulated: float32 with weights and every module's result rounded, because not every processor
    multiplies such numbers fast. Rounding inside a module is left out, so this is nearer to float32 than a model
    loaded in the dtype.
    """
    import torch

    model = _float32(model_dir)
    with torch.inference_mode():
        if dtype != "float32":
            _round_everything(model, getattr(torch, dtype))
        return [model(torch.tensor([text])).logits[0, :-1].double().log_softmax(-1) for text in texts]


def _float32(model_dir: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)


def _round_everything(model: Any, dtype: "torch.dtype") -> None:
    import torch

    def rounded(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(rounded, value))
        return value.to(dtype).float() if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    for parameter in model.parameters():
        parameter.copy_(rounded(parameter))
    for module in model.modules():
        module.register_forward_hook(lambda module, args, out: rounded(out))
