"""Ready-made profiles: what the files hold is what the figures give, and the curve tells NVIDIA's table again."""

from dataclasses import replace
from pathlib import Path

import pytest

from kvrelay.cluster.profiles.profile import load_profile
from kvrelay.cluster.profiles.published import (
    _LENGTHS,
    BUILDS,
    LLAMA_8B,
    LLAMA_70B,
    find_profile,
    published_profile,
    saturated_tokens_per_s,
)
from kvrelay.errors import ConfigError

pytestmark = pytest.mark.pure


FOLDER = Path(__file__).resolve().parents[3] / "configs" / "profiles"
TABLED = [name for name, build in BUILDS.items() if build.table and build.pool_tokens is None]


def worst_error(profile, build):
    return max(
        abs(saturated_tokens_per_s(profile, *lengths) / told - 1)
        for lengths, told in zip(_LENGTHS, build.table, strict=True)
    )


@pytest.mark.parametrize("name", BUILDS)
def test_the_file_is_what_the_figures_give(name):
    assert load_profile(FOLDER / f"{name}.json") == published_profile(name)


def test_no_file_is_left_over():
    assert {path.stem for path in FOLDER.iterdir()} == set(BUILDS)


@pytest.mark.parametrize("name", TABLED)
def test_the_curve_tells_the_throughput_table_again(name):
    profile = published_profile(name)
    assert worst_error(profile, BUILDS[name]) < 0.13
    assert profile.fit is not None and profile.fit.errors["throughput"].median < 0.03


@pytest.mark.parametrize("field", ["token_s", "context_s", "sequence_s"])
def test_another_curve_does_not(field):
    profile = published_profile("llama-3.1-70b-h100x8-fp8")
    wrong = replace(profile.decode, **{field: 3 * getattr(profile.decode, field)})
    assert worst_error(profile.model_copy(update={"decode": wrong}), BUILDS[profile.name]) > 0.13


def test_shapes_count_what_the_models_have():
    assert LLAMA_8B.linear_params + LLAMA_8B.vocab * LLAMA_8B.hidden == pytest.approx(LLAMA_8B.num_params, rel=1e-3)
    assert LLAMA_70B.linear_params + LLAMA_70B.vocab * LLAMA_70B.hidden == pytest.approx(LLAMA_70B.num_params, rel=1e-3)
    assert LLAMA_70B.kv_bytes_per_token(2) == 327_680


def test_the_small_pool_is_the_setting_of_the_policies_comparison():
    assert find_profile("llama-70b-a800x8-mooncake").pool_tokens == 500_000


def test_profiles_are_found_by_name_and_by_file(tmp_path):
    profile = find_profile("llama-3.1-8b-h100-fp8")
    path = tmp_path / "own.json"
    path.write_text(profile.text())
    assert find_profile(str(path)) == profile
    with pytest.raises(ConfigError, match=r"no ready-made profile llama-3\.1-9b; there are llama-3\.1-8b-h100-fp8"):
        find_profile("llama-3.1-9b")
    with pytest.raises(ConfigError, match=r"nowhere\.json"):
        find_profile("nowhere.json")
