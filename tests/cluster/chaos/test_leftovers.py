"""What a cluster must have given back: blocks, descriptors, memory. And faults that damage files."""

import os
from io import StringIO

import pytest
from rich.console import Console

from kvrelay.cluster.chaos.faults import FLIPS, Corrupt, NothingToHarm, store_memory
from kvrelay.cluster.chaos.history import Problem
from kvrelay.cluster.chaos.report import CONTROL, ChaosReport, render
from kvrelay.cluster.chaos.run import FD_SLACK, ProcessSample, StruckFault, fd_leaks, pool_problem
from kvrelay.kvtransfer.slabs.slabs import allocate_slab, free_slab

pytestmark = pytest.mark.pure


def worker(**load):
    idle = {"used_blocks": 0, "leased_blocks": 0, "quarantined_blocks": 0, "free_blocks": 100, "total_blocks": 100}
    return {"worker_id": "decode-0", "is_up": True, "load": idle | load}


def test_a_worker_whose_blocks_are_all_free_or_cached_has_no_problem():
    assert pool_problem(worker()) == ""


@pytest.mark.parametrize(
    "load",
    [{"free_blocks": 99}, {"used_blocks": 1, "free_blocks": 99}, {"leased_blocks": 1}, {"quarantined_blocks": 1}],
)
def test_a_block_that_is_held_or_lost_is_a_problem(load):
    assert "decode-0" in pool_problem(worker(**load))


def test_a_worker_that_does_not_answer_is_a_problem():
    assert pool_problem({"worker_id": "decode-0", "is_up": False, "error": "no answer"}) == "decode-0: no answer"


def sample(at_s, pid=1, fds=10, mib=100.0):
    return ProcessSample(at_s, pid, "ray::x", int(mib * (1 << 20)), fds)


def test_descriptors_of_a_process_that_lives_throughout_are_compared():
    assert fd_leaks([sample(0)], [sample(9, fds=10 + FD_SLACK), sample(9, pid=2, fds=500)]) == []
    (line,) = fd_leaks([sample(0)], [sample(9, fds=11 + FD_SLACK)])
    assert "10 descriptors, then 43" in line


def report(**other):
    empty = {"counts": {}, "faults": [], "problems": [], "leaks": [], "tokens_per_s": {}, "samples": [], "left_out": {}}
    return ChaosReport("tiny", 0, 60.0, **(empty | other))


def test_a_run_is_fine_unless_something_is_wrong_leaked_or_not_back():
    assert report(faults=[StruckFault("kill-decode", 1.0, 0.5, 9.0)]).is_fine
    assert not report(problems=[Problem(1, "a wrong token", is_wrong=True)]).is_fine
    assert not report(leaks=["process 7"]).is_fine
    assert not report(faults=[StruckFault("kill-decode", 1.0, 0.5, None)]).is_fine


@pytest.mark.parametrize("shows_growth", [True, False])
def test_a_soak_prints_a_line_for_each_kind_of_process(shows_growth):
    samples = [sample(at_s, mib=100 + at_s / 60) for at_s in range(0, 601, 5)] + [sample(600, pid=2, mib=50)]
    samples += [ProcessSample(at_s, 3, "raylet", 30 << 20, 10) for at_s in (0, 5)]
    render(report(samples=samples), console := Console(file=StringIO(), width=200), shows_growth=shows_growth)
    lines = [line for line in console.file.getvalue().splitlines() if line.startswith("growth")]
    assert (
        lines
        == [
            "growth     +60.0 MiB/h (private +60.0)  ray::x, 2 in all: first 100, last 110, peak 110 MiB",
            "growth                       not known  raylet, 1 in all: first 30, last 30, peak 30 MiB",
        ]
        * shows_growth
    )


def test_the_control_is_no_fault():
    found = report(faults=[StruckFault(CONTROL, 1.0, 0.1, 0.0), StruckFault("memory", 2.0, 0.3, 0.0)])
    assert found.num_faults == 1
    assert found.silences()["all faults"].max == 0.3


async def test_blocks_on_disk_are_corrupted_and_nothing_else(tmp_path):
    folder = tmp_path / "worker-0"
    folder.mkdir()
    (folder / "segment-0").write_bytes(bytes(1 << 16))
    for name in ("lock", "manifest.json"):
        (folder / name).write_text("as it was")
    await Corrupt("disk", lambda: tmp_path.glob("worker-*/segment-*")).strike(0.5)
    assert any((folder / "segment-0").read_bytes())
    assert len((folder / "segment-0").read_bytes()) == 1 << 16
    assert {(folder / name).read_text() for name in ("lock", "manifest.json")} == {"as it was"}


async def test_where_no_file_is_there_yet_nothing_is_harmed(tmp_path):
    with pytest.raises(NothingToHarm):
        await Corrupt("disk", lambda: tmp_path.glob("worker-*/segment-*")).strike(0.5)


class FakeCluster:
    """One process, this one, takes the part of every one."""

    def processes(self, matches):
        return [os.getpid()] if matches("ray::StoreActor") else []


async def test_the_stores_shared_memory_is_damaged_and_no_other():
    kind = Corrupt("shared memory", lambda: store_memory(FakeCluster()))
    with pytest.raises(NothingToHarm):
        await kind.strike(0.5)
    pool, slab = os.memfd_create("kvrelay-pool"), allocate_slab(1 << 20)
    os.ftruncate(pool, 1 << 20)
    try:
        await kind.strike(0.5)
        assert 0 < sum(byte != 0 for byte in slab.view) <= FLIPS
        assert not any(os.pread(pool, 1 << 20, 0))
    finally:
        os.close(pool)
        free_slab(slab)
