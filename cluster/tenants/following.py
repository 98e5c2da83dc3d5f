"""Keeps an ingress's API keys and quotas current: follows the file of keys, and exchanges what tenants use with the
other ingresses, through the registry.
"""

import asyncio
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
