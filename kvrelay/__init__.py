"""kvrelay: LLM serving on Ray with prefill and decode apart.

Owns the import root and the vocabulary that every part shares; imports its own rooms only. May import kvrelay/native,
kvrelay/settings.
"""

from pathlib import Path as _Path

_root = _Path(__file__).resolve().parent.parent
if (_root / "pyproject.toml").is_file() and (_root / "kvtransfer").is_dir():
    __path__.append(str(_root))  # a checkout works uninstalled: kvrelay.engine is ./engine

__version__ = "0.1.0"
