"""Lets one part of a large package be imported without the rest of what the package needs. For
bench/kvcache/pool_side.py alone.

Modules that are not installed and that SGLang or vLLM import become empty ones, whose every name is a thing that does
nothing. Import torch, pydantic and transformers first: what they look for and do not find has to stay missing.
"""

import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any

PEERS = ("sglang", "vllm")
_ABSENT = {
    "libtpu",
    "tpu_inference",
    "amdsmi",
    "pynvml",
    "torch_xla",
    "habana_frameworks",
}  # asked to find the platform
_UNUSED = "sglang.srt.configs"  # configurations of models: all of transformers, and more


class _Thing:
    """Does nothing, whatever is asked of it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        """Takes anything."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        return args[0] if args and callable(args[0]) else self  # as a decorator: what it decorates

    def __getattr__(self, name: str) -> Any:
        return _thing(name)

    def __getitem__(self, key: Any) -> "_Thing":
        return self

    def __or__(self, other: Any) -> "_Thing":
        return self

    __ror__ = __or__

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return ()

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.any_schema()


def _thing(name: str) -> _Thing:
    if name.startswith("__") and name.endswith("__"):
        raise AttributeError(name)
    return _Thing()


class _Module(types.ModuleType):
    __version__ = "1.0.0"

    def __getattr__(self, name: str) -> Any:
        return _thing(name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        top = name.partition(".")[0]
        if name == _UNUSED or name.startswith(_UNUSED + "."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        if top in (*PEERS, *_ABSENT) or top in sys.stdlib_module_names or not _asked_by_a_peer():
            return None
        if "." in name and not isinstance(sys.modules.get(top), _Module):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__path__ = []


class _Unused(_Finder):
    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        return super().find_spec(name, path, target) if name.startswith(_UNUSED) else None


def _asked_by_a_peer() -> bool:
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None and ("importlib" in frame.f_code.co_filename or frame.f_code.co_filename == __file__):
        frame = frame.f_back
    return frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in PEERS


def install() -> None:
    """From now on."""
    sys.meta_path.insert(0, _Unused())
    sys.meta_path.append(_Finder())
