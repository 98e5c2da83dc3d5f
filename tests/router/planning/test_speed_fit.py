"""A curve that made the samples is found again; noise and outliers move it little; nonsense is refused."""

import random
from dataclasses import astuple, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.errors import ConfigError
from kvrelay.router.planning.speed_fit import MIN_SAMPLES, StepSample, _non_negative, errors_of, fit_curve
from kvrelay.router.planning.types import SpeedCurve, StepWork

pytestmark = pytest.mark.pure


CPU = SpeedCurve(overhead_s=2e-3, weights_s=9e-3, token_s=3e-4, pair_s=1.5e-7, context_s=6e-7, sequence_s=4e-4)


def works():
    """Of all kinds: decoding, chunks, and both."""
    decode = [
        StepWork(sequences=count, context_tokens=count * context)
        for count in (1, 2, 4, 8, 16, 32, 64)
        for context in (64, 512, 2048)
    ]
    chunks = [
        StepWork(prompt_tokens=size, prompt_pairs=size * start + size * (size + 1) // 2)
        for size in (16, 64, 128, 256, 512)
        for start in (0, 512, 2048)
    ]
    mixed = [
        StepWork(chunk.prompt_tokens, chunk.prompt_pairs, some.sequences, some.context_tokens)
        for chunk in chunks[::4]
        for some in decode[::5]
    ]
    return decode + chunks + mixed


def samples(curve, factor=lambda: 1.0):
    return [StepSample(work, curve.step_s(work) * factor()) for work in works()]


def test_the_curve_that_made_the_samples_is_found_again():
    found = fit_curve(samples(CPU))
    assert astuple(found.curve) == pytest.approx(astuple(CPU), rel=0.15)
    assert set(found.errors) == {"prefill", "decode", "mixed"}
    assert max(error.p90 for error in found.errors.values()) < 0.03


seconds = st.floats(1e-6, 1e-1)


@settings(max_examples=12, deadline=None)
@given(
    st.builds(
        SpeedCurve, seconds, seconds, st.floats(1e-6, 1e-3), st.floats(0, 1e-7), st.floats(0, 1e-6), st.floats(0, 1e-3)
    )
)
def test_any_curve_is_told_again_within_a_few_percent(curve):
    found = fit_curve(samples(curve))
    assert max(error.p90 for error in found.errors.values()) < 0.05
    assert min(astuple(found.curve)) >= 0


def test_noise_and_a_few_outliers_move_it_little():
    draw = random.Random(1)
    noisy = samples(CPU, lambda: draw.uniform(0.95, 1.05) * (5.0 if draw.random() < 0.06 else 1.0))
    assert any(sample.seconds > 3 * CPU.step_s(sample.work) for sample in noisy)
    found = fit_curve(noisy)
    errors = errors_of(found.curve, samples(CPU))
    assert max(error.median for error in errors.values()) < 0.05


def test_errors_are_those_of_the_curve_that_is_asked():
    slow = replace(CPU, overhead_s=CPU.overhead_s + 0.05)
    assert errors_of(CPU, samples(CPU))["decode"].median == 0
    assert errors_of(slow, samples(CPU))["decode"].median > 0.5


def test_kinds_that_were_not_measured_have_no_error():
    decode = [sample for sample in samples(CPU) if sample.kind == "decode"]
    found = fit_curve(decode)
    assert set(found.errors) == {"decode"} and found.errors["decode"].num_samples == len(decode)
    assert found.curve.pair_s == 0


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000))
def test_non_negative_squares_are_at_their_optimum(seed):
    """Karush-Kuhn-Tucker: no slope where a coefficient is, none downhill where there is none."""
    draw = np.random.default_rng(seed)
    features, target = draw.normal(size=(12, 5)), draw.normal(size=12)
    found = _non_negative(features, target)
    slope = features.T @ (features @ found - target)
    assert (found >= 0).all()
    assert np.abs(slope[found > 0]).max(initial=0.0) < 1e-6
    assert slope[found == 0].min(initial=0.0) > -1e-6


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_a_step_without_a_duration_is_refused(bad):
    broken = [*samples(CPU), StepSample(StepWork(sequences=1), bad)]
    with pytest.raises(ConfigError, match="took no time"):
        fit_curve(broken)


def test_too_few_samples_are_refused():
    with pytest.raises(ConfigError, match=f"at least {MIN_SAMPLES}"):
        fit_curve(samples(CPU)[: MIN_SAMPLES - 1])
