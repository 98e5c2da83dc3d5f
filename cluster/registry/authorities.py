"""How a rotation of the cluster's authority travels: the registry keeps the authorities and hands them out.

They outlive the registry in Ray's own key-value store, written before any process is given them: a registry that has
restarted finishes the rotation. They go over calls of Ray actors, so that a process needs no TLS to learn them, and it
connects nowhere before.
"""

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable
from typing import Any

import msgspec
from ray.exceptions import RayError
from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put

from kvrelay.cluster.registry.members import HEARTBEAT_S
from kvrelay.cluster.registry.names import NAMESPACE
from kvrelay.cluster.registry.rotation import HeldAuthorities, Rotation, RotationReport
from kvrelay.errors import ConfigError
from kvrelay.plane.tls import Authorities, ClusterTls

logger = logging.getLogger(__name__)

_SALT_BYTES = 32
_LOOK_S = 1.0  # while a rotation is under way
_ANSWER_S = 10.0
_RETRY_S = 1.0


class AuthorityKeeper:
    """The registry's part. Used on its loop."""

    def __init__(self, registry: str, clock: Callable[[], float] = time.monotonic) -> None:
        """`registry`: its name, under which the authorities are stored."""
        self._key, self._clock, self._started_s = f"{registry}-authorities", clock, clock()
        self._loaded: Rotation | None = None
        self._changed = asyncio.Event()
        self._changing = asyncio.Lock()

    async def exchange(self, process: str, held: HeldAuthorities) -> Authorities:
        """What the process is to hold: at once where that differs from what it holds, else within a heartbeat."""
        rotation = await self._rotation()
        rotation.confirm(process, held, self._clock())
        async with self._changing:
            await self._take(rotation, rotation.next_step(self._clock()))
        if held.number == rotation.authorities.number:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S if rotation.is_under_way else HEARTBEAT_S):
                    await self._changed.wait()
        return rotation.authorities

    async def rotate(self, *, has_files: bool) -> bool:
        """Begin; whether this call did: one may be under way."""
        rotation = await self._rotation()
        async with self._changing:
            step = rotation.read_again() if has_files else rotation.first_step(secrets.token_bytes(_SALT_BYTES))
            await self._take(rotation, step)
        return step is not None

    async def report(self) -> RotationReport:
        return (await self._rotation()).report(self._clock())

    async def _rotation(self) -> Rotation:
        """As it was stored last. Not read when the actor is made: Ray would not restart one that fails then."""
        async with self._changing:
            if self._loaded is None:
                saved = await asyncio.to_thread(_internal_kv_get, self._key, namespace=NAMESPACE)
                first = msgspec.msgpack.decode(saved, type=Authorities) if saved else Authorities()
                self._loaded = Rotation(first, self._started_s)
            return self._loaded

    async def _take(self, rotation: Rotation, step: Authorities | None) -> None:
        """Store it, then hand it out."""
        if step is None:
            return
        await asyncio.to_thread(_internal_kv_put, self._key, msgspec.msgpack.encode(step), namespace=NAMESPACE)
        rotation.authorities = step
        logger.info("authorities %d: %d trusted", step.number, len(step.trusted))
        self._changed.set()
        self._changed = asyncio.Event()


async def hold_authorities(registry: Any, process: str, host: str, tls: ClusterTls | None) -> "asyncio.Task[None]":
    """Have this process show and trust what the registry says, from the time when this returns until the returned task
    is cancelled, also after the registry was down. `process`: a name of its own. None: no TLS, nothing to hold.
    """
    if tls is None:
        return asyncio.create_task(asyncio.sleep(0), name="no authorities")
    held = HeldAuthorities(host)
    while held.number < 0:
        held = await _exchanged(registry, process, held, tls)
    return asyncio.create_task(_hold(registry, process, held, tls), name="hold authorities")


async def _hold(registry: Any, process: str, held: HeldAuthorities, tls: ClusterTls) -> None:
    while True:
        held = await _exchanged(registry, process, held, tls)


async def _exchanged(registry: Any, process: str, held: HeldAuthorities, tls: ClusterTls) -> HeldAuthorities:
    """What the process holds after one exchange with the registry, whether it answers or not."""
    try:
        async with asyncio.timeout(_ANSWER_S):
            authorities: Authorities = await registry.authorities.remote(process, held)
        if authorities.number == held.number:
            return held
        identity = await asyncio.to_thread(tls.take, authorities)
    except ConfigError as error:
        logger.warning("%s", error)
        return HeldAuthorities(held.host, authorities.number, held.authority, held.expires, str(error))
    except (RayError, TimeoutError, OSError) as error:
        reason = str(error) or "the registry did not answer in time"
        logger.warning("%s cannot take the cluster's authorities: %s", process, reason)
        await asyncio.sleep(_RETRY_S)
        return held
    return HeldAuthorities(held.host, authorities.number, identity.authority_digest, f"{identity.expires:%Y-%m-%d}")
