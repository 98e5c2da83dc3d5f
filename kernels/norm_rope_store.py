"""What stands between a layer's projection and its attention, made of a backend's single kernels."""

from torch import Tensor

from kvrelay.kernels.backend import Backend, HeadInputs


def norm_rope_store(backend: Backend, q: Tensor, k: Tensor, v: Tensor, inputs: HeadInputs) -> Tensor:
    """Backend.norm_rope_store where no kernel does all of it."""
    if inputs.norms is not None:
        q, k = (backend.rms_norm(x, norm, inputs.eps) for x, norm in zip((q, k), inputs.norms, strict=True))
    q, k = backend.rope(q, k, inputs.cos_sin, inputs.positions)
    backend.store_kv(k, v, inputs.kv_layer, inputs.slot_mapping)
    return q
