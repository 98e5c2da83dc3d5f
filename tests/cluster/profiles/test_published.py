"""Ready-made profiles: every file is valid, states its sources, and its curve reproduces NVIDIA's throughput table."""

from dataclasses import replace

import pytest

from kvrelay.cluster.profiles.profile import PUBLISHED, find_profile, load_profile, published_profile
from kvrelay.errors import ConfigError

pytestmark = pytest.mark.pure

TABLE_RUNNING = 2048  # max_batch_size of the table's runs
LENGTHS = (
    (128, 128),
    (128, 2048),
    (128, 4096),
    (500, 2000),
    (1000, 1000),
    (2048, 128),
    (2048, 2048),
    (5000, 500),
    (20000, 2000),
)
TABLE = {
    "llama-3.1-8b-h100-fp8": (28836.77, 21109.38, 13593.65, 16500.69, 15244.78, 3556.73, 9488.42, 3559.36, 1401.31),
    "llama-3.1-70b-h100x8-fp8": (14730.69, 17061.82, 14171.43, 14679.33, 11451.16, 1923.41, 8801.95, 2457.42, 1512.6),
    "llama-3.1-8b-a100-fp16": (6627.27, 5255.99, 3453.79, 4276.58, 3786.83, 799.61, 2424.16, 825.13, 330.04),
    "llama-3.1-70b-a100x8-fp16": (4717.62, 5241.5, 3724.67, 4445.37, 3320.41, 542.38, 2553.71, 696.34, 413.38),
}
"""Output tokens per second at each of LENGTHS (input, output). Source: NVIDIA/TensorRT-LLM
docs/source/performance/perf-overview.md at commit 258c7540c03517def55d9a5aadfa9288af474e1b (version 0.17)."""
NAMES = sorted(path.stem for path in PUBLISHED.iterdir())


def saturated_tokens_per_s(profile, input_tokens, output_tokens):
    """Output tokens per second of one worker that prefills and decodes, with requests always waiting.

    Each request costs its prompt and its share of the steps that it decodes in; the batch is what the pool holds at
    half-grown sequences.
    """
    curve, context = profile.decode, input_tokens + output_tokens / 2
    batch = min(TABLE_RUNNING, profile.pool_tokens / context)
    prompt_s = input_tokens * curve.token_s + input_tokens**2 / 2 * curve.pair_s
    step_s = curve.overhead_s + max(curve.weights_s, batch * curve.token_s)
    step_s += batch * (context * curve.context_s + curve.sequence_s)
    return output_tokens / (prompt_s + output_tokens * step_s / batch)


def errors(profile, table):
    pairs = zip(LENGTHS, table, strict=True)
    return sorted(abs(saturated_tokens_per_s(profile, *lengths) / published - 1) for lengths, published in pairs)


@pytest.mark.parametrize("name", NAMES)
def test_every_file_is_a_profile_of_its_name_with_a_source_for_each_constant(name):
    profile = load_profile(PUBLISHED / f"{name}.json")
    assert profile.name == name and profile == published_profile(name)
    assert len(profile.source) >= 16 and all(source.origin for source in profile.source)


@pytest.mark.parametrize("name", TABLE)
def test_the_curve_reproduces_the_throughput_table(name):
    profile = published_profile(name)
    found = errors(profile, TABLE[name])
    assert found[-1] < 0.13
    stated = profile.fit.errors["throughput"]
    assert stated.median == pytest.approx(found[len(found) // 2], rel=1e-3) and stated.median < 0.03


@pytest.mark.parametrize("field", ["token_s", "context_s", "sequence_s"])
def test_another_curve_does_not(field):
    profile = published_profile("llama-3.1-70b-h100x8-fp8")
    wrong = replace(profile.decode, **{field: 3 * getattr(profile.decode, field)})
    assert errors(profile.model_copy(update={"decode": wrong}), TABLE[profile.name])[-1] > 0.13


def test_the_small_pool_is_the_setting_of_the_policies_comparison():
    assert find_profile("llama-70b-a800x8-mooncake").pool_tokens == 500_000


def test_profiles_are_found_by_name_and_by_file(tmp_path):
    profile = find_profile("llama-3.1-8b-h100-fp8")
    path = tmp_path / "own.json"
    path.write_text(profile.text())
    assert find_profile(str(path)) == profile
    with pytest.raises(ConfigError, match=r"no ready-made profile llama-3\.1-9b; there are .*llama-3\.1-8b-h100-fp8"):
        find_profile("llama-3.1-9b")
    with pytest.raises(ConfigError, match=r"nowhere\.json"):
        find_profile("nowhere.json")
