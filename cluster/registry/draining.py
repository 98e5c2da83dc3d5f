"""Whether this process's node is being drained, and until when. Ray moves Serve's replicas away by itself, but leaves
them their time to stop where the node has less, and a detached actor would keep the node until its deadline.
"""

import asyncio
import logging
import time

import ray

logger = logging.getLogger(__name__)

LOOK_S = 5.0
CLOSE_S = 5.0  # before the node's deadline, when Ray kills what still runs there: for error events and connections


async def leave_drained_node(*, restarts: bool) -> None:
    """Wait until Ray drains this actor's node, then end the actor.

    Args:
        restarts: on another node, by Ray (the actor's max_restarts).
    """
    node_id = ray.get_runtime_context().get_node_id()
    while node_id not in await asyncio.to_thread(_draining_nodes):
        await asyncio.sleep(LOOK_S)
    logger.info("node %s is drained: this actor %s", node_id, "moves to another one" if restarts else "ends")
    ray.kill(ray.get_runtime_context().current_actor, no_restart=not restarts)


async def time_to_stop_s(wanted_s: float) -> float:
    """How long this process may take to stop: `wanted_s`, or what its node's deadline leaves of it."""
    node_id = ray.get_runtime_context().get_node_id()
    deadline_ms = (await asyncio.to_thread(_draining_nodes)).get(node_id)
    return min(wanted_s, max(deadline_ms / 1e3 - time.time() - CLOSE_S, 0.0)) if deadline_ms else wanted_s


def _draining_nodes() -> dict[str, int]:
    """By id the Unix time in ms at which Ray takes the node away, 0: none; empty while the GCS does not answer."""
    from ray._private.worker import global_worker

    try:
        return dict(global_worker.gcs_client.get_draining_nodes(timeout=LOOK_S))
    except (ray.exceptions.RayError, RuntimeError) as error:
        logger.warning("Ray does not say which nodes are drained: %s", error)
        return {}
