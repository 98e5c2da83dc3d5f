"""Head norms, rotation and the cache write, made of a backend's single kernels."""

from torch import Tensor

from kvrelay.kernels.backend import Backend, HeadInputs


def norm_rope_store(backend: Backend, q: Tensor, k: Tensor, v: Tensor, inputs: HeadInputs) -> Tensor:
    """Backend.norm_rope_store for backends without a fused kernel."""
    if inputs.norms is not None:
        q, k = (backend.rms_norm(x, norm, inputs.eps) for x, norm in zip((q, k), inputs.norms, strict=True))
    q, k = backend.rope(q, k, inputs.cos_sin, inputs.positions)
    backend.store_kv(k, v, inputs.kv_layer, inputs.slot_mapping)
    return q
