"""The Triton sampler in Triton's interpreter draws what the rule draws. Skipped where triton is not installed."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

# In a process of its own: triton decides at its import whether to interpret.
PROGRAM = """
import torch
from kvrelay.kernels.cuda import sampling_triton
from kvrelay.kernels.oracle import reference
from tests.kernels.common.test_sampling_search import drawn, mixture

wrong = []
for seed, (rows, vocab) in enumerate(((4, 31), (4, 1003), (3, 2048), (2, 5003), (4, 31), (3, 257))):
    logits, batch = mixture(seed, rows, vocab)
    if drawn(logits, batch, sampling_triton.draw).tolist() != reference.draw(logits, batch).tolist():
        wrong.append((seed, rows, vocab))
logits, batch = mixture(5, 3, 64)
control = drawn(logits, batch, sampling_triton.draw).tolist() != reference.draw(-logits, batch).tolist()
print("wrong:", wrong, "control:", control)
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_the_token_equals_the_rules_in_the_interpreter():
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "wrong: [] control: True", done.stderr
