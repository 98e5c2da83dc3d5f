"""The rows of latent KV: they pass over a real transport, and each can fail."""

import dataclasses

import pytest

from kvrelay.cluster.verify.mla import FAMILY, _LatentRows, add_latent_rows, is_latent_layout
from kvrelay.cluster.verify.oracle import Report, expected_tokens
from kvrelay.engine.checkpoints.tiny import TINY_CONFIGS
from kvrelay.engine.models.spec import ModelSpec
from kvrelay.types import KvLayout

SPEC = ModelSpec.from_config(TINY_CONFIGS[FAMILY])
LAYOUT = KvLayout(4, 8, 16, 1, SPEC.head_dim, "float32", is_latent=True)


async def controls(rows, report, cluster):
    """Rows that must fail: of wrong expectations, and of a change that changes nothing."""
    expected, rows._report, rows._expected = rows._expected, report, [[5] * 8 for _ in rows._prompts]
    await rows._layout_row(cluster)
    await rows._refused_row(cluster, "nothing", lambda entries: None)
    rows._expected = expected


@pytest.mark.slow
async def test_latent_blocks_travel_both_their_parts_matter_and_every_row_can_fail(tmp_path, monkeypatch):
    report, failed, plain = Report("tiny", []), Report("controls", []), _LatentRows._checked_rows

    async def with_controls(rows, cluster):
        await controls(rows, failed, cluster)
        rows._report = report
        await plain(rows, cluster)

    monkeypatch.setattr(_LatentRows, "_checked_rows", with_controls)
    await add_latent_rows(report, tmp_path, "tcp", backend="auto", expect=expected_tokens, progress=lambda what: None)
    assert [(row.name, row.note) for row in report.rows if not row.ok] == []
    assert [row.name for row in report.rows] == [
        "MLA layout (tcp)",
        "MLA: changed rotary parts refused",
        "MLA: changed rotary parts with checks off change the answer",
        "MLA: changed latents with checks off change the answer",
    ]
    layout, refused = failed.rows
    assert (layout.passed, layout.total, layout.note) == (3, 7, "1 token: token 0 differs")
    assert not refused.ok and "answered with 8 tokens" in refused.note


@pytest.mark.parametrize(
    "change", [{"is_latent": False}, {"head_dim": 32}, {"num_layers": 3}, {"is_latent": False, "head_dim": 24}]
)
def test_only_one_vector_per_token_of_latent_and_rotary_part_is_a_latent_layout(change):
    assert is_latent_layout(LAYOUT, SPEC, SPEC.latent)
    assert not is_latent_layout(dataclasses.replace(LAYOUT, **change), SPEC, SPEC.latent)
