"""Selects the backend: by name, or the best one that works here. Logs the choice once per process.

Imports torch only; a backend's own dependencies are imported when it is chosen.
"""

import functools
import logging
from typing import TYPE_CHECKING, Any, Literal

import torch

from kvrelay.errors import BackendUnavailable
from kvrelay.kernels.backend import Backend

if TYPE_CHECKING:
    from kvrelay.kernels.cuda.modules import KernelModule, KernelNeeds

logger = logging.getLogger(__name__)

Name = Literal["auto", "reference", "cpu", "cuda"]


@functools.lru_cache(maxsize=64)
def _log_once(message: str) -> None:
    logger.info("%s", message)


def why_no_cuda() -> str | None:
    """None when the CUDA backend can run here, else the reason."""
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    try:
        from kvrelay.kernels.cuda.jit import import_flashinfer

        import_flashinfer()
    except (ImportError, OSError) as error:
        return f"flashinfer does not import ({error}); pip install '.[cuda]'"
    return None


def _resolve(name: str, device: str) -> tuple[str, str]:
    """The backend's name and its device ("auto" resolved). Raises BackendUnavailable."""
    if name == "auto":
        name = "cpu" if device == "cpu" or why_no_cuda() is not None else "cuda"
        if name == "cpu" and device.startswith("cuda"):
            raise BackendUnavailable("cuda", why_no_cuda() or "unknown")
    if name == "cuda" and (why := why_no_cuda()) is not None:
        raise BackendUnavailable("cuda", why)
    if name == "cpu" and device.startswith("cuda"):
        raise BackendUnavailable("cpu", f"it does not run on {device}")
    if device == "auto":
        device = "cuda" if name == "cuda" else "cpu"
    return name, device


def select_backend(name: Name = "auto", device: str = "auto", num_threads: int | None = None) -> Backend:
    """The backend called `name` on `device` ("auto", "cpu", "cuda", "cuda:<n>").

    auto takes CUDA when torch finds a device and FlashInfer imports, else the CPU. `num_threads`
    matters on the CPU only; None means as many as this process may run on.

    Raises:
        BackendUnavailable: an explicit choice cannot run here; the text has the reason.
    """
    if name not in ("auto", "reference", "cpu", "cuda"):
        raise BackendUnavailable(name, "the backends are auto, reference, cpu and cuda")
    chosen, place = _resolve(name, device)
    if name == "auto" and chosen == "cpu":
        _log_once(f"kernel backend cpu (no cuda: {why_no_cuda() or 'device is cpu'})")
    else:
        _log_once(f"kernel backend {chosen} on {place}")
    kind = _class_of(chosen)
    backend: Backend = kind(num_threads) if chosen == "cpu" else kind(place)
    return backend


def backend_class(name: Name = "auto", device: str = "auto") -> Any:
    """The class of the backend that `select_backend` would make: its `name` and `kv_layouts`.
    Raises as that does.
    """
    return _class_of(_resolve(name, device)[0])


def kernel_modules(name: Name, device: str, needs: "list[KernelNeeds]") -> "list[KernelModule]":
    """What `select_backend`'s choice loads for models, to be compiled ahead; none on a CPU. Raises as that does."""
    if _resolve(name, device)[0] != "cuda":
        return []
    from kvrelay.kernels.cuda import modules

    return modules.kernel_modules(*needs)


def _class_of(name: str) -> Any:
    if name == "cuda":
        from kvrelay.kernels.cuda.graph_pieces import CapturingCudaBackend

        return CapturingCudaBackend
    if name == "cpu":
        from kvrelay.kernels.cpu.backend import CpuBackend

        return CpuBackend
    from kvrelay.kernels.oracle.reference import ReferenceBackend

    return ReferenceBackend
