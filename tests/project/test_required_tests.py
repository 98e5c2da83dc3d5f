"""With KVRELAY_REQUIRE a test that would be skipped for want of something that must be there fails."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

ROOT = Path(__file__).resolve().parents[2]
TESTS = {
    "test_one.py": """
import pytest

@pytest.fixture
def hosts():
    pytest.skip("no Hosts here: no root")

def test_of_hosts(hosts): pass

def test_of_a_gpu(): pytest.skip("needs a GPU")

@pytest.mark.xfail
def test_that_fails_as_expected(): raise ValueError("no hosts")

def test_of_nothing(): pass
""",
    "test_whole.py": "import pytest; pytest.importorskip('no_such_module', reason='prometheus is not installed')",
}


@pytest.mark.parametrize(
    ("required", "outcome"),
    [("", "1 passed, 3 skipped, 1 xfailed"), ("hosts,prometheus", "1 passed, 1 skipped, 1 xfailed, 2 errors")],
)
def test_a_skip_for_a_required_thing_fails_and_others_stay(tmp_path, required, outcome):
    for name, text in TESTS.items():
        (tmp_path / name).write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "tests.conftest", "--continue-on-collection-errors", tmp_path],
        env=os.environ | {"KVRELAY_REQUIRE": required, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert outcome in done.stdout, done.stdout + done.stderr
    assert ("does not let this test be skipped: Skipped: no Hosts here: no root" in done.stdout) is bool(required)
    assert ("does not let this test be skipped: Skipped: prometheus is not" in done.stdout) is bool(required)
