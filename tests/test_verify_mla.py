"""The rows of latent KV: they pass over a real transport, and each can fail."""

import dataclasses

import pytest

from kvrelay.cluster.local import local_cluster
from kvrelay.cluster.verify import Report, expected_tokens
from kvrelay.cluster.verify_mla import FAMILY, _LatentRows, add_latent_rows, is_latent_layout
from kvrelay.engine.checkpoint_tiny import TINY_CONFIGS, tiny_checkpoint
from kvrelay.engine.spec import ModelSpec
from kvrelay.types import KvLayout

SPEC = ModelSpec.from_config(TINY_CONFIGS[FAMILY])
LAYOUT = KvLayout(4, 8, 16, 1, SPEC.head_dim, "float32", is_latent=True)


@pytest.mark.slow
async def test_latent_blocks_travel_and_both_their_parts_matter(tmp_path):
    report = Report("tiny", [])
    await add_latent_rows(report, tmp_path, "tcp", backend="auto", expect=expected_tokens, progress=lambda what: None)
    found = {row.name: row for row in report.rows}
    assert [(name, row.note) for name, row in found.items() if not row.ok] == []
    assert list(found) == [
        "MLA layout (tcp)",
        "MLA: changed rotary parts refused",
        "MLA: changed rotary parts with checks off change the answer",
        "MLA: changed latents with checks off change the answer",
    ]
    assert found["MLA layout (tcp)"].total == 7


@pytest.mark.slow
async def test_a_wrong_expectation_and_an_unnoticed_change_fail_their_rows(tmp_path):
    report = Report("tiny", [])
    folder = tiny_checkpoint(FAMILY, tmp_path / FAMILY)
    rows = _LatentRows(report, folder, "shm", "auto", lambda folder, prompts, count: [[5] * count for _ in prompts])
    async with local_cluster(rows._settings("full"), folder) as cluster:
        await rows._layout_row(cluster)
        await rows._refused_row(cluster, "rotary parts", lambda entries: None)
    layout, refused = report.rows
    assert (layout.passed, layout.total, layout.note) == (3, 7, "1 token: token 0 differs")
    assert not refused.ok and "answered with 8 tokens" in refused.note


@pytest.mark.parametrize(
    "change", [{"is_latent": False}, {"head_dim": 32}, {"num_layers": 3}, {"is_latent": False, "head_dim": 24}]
)
def test_only_one_vector_per_token_of_latent_and_rotary_part_is_a_latent_layout(change):
    assert is_latent_layout(LAYOUT, SPEC, SPEC.latent)
    assert not is_latent_layout(dataclasses.replace(LAYOUT, **change), SPEC, SPEC.latent)
