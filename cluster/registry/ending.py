"""The end of an application's registry: it is detached, so it would stay after its application for as long as Ray."""

import asyncio
import contextlib
import logging
from collections.abc import Callable

import ray

from kvrelay.cluster.registry.members import STORE_ROLE, WorkerRecord
from kvrelay.cluster.registry.names import NAMESPACE, store_name

logger = logging.getLogger(__name__)

LOOK_S = 60.0
NUM_LOOKS = 3  # in a row: a Serve that restarts lists nothing for a moment


async def end_with_application(app_name: str, members: Callable[[], tuple[WorkerRecord, ...]]) -> None:
    """Wait until the application has no workers and Serve does not know it, then end its store's nodes and this actor.
    Its secret, sessions and planner's state end with it.
    """
    num_looks = 0
    while num_looks < NUM_LOOKS:
        await asyncio.sleep(LOOK_S)
        has_workers = any(record.role != STORE_ROLE for record in members())
        num_looks = 0 if has_workers or await asyncio.to_thread(is_deployed, app_name) else num_looks + 1
    logger.info("application %s is gone: its registry ends", app_name)
    for record in members():
        with contextlib.suppress(ValueError):  # it has ended
            ray.kill(ray.get_actor(store_name(app_name, record.node_id), namespace=NAMESPACE))
    ray.kill(ray.get_runtime_context().current_actor)


def is_deployed(app_name: str) -> bool:
    """Whether Serve knows the application; also while Serve does not answer."""
    from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

    try:
        controller = ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
        details = ray.get(controller.get_serve_instance_details.remote(), timeout=LOOK_S)
    except ValueError:  # no Serve runs
        return False
    except ray.exceptions.RayError as error:
        logger.warning("Serve does not say whether it runs %s: %s", app_name, error)
        return True
    return app_name in details["applications"]
