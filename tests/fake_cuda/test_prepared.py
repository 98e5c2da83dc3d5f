"""An engine finds every kernel that it runs among the modules that `kvrelay prepare` compiles for its model."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvrelay.cluster.commands import prepare
from kvrelay.cluster.compiling.kernels import Build
from kvrelay.config import load_settings
from tests.fake_cuda import engines

ENGINE = """
import sys
from pathlib import Path
import flashinfer.jit.env
import pytest
import torch
flashinfer.jit.env.FLASHINFER_AOT_DIR = Path(sys.argv[1])
from tests.fake_cuda import engines
engines.patch(pytest.MonkeyPatch())
engine = engines.make(Path(sys.argv[2]))
with engines.decoding(engine, 4) as step:
    engines.add_prompt(engine, 700)
    for _ in range(4):
        step()
if engine.model.spec.latent is None:  # what rows that share a prefix call
    out, lse = (torch.zeros(2, 8, *last, dtype=dtype, device="cuda") for last, dtype in
                (((128,), torch.bfloat16), ((), torch.float32)))
    engine.backend.paged._flashinfer.merge_state_in_place(out, lse, out.clone(), lse.clone())
print("done")
"""


def run(aot: Path, folder: Path):
    """An engine in a process of its own (FlashInfer keeps what it has loaded), in which nothing can be compiled."""
    environment = {**os.environ, "FLASHINFER_DISABLE_JIT": "1"}
    return subprocess.run([sys.executable, "-c", ENGINE, aot, folder], env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("name", ["llama", "deepseek"])
def test_after_prepare_an_engine_compiles_nothing(name, tmp_path):
    folder = engines.folder_of(tmp_path, name)
    settings = load_settings(None, {"model": {"source": str(folder)}})
    modules = [module for module in prepare.gpu_modules(settings) if not module.is_late]
    assert Build(modules, lambda *progress: None).run() == {}
    prepare.copy(modules, tmp_path / "aot")
    found = run(tmp_path / "aot", folder)
    assert found.stdout.endswith("done\n"), found.stderr[-3000:]
    shutil.rmtree(tmp_path / "aot" / "page")  # the control: one that steps load, and no start does
    found = run(tmp_path / "aot", folder)
    assert found.returncode and "JIT compilation is disabled" in found.stderr
