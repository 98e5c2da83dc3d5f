"""How long the local harness waits for a worker: as long as it reports progress."""

import json
import subprocess
import sys

import pytest

from kvrelay.cluster.launch import local
from kvrelay.config import Settings
from kvrelay.errors import WorkerLost

WORKER = """#!{python}
import sys, time
for _ in range({lines}):
    time.sleep(0.1)
    print("starting: compiling kernels: 1 of 9 modules", flush=True)
if not {lines}:
    time.sleep(60)
print('{{"port": 7}}', flush=True)
sys.stdin.read()
"""


@pytest.fixture
def worker(tmp_path, monkeypatch):
    def make(lines):
        path = tmp_path / "worker"
        path.write_text(WORKER.format(python=sys.executable, lines=lines))
        path.chmod(0o755)
        monkeypatch.setattr(local, "START_TIMEOUT_S", 2.0)
        monkeypatch.setattr(local.sys, "executable", str(path))

    return make


async def test_a_worker_that_compiles_is_given_time(worker):
    worker(lines=30)
    process = await local.spawn("prefill", Settings(), b"secret", "prefill-0")
    assert process.answer == {"port": 7}
    await process.aclose()


async def test_a_silent_one_is_given_up(worker):
    worker(lines=0)
    with pytest.raises(WorkerLost, match="ended while starting"):
        await local.spawn("prefill", Settings(), b"secret", "prefill-0")


def test_messages_of_the_build_are_progress_lines(tmp_path):
    """As a worker's process sends them; it ends with an error, for want of a model."""
    config = {"role": "prefill", "settings": Settings().model_dump(), "secret": "", "name": "", "cores": None}
    code = (
        "from kvrelay.cluster.compiling import kernels; from kvrelay.cluster.launch import local\n"
        "kernels.compile_missing = lambda *_: kernels.logger.warning('compiling kernels: 1 of 9')\n"
        "local.main()"
    )
    order = json.dumps(config | {"model_dir": str(tmp_path), "stores": []}) + "\n"
    ran = subprocess.run([sys.executable, "-c", code], input=order, capture_output=True, text=True)
    assert ran.stdout.splitlines()[0] == "starting: compiling kernels: 1 of 9"
    assert "config.json is missing" in json.loads(ran.stdout.splitlines()[1])["error"]
