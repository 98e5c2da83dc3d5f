"""The rows of latent KV: they hold over a real transport, and each can fail."""

import dataclasses

import pytest

from kvrelay.cluster.verify import suites
from kvrelay.cluster.verify.cli import LATENT_FAMILY
from kvrelay.cluster.verify.prompts import latent_prompts
from kvrelay.cluster.verify.rows import run_setup
from kvrelay.cluster.verify.suites import is_latent_layout
from kvrelay.cluster.verify.verifier import Verifier
from kvrelay.engine.checkpoints.tiny import TINY_CONFIGS, tiny_checkpoint
from kvrelay.engine.models.spec import ModelSpec
from kvrelay.types import KvLayout

SPEC = ModelSpec.from_config(TINY_CONFIGS[LATENT_FAMILY])
LAYOUT = KvLayout(4, 8, 16, 1, SPEC.head_dim, "float32", is_latent=True)


def tiny_verifier(tmp_path):
    folder = tiny_checkpoint(LATENT_FAMILY, tmp_path / "model")
    return Verifier(folder, max_model_len=256, num_output=8, prompts=latent_prompts())


@pytest.mark.slow
async def test_latent_blocks_are_transferred_whole_and_both_parts_matter(tmp_path):
    verifier = tiny_verifier(tmp_path)
    tiny = verifier.of_family(LATENT_FAMILY, tmp_path / "tiny")
    for setup in suites.latent(tiny, "tcp"):
        await run_setup(tiny, setup)
    assert [(row.name, row.note) for row in verifier.report.rows if not row.ok] == []
    assert [row.name for row in verifier.report.rows] == [
        "MLA layout (tcp)",
        "MLA: changed rotary parts refused",
        "MLA: changed rotary parts with checks off change the answer",
        "MLA: changed latents with checks off change the answer",
    ]


@pytest.mark.slow
async def test_every_row_of_latent_kv_can_fail(tmp_path, monkeypatch):
    monkeypatch.setattr(suites.steer, "negate_entries", lambda start, end: lambda region, layout: None)
    verifier = tiny_verifier(tmp_path)
    verifier.expected = {prompt.name: [5] * 8 for prompt in verifier.prompts}
    await run_setup(verifier, suites.latent(verifier, "tcp")[0])
    layout, refused = verifier.report.rows
    assert (layout.passed, layout.total, layout.note) == (3, 7, "1 token: token 0 differs")
    assert not refused.ok and "answered with 8 tokens" in refused.note


@pytest.mark.parametrize(
    "change", [{"is_latent": False}, {"head_dim": 32}, {"num_layers": 3}, {"is_latent": False, "head_dim": 24}]
)
def test_only_one_vector_per_token_of_latent_and_rotary_part_is_a_latent_layout(change):
    assert is_latent_layout(LAYOUT, SPEC, SPEC.latent)
    assert not is_latent_layout(dataclasses.replace(LAYOUT, **change), SPEC, SPEC.latent)
