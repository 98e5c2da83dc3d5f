"""The ledger's operations in C: see ledger.py. Compiled on first use, once for the process."""

import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvrelay.errors import BackendUnavailable
from kvrelay.native.build import load_extension

logger = logging.getLogger(__name__)


@functools.cache
def binder() -> Callable[..., tuple[Any, ...]] | None:
    """Returns take, acquire, release, held, assign and common for three arrays; None without a compiler."""
    try:
        module = load_extension("kvrelay_ledger", [Path(__file__).parent / "native" / "ledger.c"])
    except BackendUnavailable as error:
        logger.info("the block pool runs in Python: %s", error)
        return None

    def bind(refs: object, generations: object, owners: object) -> tuple[Any, ...]:
        counters = module.BlockCounters(refs, generations, owners)
        return counters.take, counters.acquire, counters.release, counters.held, counters.assign, module.common

    return bind
