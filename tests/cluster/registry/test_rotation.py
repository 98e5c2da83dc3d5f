"""The steps of a rotation: no two live processes refuse each other at any time, and in the end the old one is gone."""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.cluster.registry.members import HEARTBEAT_S, TIMEOUT_S
from kvrelay.cluster.registry.rotation import LINGER_S, HeldAuthorities, Rotation
from kvrelay.plane.tls import Authorities

pytestmark = pytest.mark.pure

OLD, NEW = b"", b"new"


def held(number: int, host: str = "10.0.0.1") -> HeldAuthorities:
    return HeldAuthorities(host, number)


def confirm(rotation: Rotation, name: str, number: int, first_s: float, last_s: float) -> None:
    """The process holds this and says so from then to then, as often as it does."""
    now_s = first_s
    while now_s < last_s:
        rotation.confirm(name, held(number), now_s)
        now_s += HEARTBEAT_S
    rotation.confirm(name, held(number), last_s)


def begun(*processes: str) -> Rotation:
    """A rotation in its first step at 0 s, which these processes have not confirmed; the registry started long ago."""
    rotation = Rotation(Authorities(), -TIMEOUT_S)
    for second in range(-int(TIMEOUT_S), 1):
        for name in processes or ("a",):
            rotation.confirm(name, held(0), float(second))
    step = rotation.first_step(NEW)
    assert step is not None
    rotation.authorities = step
    return rotation


def test_first_both_are_trusted_then_the_new_one_issues_then_the_old_one_is_trusted_no_more():
    rotation, now_s = begun("a"), 0.0
    steps = [rotation.authorities]
    while rotation.is_under_way:
        confirm(rotation, "a", rotation.authorities.number, now_s, now_s + LINGER_S)
        now_s += LINGER_S
        step = rotation.next_step(now_s)
        assert step is not None
        rotation.authorities = step
        steps.append(step)
    assert steps == [Authorities(1, OLD, (OLD, NEW)), Authorities(2, NEW, (OLD, NEW)), Authorities(3, NEW, (NEW,))]
    assert rotation.next_step(now_s + 100) is None


def test_a_step_waits_for_every_process_and_names_those_it_waits_for():
    rotation = begun("a", "b")
    confirm(rotation, "a", 1, 1.0, 14.0)
    assert rotation.report(14.0).waiting_for == ("b",)
    assert rotation.next_step(14.0) is None
    confirm(rotation, "b", 1, 14.0, 14.0 + LINGER_S)
    assert rotation.report(14.0 + LINGER_S).waiting_for == ()
    assert rotation.next_step(14.0 + LINGER_S) == Authorities(2, NEW, (OLD, NEW))


def test_a_step_lets_handshakes_end_that_began_before_the_last_confirmation():
    rotation = begun("a")
    confirm(rotation, "a", 1, 1.0, 6.0)  # repeated: it holds it since 1.0
    assert rotation.next_step(0.9 + LINGER_S) is None
    assert rotation.next_step(1.0 + LINGER_S) is not None


def test_a_process_that_is_silent_for_the_timeout_is_gone_and_waited_for_no_more():
    rotation = begun("a", "b")
    confirm(rotation, "a", 1, 1.0, TIMEOUT_S)
    assert rotation.next_step(TIMEOUT_S) is None
    assert rotation.next_step(TIMEOUT_S + 0.1) is not None
    assert list(rotation.report(TIMEOUT_S + 0.1).processes) == ["a"]


def test_a_registry_that_was_stopped_takes_nobody_for_gone():
    rotation = begun("a", "b")
    confirm(rotation, "a", 1, 1.0, 10.0)
    confirm(rotation, "a", 1, 40.0, 50.0)  # "b" will call soon, too
    assert rotation.next_step(50.0) is None
    confirm(rotation, "b", 0, 51.0, 51.0)
    assert rotation.report(51.0).waiting_for == ("b",)


def test_a_process_that_starts_meanwhile_is_waited_for_from_its_first_call():
    rotation = begun("a")
    confirm(rotation, "a", 1, 1.0, 5.0)
    rotation.confirm("new", HeldAuthorities("10.0.0.2"), 5.0)
    assert rotation.next_step(1.0 + LINGER_S) is None
    assert rotation.report(1.0 + LINGER_S).waiting_for == ("new",)


def test_a_second_rotation_does_not_begin_before_the_first_has_ended():
    rotation = begun()
    assert rotation.first_step(b"newer") is None
    rotation.authorities = Authorities(3, NEW, (NEW,))
    assert rotation.first_step(b"newer") == Authorities(4, NEW, (NEW, b"newer"))


def test_a_registry_that_has_restarted_first_learns_who_is_alive_and_then_goes_on():
    rotation = Rotation(Authorities(2, NEW, (OLD, NEW)), started_s=100.0)
    confirm(rotation, "a", 2, 101.0, 119.9)
    assert rotation.next_step(119.9) is None  # "b" may not have called yet
    assert rotation.next_step(100.0 + TIMEOUT_S) == Authorities(3, NEW, (NEW,))


def test_the_operators_files_are_read_again_under_a_new_number_and_no_step_follows():
    rotation = Rotation(Authorities(), 0.0)
    rotation.confirm("a", held(0), 0.0)
    rotation.authorities = rotation.read_again()
    assert rotation.authorities == Authorities(3) and not rotation.is_under_way
    assert rotation.report(1.0).waiting_for == ("a",)


# ---- whatever happens, in whatever order


@dataclass
class Process:
    """One that holds what it took last, and may be slow to say so."""

    authorities: Authorities
    seen_s: float

    def accepts(self, other: "Process") -> bool:
        return other.authorities.issuing in self.authorities.trusted


class Fleet:
    """Processes, the registry's rotation, and what is stored of it, in virtual time."""

    def __init__(self) -> None:
        self.now_s, self.num_started, self.stored = 0.0, 0, Authorities()
        self.rotation = Rotation(self.stored, self.now_s)
        self.live: dict[str, Process] = {}
        for _ in range(3):
            self.start(0)
        for _ in range(int(TIMEOUT_S)):
            self.wait(0)

    def start(self, index: int) -> None:
        self.num_started += 1
        name = f"p{self.num_started}"
        self.rotation.confirm(name, HeldAuthorities("h"), self.now_s)
        self.live[name] = Process(self.stored, self.now_s)

    def call(self, index: int) -> None:
        """A process tells what it holds, then takes what it is answered."""
        if not self.live:
            return
        name = list(self.live)[index % len(self.live)]
        process = self.live[name]
        self.rotation.confirm(name, held(process.authorities.number), self.now_s)
        self.step()
        process.authorities, process.seen_s = self.stored, self.now_s

    def step(self) -> None:
        if step := self.rotation.next_step(self.now_s):
            self.rotation.authorities = self.stored = step

    def rotate(self, index: int) -> None:
        if step := self.rotation.first_step(f"salt {self.now_s}".encode()):
            self.rotation.authorities = self.stored = step

    def kill(self, index: int) -> None:
        if self.live:
            del self.live[list(self.live)[index % len(self.live)]]

    def restart_registry(self, index: int) -> None:
        self.rotation = Rotation(self.stored, self.now_s)

    def stop_registry(self, index: int) -> None:
        """For longer than the timeout; then every process gets an answer again soon."""
        self.now_s += TIMEOUT_S + 1.0
        for process in self.live.values():
            process.seen_s = self.now_s

    def wait(self, index: int) -> None:
        """Time passes; whoever would have been silent for too long calls before."""
        self.now_s += 1.0 + index % 5
        for number, process in enumerate(list(self.live.values())):
            if self.now_s - process.seen_s > HEARTBEAT_S:
                self.call(number)


ACTS = st.lists(
    st.tuples(
        st.sampled_from(["start", *["call"] * 6, "rotate", "kill", "restart_registry", "stop_registry", *["wait"] * 4]),
        st.integers(0, 9),
    ),
    min_size=20,
    max_size=80,
)


@settings(max_examples=100)
@given(ACTS)
def test_live_processes_accept_each_other_at_every_moment_and_a_rotation_ends(acts: list[tuple[str, int]]):
    fleet = Fleet()
    for act, index in acts:
        getattr(fleet, act)(index)
        for one in fleet.live.values():
            assert all(one.accepts(other) for other in fleet.live.values())
    for _ in range(60):
        fleet.wait(0)
        for index in range(len(fleet.live)):
            fleet.call(index)
        fleet.step()
    assert not fleet.rotation.is_under_way and len(fleet.stored.trusted) == 1
    assert all(one.authorities == fleet.stored for one in fleet.live.values())
