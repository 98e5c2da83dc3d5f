"""Log-probabilities of tokens and of the likeliest ones, where the logits are: a few numbers for each row leave the device."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvrelay.kernels.sampling_search import to_device


def log_probabilities(
    logits: Tensor, tokens: Sequence[int], most: int
) -> tuple[list[float], list[list[float]], list[list[int]]]:
    """Of tokens[r] under row r of float32 logits [R, vocab]; then the `most` likeliest ones' of each row, and their ids.

    All of it comes to the host in one copy.
    """
    chosen = logits.gather(1, to_device(torch.tensor(tokens, dtype=torch.int64), logits.device).unsqueeze(1))
    norm = logits.logsumexp(dim=1, keepdim=True)
    top = logits.topk(most, dim=1)
    # ids in float64 are exact
    numbers = torch.cat((chosen - norm, top.values - norm), dim=1).double()
    found = torch.cat((numbers, top.indices.double()), dim=1).cpu()
    values = found[:, : most + 1].tolist()
    return [row[0] for row in values], [row[1:] for row in values], found[:, most + 1 :].long().tolist()
