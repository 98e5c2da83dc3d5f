"""A profile's file: what is written reads back, and what cannot be is refused by name."""

import json

import pytest

from kvrelay.cluster.profiles.profile import SimulatorProfile, load_profile, parse_profile
from kvrelay.errors import ConfigError
from kvrelay.router.planning.types import SpeedCurve

pytestmark = pytest.mark.pure


CURVE = {"overhead_s": 0.001, "weights_s": 0.02, "token_s": 1e-4, "pair_s": 1e-9, "context_s": 1e-8}
FIELDS = {
    "name": "test",
    "source": [{"constant": "weights", "value": 7e10, "unit": "bytes", "origin": "a datasheet"}],
    "prefill": CURVE,
    "decode": CURVE | {"sequence_s": 1e-5},
    "block_size": 16,
    "num_blocks": 1000,
    "tier_blocks": {"host": 64},
    "token_budget": 512,
    "max_running": 64,
    "max_model_len": 8192,
    "kv_bytes_per_token": 1024,
    "link_bytes_per_s": 1e9,
    "local_bytes_per_s": 8e9,
    "load_bytes_per_s": {"host": 5e9},
}


def parsed(**changes):
    return parse_profile(json.dumps(FIELDS | changes), "test.json")


def test_what_is_written_reads_back():
    profile = parsed()
    assert profile.prefill == SpeedCurve(0.001, 0.02, 1e-4, 1e-9, 1e-8)
    assert profile.decode.sequence_s == 1e-5
    assert parse_profile(profile.text(), "again") == profile


def test_a_file_is_read(tmp_path):
    path = tmp_path / "p.json"
    path.write_text(parsed().text())
    assert load_profile(path) == parsed()
    with pytest.raises(ConfigError, match="missing"):
        load_profile(tmp_path / "missing.json")


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"num_blocks": 0}, "num_blocks"),
        ({"num_block": 5}, "did you mean num_blocks"),
        ({"prefill": CURVE | {"token_s": -1.0}}, "prefill.token_s"),
        ({"decode": CURVE | {"weight_s": 1.0}}, "did you mean decode.weights_s"),
        ({"prefill": CURVE | {"weights_s": 0, "token_s": 0}}, "no time"),
        ({"max_running": 513}, "above token_budget"),
        ({"tier_blocks": {"disk": 4}}, "load_bytes_per_s does not"),
        ({"load_bytes_per_s": {"tape": 1e6}, "tier_blocks": {}}, "load_bytes_per_s.tape"),
        ({"link_bytes_per_s": float("nan")}, "NaN is no number"),
        ({"source": [{"constant": "x", "value": 1}]}, "source.0.origin"),
    ],
)
def test_what_cannot_be_is_refused_by_name(changes, problem):
    with pytest.raises(ConfigError, match=problem) as refusal:
        parsed(**changes)
    assert str(refusal.value).startswith("test.json")


def test_other_blocks_hold_the_same_memory():
    profile = parsed().with_block_size(512)
    assert (profile.num_blocks, profile.tier_blocks) == (31, {"host": 2})
    assert isinstance(profile, SimulatorProfile) and profile.prefill == parsed().prefill
    assert parsed().with_block_size(16) == parsed()
