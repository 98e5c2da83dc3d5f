"""Sampling in plain torch, on any device: the rule that every backend's sampler follows.

Owns no random source: the row's uniform number is an argument, so that sampling is a pure function. Sorts the
vocabulary: simple, not fast. `sampling_search` follows the same rule without sorting.
"""

import torch
from torch import Tensor

from kvrelay.kernels.backend import SamplingBatch


def _keep_top_k(scaled: Tensor, top_k: Tensor) -> Tensor:
    """Mask of [R, V]: at least the k-th largest value of its row; k <= 0 or >= V keeps all."""
    vocab = scaled.shape[1]
    k = torch.where((top_k <= 0) | (top_k > vocab), vocab, top_k)
    ordered = scaled.sort(dim=1, descending=True).values
    return scaled >= ordered.gather(1, (k - 1).unsqueeze(1))


def _keep_top_p(probs: Tensor, top_p: Tensor) -> Tensor:
    """Mask of [R, V]: the most likely tokens until their sum reaches top_p; equal ones, lowest id first."""
    ordered, ids = probs.sort(dim=1, descending=True, stable=True)
    before = ordered.cumsum(dim=1) - ordered
    keep = (before < top_p.unsqueeze(1)) | (top_p >= 1.0).unsqueeze(1)
    keep[:, 0] = True
    return torch.zeros_like(keep).scatter(1, ids, keep)


def filtered_weights(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Unnormalised float64 probabilities [R, V] after temperature, top-k, top-p and min-p; rows of temperature 0 too.

    A row of temperature 0 is treated as temperature 1.
    """
    device = logits.device
    temperature = torch.where(batch.temperature > 0, batch.temperature, 1.0).double()
    scaled = logits.double() / temperature.to(device).unsqueeze(1)
    if bool((batch.top_k > 0).any()):
        scaled = scaled.masked_fill(~_keep_top_k(scaled, batch.top_k.to(device)), float("-inf"))
    probs = scaled.softmax(dim=1)
    if bool((batch.top_p < 1).any()):
        probs = probs * _keep_top_p(probs, batch.top_p.double().to(device))
    if bool((batch.min_p > 0).any()):
        floor = batch.min_p.double().to(device).unsqueeze(1) * probs.amax(dim=1, keepdim=True)
        probs = probs * (probs >= floor)
    return probs


def draw(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """One token id per row of logits [R, V] -> [R] int64 on logits' device.

    The token is the first id, in id order, whose cumulative weight exceeds uniform * total.
    """
    device = logits.device
    greedy = logits.argmax(dim=1)  # the first of equal maxima, as torch documents
    if bool((batch.temperature <= 0).all()):
        return greedy
    weights = filtered_weights(logits, batch)
    cumulative = weights.cumsum(dim=1)
    target = batch.uniform.to(device).unsqueeze(1) * cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, target, right=True).squeeze(1)
    last_kept = (weights.shape[1] - 1) - (weights > 0).flip(1).int().argmax(dim=1)
    return torch.where((batch.temperature > 0).to(device), torch.minimum(drawn, last_kept), greedy)
