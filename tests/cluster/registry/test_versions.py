"""One version of kvrelay in a cluster: which replica is refused, and with what line."""

import pytest
from ray.exceptions import ActorUnavailableError

from kvrelay.cluster.commands.doctor import versions
from kvrelay.cluster.errors import VersionMismatch
from kvrelay.cluster.registry import actor
from kvrelay.cluster.registry.actor import JoinSettings, RegistryActor, join
from kvrelay.cluster.registry.versions import Deployed, Installed, protocol_refusal, refusal

REGISTRY = Installed("10.0.0.1", "0.2.0", 6)


def deployed(version: str, host: str = "10.0.0.9") -> Deployed:
    return Deployed(version=version, host=host, secret=None, api_key=None)


def test_a_replica_of_the_deployed_version_joins():
    assert refusal("decode-1", Installed("10.0.0.2", "0.2.0", 6), deployed("0.2.0"), REGISTRY) is None


def test_a_host_with_another_version_is_refused_and_both_are_named():
    line = refusal("decode-1", Installed("10.0.0.2", "0.1.0", 6), deployed("0.2.0"), REGISTRY)
    assert line == (
        "decode-1 has kvrelay 0.1.0 on host 10.0.0.2, but kvrelay 0.2.0 was deployed from host 10.0.0.9: install one "
        "version on every host, then deploy again"
    )


def test_a_registry_of_an_older_release_is_used_while_the_protocol_is_the_same():
    newer = Installed("10.0.0.2", "0.3.0", 6)
    assert refusal("decode-1", newer, deployed("0.3.0"), REGISTRY) is None  # a rolling upgrade
    assert protocol_refusal(newer, REGISTRY) is None
    line = protocol_refusal(Installed("10.0.0.2", "1.0.0", 7), REGISTRY)
    assert line == (
        "the application's registry is kvrelay 0.2.0 (protocol 6) on host 10.0.0.1, and this is kvrelay 1.0.0 "
        "(protocol 7) on host 10.0.0.2: deploy it as an application of another name, which takes over (kvrelay deploy)"
    )


class Remote:
    """The registry's handle, without Ray. `num_down`: calls that come while it restarts."""

    def __init__(self, actor: RegistryActor, num_down: int = 0) -> None:
        self.join_settings, self._actor, self.num_down = self, actor, num_down

    async def remote(self) -> JoinSettings:
        if self.num_down:
            self.num_down -= 1
            raise ActorUnavailableError("it is restarting", None)
        return await self._actor.join_settings()


async def test_a_replica_asks_the_registry_before_it_joins():
    registry = RegistryActor("secret", "10.0.0.1", None)
    own = Installed("10.0.0.1")
    assert (await join(Remote(registry), "decode-1", deployed(own.version))).secret == b"secret"
    with pytest.raises(VersionMismatch, match=r"decode-1 has .* but kvrelay 9\.9 was deployed from host 10\.0\.0\.7"):
        await join(Remote(registry), "decode-1", deployed("9.9", "10.0.0.7"))


async def test_a_replica_that_starts_while_the_registry_restarts_waits_for_it(monkeypatch):
    monkeypatch.setattr(actor, "_RETRY_S", 0.0)
    handle = Remote(RegistryActor("secret", "10.0.0.1", None), num_down=3)
    own = Installed("10.0.0.1")
    assert (await join(handle, "decode-1", deployed(own.version))).secret == b"secret" and not handle.num_down


async def test_a_replica_learns_whether_the_clusters_secret_was_given_or_made_up():
    own = Installed("10.0.0.1")
    for is_given in (True, False):
        handle = Remote(RegistryActor("secret", "10.0.0.1", None, is_secret_given=is_given))
        assert (await join(handle, "decode-1", deployed(own.version))).is_secret_given is is_given


def test_the_doctor_lists_versions_by_host_and_those_that_differ():
    from kvrelay import __version__

    def worker(name: str, host: str, version: str) -> dict[str, object]:
        return {"worker_id": name, "address": f"{host}:4000", "version": version, "is_up": True}

    workers = [
        worker("p", "10.0.0.1", __version__),
        worker("d", "10.0.0.2", "0.0.9"),
        {"worker_id": "x", "is_up": False},
    ]
    lines, differing = versions({"version": __version__, "workers": workers})
    assert lines == [f"10.0.0.1: kvrelay {__version__}, p", "10.0.0.2: kvrelay 0.0.9, d"]
    assert differing == [f"the ingress has kvrelay {__version__}, workers have 0.0.9"]
    assert versions({"version": "9.9", "workers": []})[1] == [
        f"the cluster runs kvrelay 9.9, this machine has {__version__}"
    ]
