"""Whether this process's node is being drained: Ray moves Serve's replicas away by itself, but a detached actor would
keep the node until its deadline.
"""

import asyncio
import logging

import ray

logger = logging.getLogger(__name__)

LOOK_S = 5.0


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


def _draining_nodes() -> set[str]:
    """Their ids; empty while the GCS does not answer."""
    from ray._private.worker import global_worker

    try:
        return set(global_worker.gcs_client.get_draining_nodes(timeout=LOOK_S))
    except (ray.exceptions.RayError, RuntimeError) as error:
        logger.warning("Ray does not say which nodes are drained: %s", error)
        return set()
