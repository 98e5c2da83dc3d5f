"""A SpeedCurve from measured steps: non-negative least squares on relative errors. Pure.

The curve's one kink, where multiplying tokens takes longer than reading the weights, is a number of tokens K: below it
a step takes weights_s = K * token_s for its products, above it token_s for each token. With K given, all else is
linear; K is searched. Never imports torch, Ray, a clock or a random source.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from kvrelay.errors import ConfigError
from kvrelay.router.planning.types import SpeedCurve, StepWork

Floats = NDArray[np.float64]

MIN_SAMPLES = 8
PREFILL, DECODE, MIXED = "prefill", "decode", "mixed"
_KINKS_PER_OCTAVE = 8
_ROUNDS = 4  # of down-weighting outliers
_OUTLIER = 0.1  # relative error from which a sample counts linearly instead of squared


@dataclass(frozen=True, slots=True)
class StepSample:
    """What a step computed and how long it took."""

    work: StepWork
    seconds: float

    @property
    def kind(self) -> str:
        if not self.work.sequences:
            return PREFILL
        return MIXED if self.work.prompt_tokens else DECODE


@dataclass(frozen=True, slots=True)
class KindError:
    """|predicted / measured - 1| over the samples of one kind of step."""

    num_samples: int
    median: float
    p90: float


@dataclass(frozen=True, slots=True)
class Fitted:
    curve: SpeedCurve
    errors: dict[str, KindError]


def fit_curve(samples: Sequence[StepSample]) -> Fitted:
    """The curve with the least relative errors, outliers down-weighted.

    Raises ConfigError: too few samples, or none took time.
    """
    if len(samples) < MIN_SAMPLES:
        raise ConfigError(f"a speed curve needs at least {MIN_SAMPLES} measured steps, not {len(samples)}")
    if any(not 0 < sample.seconds < math.inf for sample in samples):
        raise ConfigError("a measured step took no time, or for ever")
    most_tokens = max(sample.work.prompt_tokens + sample.work.sequences for sample in samples)
    curve = _best(samples, np.ones(len(samples)), _kinks(most_tokens))
    for _ in range(_ROUNDS):
        weights = 1 / np.maximum(1.0, _errors(curve, samples) / _OUTLIER)
        curve = _best(samples, weights, _kinks_near(curve.weights_s / curve.token_s if curve.token_s else 1.0))
    return Fitted(curve, errors_of(curve, samples))


def errors_of(curve: SpeedCurve, samples: Sequence[StepSample]) -> dict[str, KindError]:
    """A curve's error on measured steps, by kind; kinds without samples are left out."""
    found: dict[str, KindError] = {}
    for kind in (PREFILL, DECODE, MIXED):
        chosen = [sample for sample in samples if sample.kind == kind]
        if chosen:
            errors = _errors(curve, chosen)
            found[kind] = KindError(len(chosen), float(np.median(errors)), float(np.quantile(errors, 0.9)))
    return found


def _errors(curve: SpeedCurve, samples: Sequence[StepSample]) -> Floats:
    return np.array([abs(curve.step_s(sample.work) / sample.seconds - 1) for sample in samples])


def _best(samples: Sequence[StepSample], weights: Floats, kinks: Sequence[float]) -> SpeedCurve:
    """Over these places of the kink, in tokens; among equals, the first."""
    tokens = np.array([sample.work.prompt_tokens + sample.work.sequences for sample in samples], dtype=np.float64)
    seconds = np.array([sample.seconds for sample in samples])
    others = np.array(
        [(1.0, sample.work.prompt_pairs, sample.work.context_tokens, sample.work.sequences) for sample in samples]
    )
    scale = (np.sqrt(weights) / seconds)[:, None]
    target = np.sqrt(weights)
    best: tuple[float, float, Floats] | None = None
    for kink in kinks:
        features = np.column_stack((others, np.maximum(kink, tokens)))
        found = _non_negative(features * scale, target)
        loss = float(np.square(features * scale @ found - target).sum())
        if best is None or loss < best[0] * (1 - 1e-9):
            best = (loss, kink, found)
    assert best is not None
    _, kink, (overhead, pair, context, sequence, token) = best
    return SpeedCurve(
        overhead_s=float(overhead),
        weights_s=float(kink * token),
        token_s=float(token),
        pair_s=float(pair),
        context_s=float(context),
        sequence_s=float(sequence),
    )


def _kinks(most_tokens: float) -> list[float]:
    """None, for lack of weights to read, then ever larger."""
    octaves = max(1, math.ceil(math.log2(max(most_tokens, 2))))
    return [0.0, *(2 ** (step / _KINKS_PER_OCTAVE) for step in range(octaves * _KINKS_PER_OCTAVE))]


def _kinks_near(kink: float) -> list[float]:
    """None, and half an octave around one, ever larger."""
    steps = range(-_KINKS_PER_OCTAVE // 2, _KINKS_PER_OCTAVE // 2 + 1)
    return [0.0, *(kink * 2 ** (step / _KINKS_PER_OCTAVE) for step in steps)]


def _non_negative(features: Floats, target: Floats) -> Floats:
    """Least squares with coefficients at or above 0, exactly: the best of all sets of columns whose solution is.

    Of five columns there are 31 sets; the optimum is the plain solution of one of them.
    """
    norms = np.linalg.norm(features, axis=0)
    usable = [index for index in range(features.shape[1]) if norms[index] > 0]
    scaled = features / np.where(norms > 0, norms, 1.0)
    products, wanted = scaled.T @ scaled, scaled.T @ target
    best, best_gain = np.zeros(features.shape[1]), 0.0
    for size in range(1, len(usable) + 1):
        for chosen in combinations(usable, size):
            columns = list(chosen)
            try:
                solved = np.linalg.solve(products[np.ix_(columns, columns)], wanted[columns])
            except np.linalg.LinAlgError:  # two columns are collinear: a smaller set suffices
                continue
            if (solved < 0).any() or not np.isfinite(solved).all():
                continue
            gain = float(2 * solved @ wanted[columns] - solved @ products[np.ix_(columns, columns)] @ solved)
            if gain > best_gain + 1e-12:
                best_gain = gain
                best = np.zeros(features.shape[1])
                best[columns] = solved / norms[columns]
    return best
