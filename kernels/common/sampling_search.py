"""Sampling in plain torch on any device: the rule of oracle/reference.py.

Weights are integers (the likeliest token's is 2 ** scale_bits), so that totals do not depend on their order and every
device gives the same token. A row's smallest kept logit is found without sorting the vocabulary, digit by digit in its
bits (radix select): top-k counts, top-p totals weights. Nothing here waits for the device: a batch's settings are read
from its CPU tensors.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvrelay.kernels.backend import SamplingBatch

_DIGIT_BITS = 11


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """A batch's settings on the device, and whether any row uses them. [R] each, as in SamplingBatch."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    draws: bool
    has_greedy: bool
    has_top_k: bool
    has_top_p: bool
    has_min_p: bool


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """An asynchronous copy, from pinned memory that torch keeps until the copy is done."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


def settings_of(batch: SamplingBatch, device: torch.device) -> SamplingSettings:
    return SamplingSettings(
        temperature=to_device(batch.temperature, device),
        top_k=to_device(batch.top_k, device),
        top_p=to_device(batch.top_p, device),
        min_p=to_device(batch.min_p, device),
        draws=bool((batch.temperature > 0).any()),
        has_greedy=bool((batch.temperature <= 0).any()),
        has_top_k=bool((batch.top_k > 0).any()),
        has_top_p=bool((batch.top_p < 1).any()),
        has_min_p=bool((batch.min_p > 0).any()),
    )


class SettingsCache:
    """The previous batch's settings on the device: consecutive batches mostly share them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last: tuple[tuple[Tensor, ...], SamplingSettings] | None = None

    def of(self, batch: SamplingBatch) -> SamplingSettings:
        """Tensors are compared by identity; they are kept here, so that no other tensor can get the same id."""
        own = (batch.temperature, batch.top_k, batch.top_p, batch.min_p)
        if self._last is None or any(x is not y for x, y in zip(own, self._last[0], strict=True)):
            self._last = own, settings_of(batch, self._device)
        return self._last[1]


def scale_bits(vocab: int) -> int:
    """The largest scale at which `vocab` of the largest weight sum to less than 2 ** 63."""
    return 62 - vocab.bit_length()


def ordered_places(logits: Tensor) -> Tensor:
    """int64 in [0, 2 ** 32) in the order of these float32 numbers; -0.0 equals 0.0."""
    bits = (logits + 0.0).view(torch.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(torch.int64) + (1 << 31)


def least_kept(places: Tensor, num_bits: int, weights: Tensor, need: Tensor) -> tuple[Tensor, Tensor]:
    """The largest place such that the weights of its row's places [R, V] from it on reach `need` [R, 1] (positive, and
    at most their total); and the total weight above it, [R, 1].

    places: int64 in [0, 2 ** num_bits). Found digit by digit, by the weights per digit of the places that match all
    digits so far.
    """
    found, above = torch.zeros_like(need), torch.zeros_like(need)
    size = 1 << _DIGIT_BITS
    for shift in range((num_bits - 1) // _DIGIT_BITS * _DIGIT_BITS, -1, -_DIGIT_BITS):
        digits = (places >> shift) & (size - 1)
        elsewhere = (
            places >> (shift + _DIGIT_BITS)
        ) != found  # summed too, but in separate cells: few additions to the same place
        totals = torch.zeros(places.shape[0], 2 * size, dtype=torch.int64, device=places.device)
        totals.scatter_add_(1, digits.add_(elsewhere, alpha=size), weights)
        own = totals[:, :size]
        from_here = own.flip(1).cumsum(dim=1).flip(1) + above
        digit = ((from_here >= need).sum(dim=1, keepdim=True) - 1).clamp(min=0)  # NaN weights reach nothing
        above = (from_here - own).gather(1, digit)
        found = (found << _DIGIT_BITS) | digit
    return found, above


def whole_weights(logits: Tensor, temperature: Tensor) -> Tensor:
    """exp((logit - the row's largest) / temperature) as integers [R, V] int64; 0 for NaN."""
    largest = logits.amax(dim=1, keepdim=True)
    warmth = torch.where(temperature > 0, temperature, 1.0).double().unsqueeze(1)
    shares = logits.double().sub_(largest).masked_fill_(logits == largest, 0.0)  # no inf - inf
    shares = shares.div_(warmth).exp_().nan_to_num_(0.0)
    return shares.mul_(float(1 << scale_bits(logits.shape[1]))).add_(0.5).to(torch.int64)


def _keep_top_p(weights: Tensor, top_p: Tensor) -> Tensor:
    """Mask of [R, V]: the heaviest tokens until their sum reaches top_p of all; equal ones, lowest id first."""
    share, total = top_p.double().unsqueeze(1), weights.sum(dim=1, keepdim=True)
    need = torch.minimum((share * total).ceil().to(torch.int64), total).clamp(min=1)
    least, above = least_kept(weights, scale_bits(weights.shape[1]) + 1, weights, need)
    is_least = weights == least
    num_equal = (need - above + least - 1) // least.clamp(min=1)
    return (weights > least) | (is_least & (is_least.cumsum(dim=1) <= num_equal)) | (share >= 1.0)


def kept_weights(logits: Tensor, settings: SamplingSettings) -> Tensor:
    """`whole_weights` with zeros for what top-k, top-p and min-p remove."""
    weights = whole_weights(logits, settings.temperature)
    vocab = logits.shape[1]
    if settings.has_top_k:
        top_k, places = settings.top_k.unsqueeze(1), ordered_places(logits)
        count = torch.where((top_k <= 0) | (top_k > vocab), vocab, top_k)
        weights.mul_(places >= least_kept(places, 32, torch.ones_like(weights), count)[0])
    if settings.has_top_p:
        weights.mul_(_keep_top_p(weights, settings.top_p))
    if settings.has_min_p:
        floor = (settings.min_p.double() * float(1 << scale_bits(vocab)) + 0.5).to(torch.int64)
        weights.mul_(weights >= floor.unsqueeze(1))
    return weights


def draw(logits: Tensor, settings: SamplingSettings, uniform: Tensor) -> Tensor:
    """One token id for each row of float32 logits [R, V] -> [R] int64. uniform: [R] float64, on the same device.

    The token is the first id, in id order, whose cumulative weight exceeds uniform * total.
    """
    greedy = logits.argmax(dim=1) if settings.has_greedy or not settings.draws else None
    if not settings.draws:
        assert greedy is not None
        return greedy
    cumulative = kept_weights(logits, settings).cumsum(dim=1)
    total = cumulative[:, -1:]
    target = torch.minimum((uniform.unsqueeze(1) * total).to(torch.int64), total - 1)
    drawn = torch.searchsorted(cumulative, target, right=True).squeeze(1)
    return drawn if greedy is None else torch.where(settings.temperature > 0, drawn, greedy)
