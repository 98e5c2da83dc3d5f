"""Cores are physical ones and know their NUMA node; leases keep to one node while they can. On made-up sysfs trees."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvrelay.cluster.deployments.cores import acquire_cores, choose
from kvrelay.machine import UNKNOWN_NODE, Core, cpu_quota, own_cores, physical_cores, usable_cores

pytestmark = pytest.mark.pure


def machine(root: Path, *, nodes: Sequence[str], threads: Sequence[str]) -> Path:
    """A sysfs with these CPUs in each node, and these CPUs in each core, both as "0-3,8"."""
    for node, cpus in enumerate(nodes):
        folder = root / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cpus}\n")
    for siblings in threads:
        for cpu in siblings.split(","):
            folder = root / f"devices/system/cpu/cpu{cpu}/topology"
            folder.mkdir(parents=True)
            (folder / "thread_siblings_list").write_text(f"{siblings}\n")
    return root


@pytest.fixture
def two_nodes(tmp_path: Path) -> Path:
    """Two nodes of two cores of two hyperthreads, numbered as Linux does: siblings last."""
    return machine(tmp_path / "sys", nodes=("0-1,4-5", "2-3,6-7"), threads=("0,4", "1,5", "2,6", "3,7"))


def test_a_core_has_its_hyperthreads_and_its_node(two_nodes: Path):
    assert physical_cores(range(8), two_nodes) == (
        Core(0, (0, 4), 0),
        Core(1, (1, 5), 0),
        Core(2, (2, 6), 1),
        Core(3, (3, 7), 1),
    )


def test_a_core_keeps_its_name_whichever_of_its_hyperthreads_may_be_used(two_nodes: Path):
    assert physical_cores((3, 4), two_nodes) == (Core(0, (4,), 0), Core(3, (3,), 1))


def test_without_a_sysfs_every_cpu_is_a_core_of_no_node(tmp_path: Path):
    assert physical_cores((1, 0), tmp_path) == (Core(0, (0,), UNKNOWN_NODE), Core(1, (1,), UNKNOWN_NODE))


def test_own_cores_are_those_that_this_thread_may_run_on(two_nodes: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {2, 6, 7})
    assert own_cores(two_nodes) == (Core(2, (2, 6), 1), Core(3, (7,), 1))


def test_workers_get_whole_nodes_and_no_two_share_a_physical_core(two_nodes: Path, tmp_path: Path):
    cores = physical_cores(range(8), two_nodes)
    with ExitStack() as stack:
        leases = [acquire_cores(tmp_path / "locks", cores, 2) for _ in range(2)]
        for lease in leases:
            stack.callback(lease.release)
        assert [lease.cpus for lease in leases] == [(0, 1, 4, 5), (2, 3, 6, 7)]


def test_a_worker_is_not_spread_over_nodes_where_one_has_enough(two_nodes: Path, tmp_path: Path):
    cores = physical_cores(range(8), two_nodes)
    with ExitStack() as stack:
        for want, expected in ((1, (0, 4)), (2, (2, 3, 6, 7)), (1, (1, 5))):
            lease = acquire_cores(tmp_path / "locks", cores, want)
            stack.callback(lease.release)
            assert lease.cpus == expected


def cores(*nodes: int) -> list[Core]:
    return [Core(index, (index,), node) for index, node in enumerate(nodes)]


@pytest.mark.parametrize(
    ("nodes", "holders", "want", "chosen"),
    [
        ((0, 0, 0, 1, 1), (0, 0, 0, 0, 0), 2, [3, 4]),  # the node that fits best
        ((0, 0, 1, 1, 1), (0, 0, 0, 0, 0), 4, [2, 3, 4, 0]),  # more than a node: most of it in one
        ((0, 0, 1, 1), (1, 0, 1, 0), 2, [1, 3]),  # free ones first, wherever they are
        ((0, 0, 1, 1), (1, 0, 1, 1), 2, [1, 0]),  # a shared one beside the free one
        ((0, 1, 0, 1), (1, 1, 1, 1), 2, [0, 2]),  # all shared alike
    ],
)
def test_free_cores_come_first_and_one_node_next(
    nodes: tuple[int, ...], holders: tuple[int, ...], want: int, chosen: list[int]
):
    held = dict(zip(cores(*nodes), holders, strict=True))
    assert [core.index for core in choose(held, want)] == chosen


def test_looking_for_cores_leaves_no_lock_behind(tmp_path: Path):
    two = cores(0, 1)
    first = acquire_cores(tmp_path, two, 1)
    second = acquire_cores(tmp_path, two, 2)
    assert [lease.cpus for lease in (first, second)] == [(0,), (0, 1)]
    second.release()
    third = acquire_cores(tmp_path, two, 1)
    assert third.cpus == (1,)
    for lease in (first, third):
        lease.release()


@pytest.mark.parametrize(
    ("files", "quota", "num_cores"),
    [
        ({}, None, 4),
        ({"fs/cgroup/cpu.max": "max 100000\n"}, None, 4),
        ({"fs/cgroup/cpu.max": "200000 100000\n"}, 2.0, 2),
        ({"fs/cgroup/cpu.max": "50000 100000\n"}, 0.5, 1),
        ({"fs/cgroup/cpu.max": "6400000 100000\n"}, 64.0, 4),
        ({"fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n", "fs/cgroup/cpu/cpu.cfs_period_us": "100000\n"}, None, 4),
        ({"fs/cgroup/cpu/cpu.cfs_quota_us": "350000\n", "fs/cgroup/cpu/cpu.cfs_period_us": "100000\n"}, 3.5, 3),
        ({"fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "100000", "fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "0"}, None, 4),
        ({"fs/cgroup/cpu.max": "nonsense"}, None, 4),
    ],
)
def test_a_containers_cpu_quota_limits_the_cores_that_are_used(
    files: dict[str, str], quota: float | None, num_cores: int, two_nodes: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    for name, content in files.items():
        (two_nodes / name).parent.mkdir(parents=True, exist_ok=True)
        (two_nodes / name).write_text(content)
    assert cpu_quota(two_nodes) == quota
    assert usable_cores(two_nodes) == num_cores
