"""What decides which kernels a model runs."""

from collections.abc import Collection
from dataclasses import dataclass

from kvrelay.kernels.backend import Activation, AttentionShape, AttentionVariant


@dataclass(frozen=True, slots=True)
class KernelNeeds:
    """shape, variants: of attention layers. rotary_dim: numbers of a key that are rotated. activation: of MLPs."""

    shape: AttentionShape
    variants: Collection[AttentionVariant]
    rotary_dim: int
    activation: Activation
