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
import dataclasses
import math
import torch
from kvrelay.kernels.common.token_masks import token_masks_of
from kvrelay.kernels.cuda import sampling_triton
from kvrelay.kernels.oracle import reference
from tests.kernels.cpu.test_token_masks import masked, one_or_more
from tests.kernels.common.test_sampling_search import drawn, mixture

wrong = []
sampling_triton._CHUNK, sampling_triton._SMALL, sizes = 256, 128, (sampling_triton._CHUNK, sampling_triton._SMALL)
for seed, (rows, vocab) in enumerate(((4, 31), (4, 1003), (3, 256), (4, 513), (3, 257))):
    logits, batch = mixture(seed, rows, vocab)
    if drawn(logits, batch, sampling_triton.draw).tolist() != reference.draw(logits, batch).tolist():
        wrong.append(("chunks", seed, rows, vocab))
flat = torch.zeros(3, 1003)  # of equal ones the lowest ids stay, over the edges of chunks
_, batch = mixture(1, 3, 1003)
halves = dataclasses.replace(batch, temperature=torch.ones(3), top_p=torch.tensor([0.5, 0.013, 0.9]))
if drawn(flat, halves, sampling_triton.draw).tolist() != reference.draw(flat, halves).tolist():
    wrong.append("equal ones")
def drawn_masked(logits, batch, allowed, rows):
    batch = masked(batch, allowed, rows)
    draw = lambda *inputs: sampling_triton.draw(*inputs, masks=token_masks_of(batch, logits))
    return drawn(logits, batch, draw).tolist(), reference.draw(logits, batch).tolist()

for seed, (rows, vocab) in enumerate(((4, 31), (3, 1056), (3, 33))):
    logits, batch = mixture(seed, rows, vocab)
    for share in (0.0, 0.5):
        allowed = one_or_more(torch.Generator().manual_seed(seed), 2, vocab, share)
        ours, right = drawn_masked(logits, batch, allowed, [0, 1, -1, 1][:rows])
        if ours != right:
            wrong.append((seed, rows, vocab, share))
    everything = drawn_masked(logits, batch, torch.ones(1, vocab), [0] * rows)[0]
    if everything != drawn(logits, batch, sampling_triton.draw).tolist():
        wrong.append("all allowed")
_, batch = mixture(1, 4, 100)
for worst in (-math.inf, math.nan):
    allowed = torch.zeros(2, 100)
    allowed[0, 70:73] = 1
    ours, _ = drawn_masked(torch.randn(4, 100).masked_fill(allowed[0] > 0, worst), batch, allowed, [0] * 4)
    empty, _ = drawn_masked(torch.randn(4, 100), batch, allowed, [1] * 4)
    if ours != [70] * 4 or not all(0 <= token < 100 for token in empty):
        wrong.append(("no number", ours, empty))
sampling_triton._CHUNK, sampling_triton._SMALL = sizes
for seed, (rows, vocab) in enumerate(((2, 4096), (2, 5003))):
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
