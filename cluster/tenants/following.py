"""Keeps API keys and quotas current: an ingress follows the file of keys, exchanges what tenants use with the other
ingresses, and reports quotas of the store to its nodes, all through the registry.
"""

import asyncio
import contextlib
import logging
from typing import Any

from ray.exceptions import RayError

from kvrelay.serve.tenants.access import Access
from kvrelay.serve.tenants.quotas import Report

logger = logging.getLogger(__name__)
RELOAD_S = 2.0
EXCHANGE_S = 1.0
ANSWER_S = 1.0


async def follow_keys(access: Access) -> None:
    """Read the file of keys again whenever it has changed, until cancelled."""
    while True:
        await asyncio.sleep(RELOAD_S)
        await asyncio.to_thread(access.reload)


async def exchange_usage(access: Access, registry: Any, ingress: str) -> None:
    """Report what the tenants with quotas use here, and take what they use elsewhere, until cancelled. While the
    registry is away, the last sums hold. `registry`: the handle of its actor. `ingress`: unique.
    """
    is_away = False
    while True:
        await asyncio.sleep(EXCHANGE_S)
        if not access.counted():
            continue
        report = access.ledger.report()
        try:
            async with asyncio.timeout(ANSWER_S):
                answer: Report = await registry.exchange_usage.remote(ingress, report)
        except (RayError, TimeoutError, AttributeError) as error:  # AttributeError: a registry of an older version
            access.ledger.returned(report)
            if not is_away:
                logger.warning("quotas go on with the last sums of the other ingresses: %r", error)
            is_away = True
            continue
        is_away = False
        access.heard(report, answer)


async def report_store_quotas(access: Access, registry: Any, ingress: str) -> None:
    """Report what tenants may have of the cluster's store, until cancelled: again and again, since a registry that has
    restarted knows none.
    """
    while True:
        with contextlib.suppress(RayError, TimeoutError, AttributeError):  # as above
            async with asyncio.timeout(ANSWER_S):
                await registry.put_store_quotas.remote(ingress, access.store_quotas())
        await asyncio.sleep(EXCHANGE_S)
