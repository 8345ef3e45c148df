"""Each method against recorded results of mergekit (mergekit.json, by mergekit_peer.py), and what each must hold."""

from __future__ import annotations

import itertools
import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from capibara import config
from capibara.consensus.merging import METHODS
from capibara.consensus.merging.method import Floors
from capibara.consensus.merging.sparsify import Rescale
from capibara.core.types import UserError

HERE = pathlib.Path(__file__).resolve().parent
sys.path.append(str(HERE))
import merge_cases as cases  # noqa: E402

PYTHON = os.environ.get("MERGEKIT_PYTHON")
TOLERANCE = 1e-5


def of_mergekit(method, **settings):
    """The method with mergekit's bounds, if it has any."""
    fields = METHODS[method].__dataclass_fields__
    return METHODS[method](**settings, **({"floors": Floors.MERGEKIT} if "floors" in fields else {}))


def check(answers):
    for case, (method, settings, _, count, has_base) in cases.CASES.items():
        published, mergekits = METHODS[method](**settings), of_mergekit(method, **settings)
        published.check(count, has_base=has_base)
        for shape, scale in itertools.product(cases.SHAPES, cases.SCALES):
            base, *models = cases.tensors(shape, scale)
            want = answers[str(scale)][case][shape]
            for made in (published, mergekits) if scale == 1 else (mergekits,):
                got = made.merge(models[:count], base if has_base else None, cases.uniform(shape))
                assert got.dtype == np.float32 and got.shape == cases.SHAPES[shape], case
                message = f"{case}, {shape}, {scale}"
                np.testing.assert_allclose(got.reshape(-1), want, rtol=0, atol=TOLERANCE * scale, err_msg=message)


def test_every_method_gives_what_mergekit_gave():
    assert {case[0] for case in cases.CASES.values()} == {*METHODS} - {"moe"}  # which has a program of its own there
    check(json.loads((HERE / "mergekit.json").read_text()))


@pytest.mark.heavy
@pytest.mark.skipif(not PYTHON, reason="MERGEKIT_PYTHON names no python with mergekit")
def test_every_method_gives_what_mergekit_gives():
    done = subprocess.run([PYTHON, str(HERE / "mergekit_peer.py")], capture_output=True, text=True, check=True)
    check(json.loads(done.stdout))


def models(count=2, size=400):
    draw = np.random.default_rng(1)
    base = draw.standard_normal((20, size // 20), np.float32)
    return base, [base + np.float32(0.1) * draw.standard_normal(base.shape, np.float32) for _ in range(count)]


@pytest.mark.parametrize("method", ["dare_linear", "della_linear"])
def test_random_masks_are_right_in_the_mean(method):
    """The mean over masks is the unmasked sum, with rescaling by probability."""
    base, given = models()
    made = METHODS[method](density=(0.4,), rescale=Rescale.PROBABILITY)
    count = 1500
    mean = np.mean([made.merge(given, base, np.random.default_rng(seed)) - base for seed in range(count)], axis=0)
    whole = sum(x - base for x in given)
    spread = np.sqrt(sum(np.square(x - base) for x in given) * 3 / count)  # (1 - p) / p, p is at least 0.25
    assert (np.abs(mean - whole) < 5.5 * spread).all()
    kept = made.merge(given[:1], base, np.random.default_rng(0)) != base
    assert abs(kept.mean() - 0.4) < 0.1


def test_larger_values_of_a_row_are_kept_more_often_by_della():
    base = np.zeros((1, 10), np.float32)
    given = np.arange(1, 11, dtype=np.float32).reshape(1, 10)
    made = METHODS["della_linear"](density=(0.5,), spread=0.4, rescale=Rescale.NONE)
    kept = np.mean([made.merge([given], base, np.random.default_rng(seed)) != 0 for seed in range(600)], axis=0)[0]
    np.testing.assert_allclose(kept, np.linspace(0.1, 0.9, 10), atol=0.08)


@pytest.mark.parametrize("size", [1e6, 1.0, 1e-4, 1e-8, 1e-12])
@pytest.mark.parametrize("name", METHODS)
def test_equal_models_stay_as_they_are(name, size):
    """At any norm of what was learned: the base is 0, so that the sums themselves round nothing away."""
    cls = METHODS[name]
    one = models()[1][0]
    one = one * np.float32(size / np.linalg.norm(one))
    if cls.base == "required" and name not in ("model_stock", "sce"):
        made = cls(normalize=True, **({"density": (1.0,)} if "density" in cls.__dataclass_fields__ else {}))
    else:
        made = cls()
    merges_base = cls.base != "unused" and name != "moe"  # whose base takes the place of the mean
    for count in {cls.most} if cls.most else {2, 3, 5}:
        got = made.merge([one] * count, np.zeros_like(one) if merges_base else None, np.random.default_rng(0))
        np.testing.assert_allclose(got, one, rtol=2e-6, atol=0, err_msg=f"{name}, {count}")


SETTINGS = [
    (METHODS[name], settings)
    for name, several in {
        **dict.fromkeys(METHODS, [{}]),
        "slerp": [{"t": 0.3}],
        "nuslerp": [{"weights": (1.0, 3.0)}, {"along": "rows"}, {"along": "columns"}],
        "multislerp": [{"weights": (1.0, 0.5, 2.0)}, {"normalize": False}],
        "karcher": [{"weights": (1.0, 0.5, 2.0)}],
        "ties": [{"density": (0.5, 0.7, 0.3)}, {"weights": (1.0, -0.5, 2.0)}],
        "dare_linear": [{"rescale": "norm"}, {"rescale": "probability"}, {"normalize": True}],
        "della": [{"rescale": "norm"}, {"rescale": "probability"}],
        "sce": [{}, {"density": 0.6}],
        "model_stock": [{}, {"by_row": True}],
    }.items()
    for settings in several
]
FACTORS = (1e-20, 1e-12, 1e-9, 1e-7, 1e-6, 1e-4, 1e-3, 1e3, 1e6)


BINARY = [
    2.0**power for power in (-40, -30, -23, -20, -13, -10, 10, 20)
]  # round nothing, so that equal values stay equal


@pytest.mark.parametrize(("cls", "settings"), SETTINGS, ids=lambda value: getattr(value, "name", str(value)))
def test_a_multiple_of_models_gives_that_multiple(cls, settings):
    made, draw, count = cls(**settings), np.random.default_rng(5), cls.most or 3
    for number, shape in enumerate([(5, 4), (7,), (6, 3), (1, 8)] * 4):
        base = draw.standard_normal(shape, np.float32)
        # Exact in float32, with any base, and some of them 0 or equal.
        offsets = np.round(draw.standard_normal((count, *shape)) * 64) / 256 * (draw.random((count, *shape)) < 0.8)
        offsets *= np.array([2.0**-power for power in range(count)]).reshape(-1, *[1] * len(shape))
        base = np.round(base * 256) / 256
        given = [(base + offset).astype(np.float32) for offset in offsets]
        has_base = cls.base == "required" or cls.base == "optional" and number % 2
        want = made.merge(given, base if has_base else None, np.random.default_rng(number))
        assert np.isfinite(want).all()
        for factor in BINARY:
            scaled = [np.float32(factor) * x for x in given]
            got = made.merge(scaled, np.float32(factor) * base if has_base else None, np.random.default_rng(number))
            close = 3e-6 * np.abs(want).max()
            np.testing.assert_allclose(got / np.float32(factor), want, rtol=0, atol=close, err_msg=f"{shape} {factor}")


@pytest.mark.parametrize(("cls", "settings"), SETTINGS, ids=lambda value: getattr(value, "name", str(value)))
def test_small_offsets_are_merged_as_large_ones_are(cls, settings):
    """Of a base of 0; and where nothing was learned the base remains."""
    if cls.base == "unused" or cls.name == "moe":
        pytest.skip("has no offsets")
    made, (base, given), count = cls(**settings), models(3, 60), cls.most or 3
    offsets, zero = [x - base for x in given[:count]], np.zeros_like(base)
    want = made.merge(offsets, zero, np.random.default_rng(1))
    for factor in FACTORS:
        got = made.merge([np.float32(factor) * x for x in offsets], zero, np.random.default_rng(1))
        close = 3e-6 * np.abs(want).max()
        np.testing.assert_allclose(got / np.float32(factor), want, rtol=0, atol=close, err_msg=str(factor))
        scaled = np.float32(factor) * base
        np.testing.assert_array_equal(made.merge([scaled] * count, scaled, np.random.default_rng(1)), scaled)


def shoemake(t, a, b):
    """In float64: sin((1 - t) w) / sin w of one, and sin(t w) / sin w of the other."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    unit_a, unit_b = a / np.linalg.norm(a), b / np.linalg.norm(b)
    angle = 2 * np.arctan2(np.linalg.norm(unit_a - unit_b), np.linalg.norm(unit_a + unit_b))
    return (np.sin((1 - t) * angle) * a + np.sin(t * angle) * b) / np.sin(angle)


@pytest.mark.parametrize("angle", [1e-5, 1e-3, 0.02, 0.03, 0.5, 1.5, 3.1, 3.12, 3.141])
def test_slerp_is_shoemakes_at_any_angle(angle):
    one, other = np.zeros(8, np.float32), np.zeros(8, np.float32)
    one[0], other[:2] = 3.0, (2 * np.cos(angle), 2 * np.sin(angle))
    for t in (0.1, 0.5, 0.8):
        for name, settings in (("slerp", {"t": t}), ("nuslerp", {"weights": (1 - t, t)})):
            got = METHODS[name](**settings).merge([one, other], None, np.random.default_rng(0))
            want = shoemake(t, one, other)
            np.testing.assert_allclose(got, want, rtol=0, atol=1e-6 * max(1, np.abs(want).max() / np.sin(angle)))
    straight = METHODS["slerp"](t=0.5, floors="mergekit").merge([one, other], None, np.random.default_rng(0))
    is_straight = np.array_equal(straight, 0.5 * one + 0.5 * other)
    assert is_straight == (abs(np.cos(angle)) > 0.9995)


def test_one_model_alone_with_its_sign_counts_whole_however_small_its_weight():
    base, down, up = np.zeros(3, np.float32), np.array([0, -1, 1], np.float32), np.array([3, 0, 0], np.float32)
    for weight in (1e-3, 1e-9):
        got = METHODS["ties"](weights=(1.0, weight), density=(1.0,)).merge([down, up], base, np.random.default_rng(0))
        np.testing.assert_allclose(got, [3, -1, 1], rtol=1e-6)
    # sce weighs by energy, and divides by the weights of those that agree.
    small = np.float32(1e-4) * up
    got = METHODS["sce"]().merge([down, small], base, np.random.default_rng(0))
    np.testing.assert_allclose(got, [3e-4, -1, 1], rtol=1e-6)
    its = METHODS["sce"](floors="mergekit").merge([down, small], base, np.random.default_rng(0))
    np.testing.assert_allclose(its, [3e-4 * 9e-8 / 2 / 1e-6, -1, 1], rtol=1e-3)


def test_tensors_of_zeros_and_of_one_value_are_merged():
    for name, cls in METHODS.items():
        for value in (
            np.zeros((3, 2), np.float32),
            np.zeros(1, np.float32),
            np.ones(1, np.float32),
            np.ones((1, 1), np.float32),
        ):
            base = value if cls.base != "unused" else None
            got = cls().merge([value] * (cls.most or 3), base, np.random.default_rng(0))
            assert got.shape == value.shape and np.isfinite(got).all(), name


MISTAKES = {
    "weights has nan, must be finite": ("linear", {"weights": (float("nan"), 1.0)}),
    "their sum must not be 0": ("multislerp", {"weights": (1.0, -1.0)}),
    "density is 0.0, must be greater than 0": ("ties", {"density": (0.0,)}),
    "density is 1.5, must be greater than 0 and at most 1": ("sce", {"density": 1.5}),
    "density is nan, must be": ("dare_ties", {"density": (float("nan"),)}),
    "spread is 0.5, must be at least 0 and keep": ("della", {"spread": 0.5}),
    "weights are 1, -1, their sum must not be 0": ("nuslerp", {"weights": (1.0, -1.0)}),
    "weights are 2e-09, -2e-09, their sum": ("task_arithmetic", {"weights": (2e-9, -2e-9), "normalize": True}),
    "t is 1.5, must be from 0": ("slerp", {"t": 1.5}),
    "outliers is 1.0, must be": ("breadcrumbs", {"outliers": 1.0}),
    "scale is inf, must be finite": ("task_arithmetic", {"scale": float("inf")}),
    "max_iterations is 0": ("karcher", {"max_iterations": 0}),
}


@pytest.mark.parametrize("said", MISTAKES)
def test_wrong_settings_are_refused(said):
    method, settings = MISTAKES[said]
    with pytest.raises(UserError, match=said):
        METHODS[method](**settings)


def test_settings_that_do_not_fit_the_models_are_refused():
    def refused(said, count, has_base, method, **settings):
        with pytest.raises(UserError, match=said):
            METHODS[method](**settings).check(count, has_base=has_base)

    refused("weights has 2 numbers, must have one for each of the 3 models", 3, False, "linear", weights=(1.0, 2.0))
    refused("density has 2 numbers", 3, True, "ties", density=(0.1, 0.2))
    refused("ties needs the base model", 3, False, "ties")
    refused("slerp is given 3 models, must have exactly 2", 3, False, "slerp")
    refused("linear has no use for a base", 2, True, "linear")
    refused("model_stock is given 1 models, must have at least 2", 1, True, "model_stock")


def test_directions_that_cancel_out_are_refused():
    one = np.ones(4, np.float32)
    with pytest.raises(UserError, match="cancel out"):
        METHODS["multislerp"](weights=(1.0, 0.5, 0.5)).merge([one, -one, -one], None, np.random.default_rng(0))


def test_settings_are_bound_by_gin():
    config.parse([], ["Ties.density = (0.25, 0.5)", "Ties.normalize = False"])
    made = config.build(METHODS["ties"], scale=2.0)
    assert (made.density, made.normalize, made.scale) == ((0.25, 0.5), False, 2.0)
