"""The end of an ingress: what it has begun is finished, within a limit. Imports no HTTP and no sockets."""

import asyncio

from kvrelay.serve.requests.dispatcher import Dispatcher
from kvrelay.serve.requests.retries import Unavailable

RETRY_AFTER_S = 1.0
POLL_S = 0.1


def ingress_stops(why: str) -> Unavailable:
    """For requests that it does not take, or does not finish."""
    return Unavailable(f"this ingress stops{why}; send the request again", RETRY_AFTER_S, "ingress_stops")


async def finish(dispatcher: Dispatcher, timeout_s: float) -> None:
    """Return when no sequence runs. What still does after `timeout_s` ends with an error (503). Viewers of /ui leave at
    once.
    """
    dispatcher.is_stopping, end_s = True, dispatcher.clock() + timeout_s
    while dispatcher.running and dispatcher.clock() < end_s:
        await asyncio.sleep(POLL_S)
    for driver in list(dispatcher.running):
        driver.stop(ingress_stops(f" and has waited {round(timeout_s, 1):g} s for this request"))
