"""The ledger's operations in C: see ledger.py. Compiled at the first use, once for the process."""

import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvrelay.errors import BackendUnavailable
from kvrelay.native.build import load_builtins

logger = logging.getLogger(__name__)


@functools.cache
def binder() -> Callable[..., tuple[Any, ...]] | None:
    """Makes take, acquire, release, held, assign and common for three arrays; None where it cannot be had."""
    try:
        [bind] = load_builtins("pool", [Path(__file__).parent / "native" / "pool.c"])
    except BackendUnavailable as error:
        logger.info("block pools in Python: %s", error)
        return None
    return bind
