"""What a process does for a short start, and with memory that only its start needed. Imports nothing of ours."""

import contextlib
import ctypes
import gc
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

META_KERNELS, TORCH = "torch._meta_registrations", "2.13."


@contextlib.contextmanager
def garbage_collection_paused() -> Iterator[None]:
    """Collect no garbage meanwhile: for imports, whose objects stay, it finds none and takes a third of their time.
    Later collections leave out what exists at the end.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def without_meta_kernels() -> Iterator[None]:
    """Keep the first `import torch` from registering its kernels for tensors without data, 0.4 s and 18 MiB: only
    torch.compile needs them, and may import them later. Not where it was not tried: with another torch, or with a GPU.
    """
    has_gpu = any(Path("/dev", name).exists() for name in ("nvidiactl", "dxg", "kfd"))
    is_first = "torch" not in sys.modules and not has_gpu and version("torch").startswith(TORCH)
    if is_first:
        sys.modules[META_KERNELS] = ModuleType(META_KERNELS)
    yield
    if is_first:
        import torch._opaque_base

        del sys.modules[META_KERNELS], torch._meta_registrations
        torch._C._set_generator_metaclass(torch._opaque_base.OpaqueBaseMeta)  # else a module of those kernels does


def return_freed_memory() -> None:
    """Return to the system what the C library keeps of freed memory. Without glibc it does nothing."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
