"""What stands between a layer's projection and its attention, made of a backend's single kernels."""

from torch import Tensor

from kvrelay.kernels.backend import Backend, Placement


def place_heads(backend: Backend, q: Tensor, k: Tensor, v: Tensor, placement: Placement) -> Tensor:
    """Backend.place_heads where no kernel does all of it."""
    if placement.norms is not None:
        q, k = (backend.rms_norm(x, norm, placement.eps) for x, norm in zip((q, k), placement.norms, strict=True))
    q, k = backend.rope(q, k, placement.cos_sin, placement.positions)
    backend.store_kv(k, v, placement.kv_layer, placement.slot_mapping)
    return q
