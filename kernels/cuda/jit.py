"""FlashInfer and what its compiler needs."""

import os
import shutil
import sys
from contextlib import suppress
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvrelay.environment import cache_dir

USUAL_TOOLKIT = Path("/usr/local/cuda")


def import_flashinfer() -> Any:
    """The flashinfer package, in an environment in which it can build its kernels.

    - Its norms are those in CUDA, also where nvidia-cutlass-dsl is installed: what is tested is what users run.
    - They include cublasLt.h: torch's CUDA wheels bring it, toolkits without cuBLAS do not.
    - Modules are linked with libcuda.so, of which a machine may have the driver's libcuda.so.1 only.
    - The toolkit is found also where the nvcc on the PATH is a script outside of it.
    - ninja, which it runs for compiled modules, too, is found beside this interpreter.

    Raises ImportError or OSError: it is not installed, or does not load.
    """
    _set_environment()
    import flashinfer

    return flashinfer


@lru_cache(maxsize=1)
def _set_environment() -> None:
    """Once for the process: every choice of a backend asks whether FlashInfer imports."""
    os.environ.setdefault("FLASHINFER_USE_CUDA_NORM", "1")
    scripts = Path(sys.executable).parent
    if shutil.which("ninja") is None and (scripts / "ninja").exists():  # an environment that is not activated
        add_to("PATH", str(scripts), os.pathsep)
    if not any(os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")) and _is_toolkit(USUAL_TOOLKIT):
        nvcc = shutil.which("nvcc")
        if nvcc is not None and not _is_toolkit(Path(nvcc).parents[1]):
            os.environ["CUDA_HOME"] = str(USUAL_TOOLKIT)
    for folder in _headers():
        add_to("NVCC_APPEND_FLAGS", f"-isystem {folder}", " ")
    with suppress(OSError):  # a cache that cannot be written: toolkits bring a stub of libcuda.so, too
        if (stub := _driver_library()) is not None:
            add_to("LIBRARY_PATH", str(stub), os.pathsep)


def _is_toolkit(folder: Path) -> bool:
    """Whether modules can be compiled and linked with it."""
    return (folder / "bin" / "nvcc").exists() and (folder / "lib64" / "libcudart.so").exists()


def add_to(variable: str, value: str, separator: str) -> None:
    """Append to an environment variable."""
    known = os.environ.get(variable, "")
    if value not in known:
        os.environ[variable] = f"{known}{separator}{value}" if known else value


def _headers() -> list[Path]:
    """Of CUDA 13, as NVIDIA's wheels install them."""
    spec = find_spec("nvidia")
    roots = [] if spec is None else list(spec.submodule_search_locations or [])
    return [folder for root in roots if (folder := Path(root, "cu13", "include")).is_dir()]


def _driver_library() -> Path | None:
    """A folder with a libcuda.so, where this process has the driver's library loaded; else None."""
    with open("/proc/self/maps") as maps:
        loaded = {Path(line.split(maxsplit=5)[5].strip()) for line in maps if "/libcuda.so" in line}
    if not loaded:
        return None
    folder = cache_dir() / "libcuda"
    folder.mkdir(parents=True, exist_ok=True)
    link, unfinished = folder / "libcuda.so", folder / f"unfinished-{os.getpid()}"
    unfinished.symlink_to(min(loaded))
    unfinished.replace(link)
    return folder
