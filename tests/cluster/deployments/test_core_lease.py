"""A core lease is a fair share, and ends with its holder, however that ends."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvrelay.cluster.deployments import cores as cores_module
from kvrelay.cluster.deployments import worker as worker_deployment
from kvrelay.cluster.deployments.cores import acquire_cores, within_quota
from kvrelay.cluster.deployments.worker import LEAST_WORKERS
from kvrelay.config import settings_from
from kvrelay.machine import Core

pytestmark = pytest.mark.alone


TWO = (Core(0, (0,)), Core(1, (1,)))


def test_a_killed_holders_cores_are_free_at_once(tmp_path: Path):
    program = (
        "import sys, pathlib; from kvrelay.cluster.deployments.cores import acquire_cores; "
        "from kvrelay.machine import Core;"
        f"acquire_cores(pathlib.Path({str(tmp_path)!r}), {TWO!r}, 1); print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        other = acquire_cores(tmp_path, TWO, 1)
        assert other.cpus == (1,)
        holder.kill()
    again = acquire_cores(tmp_path, TWO, 1)
    assert again.cpus == (0,)
    other.release()
    again.release()


@pytest.mark.parametrize(
    ("num_workers", "settings", "quota", "num_cores"),
    [
        (5, {}, None, 3),
        (LEAST_WORKERS, {}, None, 8),
        (5, {"cores_per_worker": 4}, None, 4),
        (5, {"num_gpus_per_worker": 1}, None, None),
        (5, {}, 2.0, None),
    ],
)
def test_a_worker_takes_a_fair_share_among_those_that_serve_means_to_run(
    num_workers: int,
    settings: dict[str, float],
    quota: float | None,
    num_cores: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("KVRELAY_CACHE", str(tmp_path))
    monkeypatch.setattr(worker_deployment, "cpu_quota", lambda: quota)
    monkeypatch.setattr(worker_deployment, "own_cores", lambda: [Core(cpu, (cpu,)) for cpu in range(16)])
    replica: Any = SimpleNamespace(role="decode", _settings=settings_from({"cluster": settings}))
    lease = worker_deployment.WorkerReplica._lease_cores(replica, num_workers)
    assert (lease and len(lease.cores)) == num_cores
    if lease:
        lease.release()


def test_only_the_role_that_is_on_the_cpu_takes_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("KVRELAY_CACHE", str(tmp_path))
    monkeypatch.setattr(worker_deployment, "cpu_quota", lambda: None)
    settings = settings_from({"decode": {"device": "cuda"}, "cluster": {"cores_per_worker": 1}})
    for role, num_cores in (("prefill", 1), ("decode", None)):
        replica: Any = SimpleNamespace(role=role, _settings=settings)
        lease = worker_deployment.WorkerReplica._lease_cores(replica, 2)
        assert (lease and len(lease.cores)) == num_cores
        if lease:
            lease.release()


@pytest.mark.parametrize(
    ("settings", "quota", "num_threads"),
    [
        ({}, None, None),
        ({}, 6.0, 3),
        ({"cluster": {"cores_per_worker": 4}}, 6.0, 4),
        ({"engine": {"num_threads": 5}}, 6.0, 5),
    ],
)
def test_a_worker_under_a_cpu_quota_has_its_share_of_it_as_threads(
    settings: dict[str, dict[str, int]], quota: float | None, num_threads: int | None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(cores_module, "cpu_quota", lambda: quota)
    monkeypatch.setattr(cores_module, "usable_cores", lambda: 6)
    assert within_quota(settings_from(settings), 2).engine.num_threads == num_threads
