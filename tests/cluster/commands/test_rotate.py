"""`kvrelay rotate`: what it asks an ingress, what it prints, and when it fails."""

from collections.abc import Iterator
from typing import Any

import pytest

from kvrelay.cluster.commands import status
from kvrelay.cluster.commands.cli import FAILED, run
from kvrelay.cluster.deployments.ingress import IngressReplica
from kvrelay.cluster.errors import RequestRefused, ServerUnreachable
from kvrelay.cluster.registry.rotation import HeldAuthorities, RotationReport
from kvrelay.config import settings_from
from kvrelay.errors import InvalidRequest

pytestmark = pytest.mark.pure


def process(host: str, *, authority: str = "aa", problem: str = "") -> dict[str, Any]:
    return {"host": host, "number": 3, "authority": authority, "expires": "2027-01-01", "problem": problem}


def report(number: int, *waiting_for: str, **processes: dict[str, Any]) -> dict[str, Any]:
    found = processes or {"ingress-a": process("10.0.0.1"), "decode-b": process("10.0.0.2")}
    return {"number": number, "processes": found, "waiting_for": list(waiting_for)}


def rotated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *answers: dict[str, Any] | Exception
) -> tuple[int, list[str]]:
    """The exit status and lines of the command, to which a cluster answers so: POST, then GET after GET."""
    left: Iterator[Any] = iter(answers)
    methods = []

    def answer(method: str, url: str, *_: Any, **__: Any) -> Any:
        assert url == "http://10.0.0.1:8000/kvrelay/rotate"
        methods.append(method)
        if isinstance(found := next(left), Exception):
            raise found
        return found

    monkeypatch.setattr(status, "request_json", answer)
    monkeypatch.setattr(status.time, "sleep", lambda seconds: None)
    code = run(["rotate", "--url", "http://10.0.0.1:8000"])
    assert methods == ["POST", *["GET"] * (len(methods) - 1)] and next(left, None) is None
    printed = capsys.readouterr()
    return code, [line.strip() for line in (printed.out + printed.err).splitlines() if line.strip()]


def test_each_step_is_printed_also_those_that_passed_between_two_looks_and_one_line_ends_it(monkeypatch, capsys):
    begun = {**report(1, "decode-b"), "is_begun": True, "has_files": False}
    lost = ServerUnreachable("the ingress is being replaced")
    code, lines = rotated(monkeypatch, capsys, begun, report(1), lost, report(3, "decode-b"), report(3))
    assert code == 0
    assert [line[:11] for line in lines[:-1]] == ["step 1 of 3", "step 2 of 3", "step 3 of 3"]
    assert lines[-1].startswith("rotated: 2 processes on 2 hosts show and trust the new authority alone, after ")


def test_one_that_is_under_way_is_waited_for(monkeypatch, capsys):
    begun = {**report(5), "is_begun": False, "has_files": False}
    code, lines = rotated(monkeypatch, capsys, begun, report(6))
    assert code == 0 and lines[0] == "a rotation is under way: waiting for its end"
    assert [line[:11] for line in lines[1:-1]] == ["step 2 of 3", "step 3 of 3"]


def test_hosts_with_bad_or_different_files_are_named_and_the_command_fails(monkeypatch, capsys):
    begun = {**report(3, "b"), "is_begun": True, "has_files": True}
    expired = "cluster.tls_dir: tls.crt in /tls expired on 2026-01-01"
    found = {
        "a": process("10.0.0.1"),
        "b": process("10.0.0.2", problem=expired),
        "c": process("10.0.0.3", authority="bb"),
        "d": process("10.0.0.4"),
    }
    code, lines = rotated(monkeypatch, capsys, begun, report(3, **found))
    assert code == FAILED
    assert lines == [
        f"host 10.0.0.2: {expired}",
        "host 10.0.0.3: ca.crt differs from that of most processes",
        "3 of 4 processes on 4 hosts use what they read in cluster.tls_dir now; the first certificate expires on "
        "2027-01-01",
    ]


def test_a_refusal_is_one_line(monkeypatch, capsys):
    refused = RequestRefused("http://10.0.0.1:8000", "cluster.tls is off: there is no authority to rotate", 409)
    code, lines = rotated(monkeypatch, capsys, refused)
    assert (code, lines) == (FAILED, ["kvrelay: cluster.tls is off: there is no authority to rotate"])


# ---- the ingress


class Called:
    """A method of the registry's actor."""

    def __init__(self, answer: Any) -> None:
        self.answer, self.arguments = answer, list[Any]()

    async def remote(self, *arguments: Any) -> Any:
        self.arguments.append(arguments)
        return self.answer


class RotatingRegistry:
    def __init__(self) -> None:
        self.rotate = Called(True)
        self.rotation = Called(RotationReport(1, {"a": HeldAuthorities("10.0.0.1")}, ("a",)))


class RotatingIngress:
    """An ingress, as far as it answers for the registry."""

    rotate, rotation = IngressReplica.rotate, IngressReplica.rotation
    _ask = staticmethod(IngressReplica._ask)

    def __init__(self, **cluster: Any) -> None:
        self._settings, self._registry = settings_from({"cluster": cluster}), RotatingRegistry()


@pytest.mark.parametrize("folder", [None, "/tls"])
async def test_the_ingress_has_the_registry_rotate_or_the_operators_files_read(folder: str | None):
    replica = RotatingIngress(tls_dir=folder)
    answer = await replica.rotate(b"{}")
    assert replica._registry.rotate.arguments == [(folder is not None,)]
    assert answer["is_begun"] and answer["has_files"] is (folder is not None)
    assert answer["processes"]["a"]["host"] == "10.0.0.1" and answer["waiting_for"] == ("a",)


async def test_without_tls_there_is_nothing_to_rotate():
    replica = RotatingIngress(tls=False)
    with pytest.raises(InvalidRequest, match=r"cluster\.tls is off") as refused:
        await replica.rotate(b"{}")
    assert refused.value.status == 409 and replica._registry.rotate.arguments == []
