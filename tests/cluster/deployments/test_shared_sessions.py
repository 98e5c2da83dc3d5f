"""Sessions that several ingresses share through the registry, whose actor here runs in this process."""

import asyncio

import pytest
from ray.exceptions import RayError

from kvrelay.cluster.deployments.ingress import FRESH_S, SharedSessions
from kvrelay.errors import Overloaded, RequestError
from kvrelay.serve.api.sessions import MAX_TENANT_SESSIONS, SessionHints, SessionKey
from tests.cluster.registry.handle import RegistryHandle

pytestmark = pytest.mark.alone


KEY = SessionKey.of("", "chat")


class Clock:
    now_s = 0.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def two():
    """(registry, clock, one ingress's sessions, another's)."""
    handle, clock = RegistryHandle(), Clock()
    return handle, clock, SharedSessions(handle, clock), SharedSessions(handle, clock)


async def test_what_one_ingress_makes_another_finds(two):
    _, _, one, other = two
    await one.put(KEY, SessionHints(priority=3, made="a"))
    assert await other.get(KEY) == SessionHints(priority=3, made="a")
    await other.put(KEY, SessionHints(priority=4, made="b"))
    assert (await other.get(KEY)).made == "a"


async def test_a_change_is_heeded_everywhere_after_a_moment(two):
    _, clock, one, other = two
    await one.put(KEY, SessionHints(made="a"))
    await other.get(KEY)
    assert await one.delete(KEY) == SessionHints(made="a")
    assert await one.get(KEY) is None
    clock.now_s += FRESH_S
    assert await other.get(KEY) is None


async def test_the_registry_is_not_asked_for_every_request(two):
    handle, clock, one, _ = two
    await one.put(KEY, SessionHints())
    for _ in range(100):
        await one.get(KEY)
    assert handle.num_calls == 1
    clock.now_s += FRESH_S
    await one.get(KEY)
    assert handle.num_calls == 2


async def test_too_many_are_refused(two):
    _, _, one, _ = two
    for index in range(MAX_TENANT_SESSIONS):
        await one.put(SessionKey("t", str(index)), SessionHints())
    with pytest.raises(Overloaded, match="too many sessions"):
        await one.put(SessionKey("t", "more"), SessionHints())


@pytest.mark.parametrize("error", [RayError("down"), TimeoutError()])
async def test_a_registry_that_is_down_is_said_to_be_while_what_is_known_goes_on(two, error):
    handle, _, one, other = two
    await one.put(KEY, SessionHints(priority=1))
    handle.error = error
    assert (await one.get(KEY)).priority == 1
    with pytest.raises(RequestError) as caught:
        await other.get(KEY)
    assert (caught.value.status, caught.value.code) == (503, "sessions_unavailable")


async def test_the_actor_can_be_asked_by_many_at_once(two):
    _, _, one, other = two
    await one.put(KEY, SessionHints(priority=1))
    answers = await asyncio.gather(*(other.get(KEY) for _ in range(50)))
    assert answers == 50 * [SessionHints(priority=1)]
