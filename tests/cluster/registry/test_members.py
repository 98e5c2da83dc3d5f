"""The registry's rules: who is a member, when the roster's version changes, what a restart means."""

from dataclasses import replace

import pytest

from kvrelay.cluster.registry.members import Registry, Roster, WorkerRecord, merged

pytestmark = pytest.mark.pure


def record(worker_id: str, *, epoch: str = "e1", role: str = "decode") -> WorkerRecord:
    return WorkerRecord(worker_id, role, epoch, "127.0.0.1", 4000, "node", 1)


def names(roster: Roster) -> list[str]:
    return [member.worker_id for member in roster.members]


def test_a_heartbeat_makes_a_member_and_repeating_it_changes_nothing():
    registry = Registry("i", 0.0)
    assert registry.heartbeat(record("d1"), 1.0)
    version = registry.version
    assert not registry.heartbeat(record("d1"), 2.0)
    assert registry.version == version
    assert names(registry.roster(2.0)) == ["d1"]


def test_a_silent_worker_expires_after_the_timeout_and_not_before():
    registry = Registry("i", 0.0, timeout_s=10.0)
    registry.heartbeat(record("d1"), 0.0)
    registry.heartbeat(record("d2"), 5.0)
    assert registry.expire(10.0) == ()
    assert registry.expire(10.1) == ("d1",)
    assert names(registry.roster(10.1)) == ["d2"]


def test_a_heartbeat_after_expiry_brings_the_worker_back():
    registry = Registry("i", 0.0, timeout_s=10.0)
    registry.heartbeat(record("d1"), 0.0)
    registry.expire(20.0)
    version = registry.version
    assert registry.heartbeat(record("d1"), 21.0)
    assert registry.version != version and names(registry.roster(21.0)) == ["d1"]


def test_a_new_life_of_a_worker_replaces_the_old_and_cannot_be_signed_off_by_it():
    registry = Registry("i", 0.0)
    registry.heartbeat(record("d1"), 0.0)
    assert registry.heartbeat(record("d1", epoch="e2"), 1.0)
    assert not registry.leave("d1", "e1")
    assert names(registry.roster(1.0)) == ["d1"]
    assert registry.leave("d1", "e2")
    assert names(registry.roster(1.0)) == [] and not registry.leave("d1", "e2")


def test_a_moved_worker_changes_the_version():
    registry = Registry("i", 0.0)
    registry.heartbeat(record("d1"), 0.0)
    version = registry.version
    assert registry.heartbeat(replace(record("d1"), port=4001), 1.0)
    assert registry.version != version


def test_versions_of_two_lives_of_the_registry_never_agree():
    assert Registry("a", 0.0).version != Registry("b", 0.0).version


def test_members_are_ordered_by_id():
    registry = Registry("i", 0.0)
    for name in ("p2", "d1", "p1"):
        registry.heartbeat(record(name), 0.0)
    assert names(registry.roster(0.0)) == ["d1", "p1", "p2"]


def test_an_ingress_keeps_whom_it_knew_until_a_restarted_registry_has_heard_from_all():
    known = (record("d1"), record("p1", role="prefill"))
    registry = Registry("second", 0.0, timeout_s=10.0)
    registry.heartbeat(replace(record("p1", role="prefill"), port=4001), 1.0)
    early = merged(known, registry.roster(1.0))
    assert [(member.worker_id, member.port) for member in early] == [("p1", 4001), ("d1", 4000)]
    assert [member.worker_id for member in merged(known, registry.roster(10.0))] == ["p1"]
