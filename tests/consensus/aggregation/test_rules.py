"""Each rule and pre-aggregation against its definition in plain NumPy, and what each must withstand.

All tests share one shape, so that a rule is compiled once: 9 nodes, 2 of them faulty (1 for Bulyan), 17 coordinates.
"""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara import config
from capibara.consensus.aggregation import (
    Aggregation,
    Arc,
    Bucketing,
    Bulyan,
    Caf,
    CenteredClipping,
    Clipping,
    CoordinateMedian,
    GeometricMedian,
    Krum,
    Mda,
    Meamed,
    Mean,
    Monna,
    MultiKrum,
    Nnm,
    Smea,
    TrimmedMean,
    stack,
)
from capibara.core.types import UserError

NODES, SIZE = 9, 17


def squared(x):
    return np.sum((x[:, None] - x[None]) ** 2, axis=-1)


def scores(x, neighbours):
    return np.sort(squared(x), axis=1)[:, 1 : 1 + max(neighbours, 1)].sum(axis=1)


def krum(x, f):
    return x[np.argmin(scores(x, len(x) - f - 2))]


def multi_krum(x, f):
    return x[np.argsort(scores(x, len(x) - f - 1))[: len(x) - f]].mean(0)


def around_median(x, kept):
    nearest = np.argsort(np.abs(x - np.median(x, axis=0)), axis=0)[:kept]
    return np.take_along_axis(x, nearest, axis=0).mean(0)


def bulyan(x, f):
    left, chosen = list(range(len(x))), []
    for _ in range(len(x) - 2 * f):
        if len(left) > 1:
            best = left[int(np.argmin(scores(x[left], len(left) - f - 2)))]
        else:
            best = left[0]
        chosen.append(best)
        left.remove(best)
    return around_median(x[chosen], len(chosen) - 2 * f)


def best_subset(x, f, spread):
    subsets = [list(subset) for subset in itertools.combinations(range(len(x)), len(x) - f)]
    return x[min(subsets, key=lambda subset: (spread(x[subset]), squared(x[subset]).sum()))].mean(0)


def top(x, weights):
    mean = weights @ x / weights.sum()
    values, vectors = np.linalg.eigh((weights[:, None] * (x - mean)).T @ (x - mean) / weights.sum())
    return mean, values[-1], ((x - mean) @ vectors[:, -1]) ** 2


def caf(x, f):
    weights, best, least = np.ones(len(x)), x.mean(0), np.inf
    while weights.sum() > len(x) - 2 * f:
        mean, variance, along = top(x, weights)
        if variance < least:
            best, least = mean, variance
        weights = weights * (1 - along / along[weights > 0].max())
        weights[weights < 1e-12] = 0
    return best


def geometric_median(x, f):
    point = x.mean(0)
    for _ in range(2000):
        inverse = 1 / np.maximum(np.linalg.norm(x - point, axis=1), 1e-12)
        point = inverse @ x / inverse.sum()
    return point


def centred_clipping(x, f):
    point = np.zeros(SIZE)
    for _ in range(3):
        gap = x - point
        point = point + (gap * np.minimum(1, 4 / np.linalg.norm(gap, axis=1))[:, None]).mean(0)
    return point


# Rule -> the rule with its f, and its definition: (vectors [n, D] float64, f) -> [D].
RULES = {
    "mean": (Mean(), 0, lambda x, f: x.mean(0)),
    "median": (CoordinateMedian(), 2, lambda x, f: np.median(x, axis=0)),
    "trimmed mean": (TrimmedMean(), 2, lambda x, f: np.sort(x, axis=0)[f : len(x) - f].mean(0)),
    "meamed": (Meamed(), 2, lambda x, f: around_median(x, len(x) - f)),
    "geometric median": (GeometricMedian(), 2, geometric_median),
    "Krum": (Krum(), 2, krum),
    "Multi-Krum": (MultiKrum(neighbours="n-f-1"), 2, multi_krum),
    "Bulyan": (Bulyan(), 1, bulyan),
    "MoNNA": (Monna(pivot=0), 2, lambda x, f: x[np.argsort(squared(x)[0])[: len(x) - f]].mean(0)),
    "MDA": (Mda(), 2, lambda x, f: best_subset(x, f, lambda s: squared(s).max())),
    "SMEA": (Smea(), 2, lambda x, f: best_subset(x, f, lambda s: top(s, np.ones(len(s)))[1])),
    "CAF": (Caf(), 2, caf),
    "centred clipping": (CenteredClipping(radius=4.0), 2, centred_clipping),
}
ROBUST = [name for name in RULES if name != "mean"]


@functools.cache
def compiled(aggregation):
    return jax.jit(lambda stacked, reference, key: aggregation(stacked, reference, key))


def aggregate(rule, x, before=(), reference=None, seed=0):
    """The aggregate of vectors [n, 17], as two leaves, and the report."""
    made, faults, _ = RULES[rule]
    x = np.asarray(x, np.float32)
    reference = np.zeros(SIZE, np.float32) if reference is None else np.asarray(reference, np.float32)
    stacked = {"kernel": x[:, :12].reshape(-1, 3, 4), "bias": x[:, 12:]}
    of = {"kernel": reference[:12].reshape(3, 4), "bias": reference[12:]}
    tree, report = compiled(Aggregation(rule=made, before=before, faults=faults))(stacked, of, jax.random.key(seed))
    return np.concatenate([np.ravel(tree["kernel"]), tree["bias"]]), report


@pytest.fixture
def x():
    """Nodes that differ; the last two are somewhat off."""
    made = np.random.default_rng(0).normal(size=(NODES, SIZE))
    made[-2:] += [[1.5], [-2.5]]
    return np.round(made * 256) / 256  # exact in float32, with an offset too


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_is_its_definition(rule, x):
    got, report = aggregate(rule, x)
    want = RULES[rule][2](x, RULES[rule][1])
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-6)
    np.testing.assert_allclose(report.distances, np.linalg.norm(x - want, axis=1), rtol=1e-5)
    assert report.masked == ()
    if report.weights is not None and rule != "centred clipping":  # which gives the reference some weight
        np.testing.assert_allclose(np.asarray(report.weights) @ x, want, rtol=0, atol=2e-6)


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "centred clipping"])  # whose radius is absolute
def test_a_multiple_of_nodes_gives_that_multiple(rule, x):
    want, _ = aggregate(rule, x)
    for factor in (1e-12, 1e-9, 1e-6, 1e-4, 1e6):
        got, report = aggregate(rule, x * factor)
        np.testing.assert_allclose(got / np.float32(factor), want, rtol=0, atol=4e-6, err_msg=str(factor))
        same = np.broadcast_to(x[0] * factor, x.shape)
        np.testing.assert_allclose(aggregate(rule, same)[0], np.float32(same[0]), rtol=1e-6)
        assert report.masked == ()


def test_a_multiple_of_nodes_and_radius_gives_that_multiple(x):
    want, _ = aggregate("centred clipping", x)
    for factor in (1e-12, 1e-6, 1e6):
        rule = Aggregation(rule=CenteredClipping(radius=4.0 * factor), faults=2)
        nodes = {"kernel": np.float32(x * factor)}
        got, _ = rule(nodes, {"kernel": np.zeros(SIZE, np.float32)}, jax.random.key(0))
        np.testing.assert_allclose(got["kernel"] / np.float32(factor), want, rtol=0, atol=4e-6, err_msg=str(factor))


def test_the_geometric_median_of_mostly_equal_nodes_is_theirs(x):
    """Also beside nodes that are far off: its smoothing is not theirs."""
    for factor in (1e-12, 1.0, 1e6):
        nodes = np.broadcast_to(x[0] * factor, x.shape).copy()
        nodes[-4:] = x[1:5] * factor * 1e6
        np.testing.assert_allclose(aggregate("geometric median", nodes)[0], nodes[0], rtol=1e-6)


@pytest.mark.parametrize("rule", RULES)
def test_a_node_that_is_not_finite_is_a_fault_that_is_spent(rule, x):
    """The rule goes on with the others, fewer of which can be faulty."""
    broken, faults = x.copy(), RULES[rule][1]
    for node, masked, value in (3, (3,), np.nan), (5, (3, 5), np.inf), (1, (1, 3, 5), -np.inf):
        broken[node, 7] = value
        got, report = aggregate(rule, broken)
        others = np.delete(x, masked, axis=0)
        want = RULES[rule][2](others, max(faults - len(masked), 0))
        np.testing.assert_allclose(got, want, rtol=0, atol=4e-6, err_msg=str(masked))
        assert report.masked == masked and int(report.spare_faults) == faults - len(masked)
        assert np.isinf(np.asarray(report.distances)[list(masked)]).all()
    assert "node 1, node 3, node 5" in report.describe() and "not to be trusted" in report.describe()


@pytest.mark.parametrize("rule", RULES)
def test_no_input_gives_what_is_not_finite(rule, x):
    got, report = aggregate(rule, np.full_like(x, np.nan))
    assert np.all(got == 0) and "no node is left" in report.describe(list("abcdefghi"))
    for same in (np.zeros_like(x), np.ones_like(x)):
        np.testing.assert_allclose(aggregate(rule, same)[0], same[0], rtol=0, atol=1e-6)
    single = np.full_like(x, np.nan)
    single[4] = x[4]
    if rule != "centred clipping":
        np.testing.assert_allclose(aggregate(rule, single)[0], x[4], rtol=1e-6)


@pytest.mark.parametrize("rule", ROBUST)
def test_outliers_of_any_size_have_little_influence(rule, x):
    """CAF ends, too, whatever the size."""
    made, faults, _ = RULES[rule]
    honest = x[: NODES - faults]
    widest = np.linalg.norm(honest - honest.mean(0), axis=1).max()
    for size in (1e2, 1e6, 1e14, 1e30, 3e38, np.inf):
        for signs in ((1, 1), (1, -1)):
            attacked = x.copy()
            attacked[NODES - faults :] = size * np.resize(signs, faults)[:, None]
            got, _ = aggregate(rule, attacked)
            assert np.linalg.norm(got - honest.mean(0)) < 1.5 * widest, (size, signs)
            attacked[NODES - faults :] = np.where(
                np.arange(SIZE) == 2, attacked[NODES - faults :], 0
            )  # in one direction
            assert np.linalg.norm(aggregate(rule, attacked)[0] - honest.mean(0)) < 1.5 * widest, (size, signs)


@pytest.mark.parametrize("rule", RULES)
def test_neither_order_nor_origin_matters(rule, x):
    """Not even far from the origin, where float32 has few digits left: differences there are still exact."""
    want, _ = aggregate(rule, x)
    order = [0, 5, 2, 8, 4, 7, 1, 3, 6]  # the first stays: MoNNA's pivot
    np.testing.assert_allclose(aggregate(rule, x[order])[0], want, rtol=0, atol=2e-6)
    far, _ = aggregate(rule, x + 2.0**14, reference=np.full(SIZE, 2.0**14))
    np.testing.assert_allclose(far - 2.0**14, want, rtol=0, atol=2.0**-7)


def test_small_examples_worked_by_hand():
    x = np.zeros((NODES, SIZE))
    x[:, 0] = [0, 1, 3, 4, 5, 6, 8, 100, 200]
    for rule, want in {
        "median": 5,
        "trimmed mean": (3 + 4 + 5 + 6 + 8) / 5,
        "meamed": 27 / 7,
        "geometric median": 5,  # on a line it is the median
        "Krum": 3,  # 1 + 4 + 4 + 9 + 9 to its 5 nearest, 31 for 4 and 5
        "Multi-Krum": 27 / 7,
        "MDA": 27 / 7,
        "SMEA": 27 / 7,
        "MoNNA": 27 / 7,
    }.items():
        got, _ = aggregate(rule, x)
        assert got[0] == pytest.approx(want, abs=1e-4), rule
        assert np.all(got[1:] == 0)


def nearest_means(x, f):
    return np.stack([x[np.argsort(row)[: len(x) - f]].mean(0) for row in squared(x)])


def clipped(x, radius):
    return x * np.minimum(1, radius / np.linalg.norm(x, axis=1))[:, None]


def adaptively_clipped(x, f):
    norms = np.sort(np.linalg.norm(x, axis=1))[::-1]
    return clipped(x, norms[2 * f * (len(x) - f) // len(x)])


BEFORE = {
    "NNM": (Nnm(), nearest_means),
    "clipping": (Clipping(radius=4.0), lambda x, f: clipped(x, 4.0)),
    "ARC": (Arc(), adaptively_clipped),
}


@pytest.mark.parametrize("before", BEFORE)
def test_a_pre_aggregation_is_its_definition(before, x):
    made, definition = BEFORE[before]
    got, _ = aggregate("median", x, (made,))
    np.testing.assert_allclose(got, np.median(definition(x, 2), axis=0), rtol=0, atol=2e-6)
    broken = x.copy()
    broken[4, 3] = np.nan
    got, report = aggregate("median", broken, (made,))
    want = np.median(definition(np.delete(x, 4, axis=0), 1), axis=0)
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-6)
    assert report.masked == (4,)


def test_pre_aggregations_follow_each_other(x):
    """And a distance rule after them is one weighted sum of the nodes."""
    got, report = aggregate("geometric median", x, (Arc(), Nnm()))
    want = geometric_median(nearest_means(adaptively_clipped(x, 2), 2), 2)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)
    np.testing.assert_allclose(np.asarray(report.weights) @ x, want, rtol=0, atol=1e-5)


def test_buckets_are_drawn_anew_with_each_key_and_hold_no_masked_node(x):
    seen = set()
    x[2] = np.nan
    for seed in range(4):
        got, report = aggregate("mean", x, (Bucketing(size=5),), seed=seed)
        weights = np.asarray(report.weights)
        assert weights[2] == 0
        # Two buckets, of 5 and of 3 nodes, and the mean of their means.
        np.testing.assert_allclose(sorted(weights), [0] + [0.1] * 5 + [1 / 6] * 3, rtol=1e-5)
        np.testing.assert_allclose(got, np.delete(weights, 2) @ np.delete(x, 2, axis=0), rtol=0, atol=2e-6)
        seen.add(tuple(weights))
    assert len(seen) > 1


def test_half_precision_is_combined_in_float32():
    """Sums and squares of such values are not finite in float16, nor are differences seen in bfloat16."""
    draw = np.random.default_rng(2).normal(size=(7, 40))
    draw[5:] = 6e4
    stacked = {"half": draw.astype(np.float16), "brain": jnp.asarray(draw, jnp.bfloat16)}
    tree, report = jax.jit(Aggregation(rule=Caf(), faults=2))(stacked)
    assert tree["half"].dtype == jnp.float16 and tree["brain"].dtype == jnp.bfloat16
    want = caf(np.concatenate([np.asarray(leaf, np.float64) for leaf in stacked.values()], axis=1), 2)
    got = np.concatenate([np.asarray(leaf, np.float64) for leaf in tree.values()])
    np.testing.assert_allclose(got, want, atol=0.01)
    assert report.masked == () and np.all(np.asarray(report.weights)[5:] == 0)


BREAKDOWN = {  # of 9 and of 10 nodes
    "mean": (0, 0),
    "Krum": (3, 3),
    "Multi-Krum": (4, 4),  # with n-f-1 neighbours
    "Bulyan": (1, 1),
}


@pytest.mark.parametrize("rule", RULES)
def test_more_faults_than_a_rule_withstands_are_refused(rule):
    made = RULES[rule][0]
    for nodes, largest in zip((9, 10), BREAKDOWN.get(rule, (4, 4))):
        assert Aggregation(rule=made).largest_faults(nodes) == largest
        Aggregation(rule=made, faults=largest).check(nodes)
        stacked = {"a": jnp.zeros((nodes, 2))}
        with pytest.raises(
            UserError, match=f"faults is {largest + 1}, must be at most {largest} of {nodes} nodes for "
        ) as e:
            Aggregation(rule=made, faults=largest + 1)(stacked)
        assert "\n" not in str(e.value) and type(made).__name__ in str(e.value)


def test_buckets_lower_the_breakdown_point():
    assert Aggregation(rule=Krum(), before=(Bucketing(size=2), Nnm())).largest_faults(25) == 5  # of 13 buckets
    with pytest.raises(UserError, match="at most 2 of 9 nodes for CoordinateMedian after Bucketing"):
        Aggregation(rule=CoordinateMedian(), before=(Bucketing(),), faults=3).check(9)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Aggregation(faults=-1), "faults is -1"),
        (lambda: Aggregation(rule=Monna(), before=(Bucketing(),)), "Monna.pivot"),
        (lambda: Aggregation(rule=Monna(pivot=9)).check(9), "pivot is 9, must be below the number of nodes: 9"),
        (lambda: Aggregation(rule=Smea(), faults=12).check(25), "5200300 subsets"),
        (lambda: Aggregation(rule=MultiKrum(selected=8), faults=2).check(9), "selected is 8, must be at most 7"),
        (lambda: Aggregation(before=(Bucketing(),))({"a": jnp.zeros((4, 2))}), "needs a key"),
        (lambda: Aggregation()({"a": jnp.zeros((4, 2)), "step": jnp.zeros(4, int)}), "step is int32"),
        (lambda: Aggregation()({"a": jnp.zeros((4, 2)), "b": jnp.zeros((3, 2))}), r"b is float32\[3, 2\]"),
        (lambda: Aggregation()({"a": jnp.zeros((4, 2))}, {"a": jnp.zeros(3)}), r"reference a has the shape \(3,\)"),
        (lambda: stack([{"a": np.zeros(2)}, {"a": np.zeros(3)}], ["x", "y"]), "y has another model: a is"),
        (lambda: stack([{"a": np.zeros(2)}, {"b": np.zeros(2)}]), "node 1 has another model: a is missing"),
        (lambda: GeometricMedian(smoothing=0.0), "smoothing is 0.0"),
        (lambda: CenteredClipping(iterations=0), "iterations is 0"),
        (lambda: Clipping(radius=float("inf")), "radius is inf"),
        (lambda: Bucketing(size=0), "size is 0"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused_in_a_line(make, words):
    with pytest.raises(UserError, match=words) as error:
        make()
    assert "\n" not in str(error.value)


def test_gin_builds_an_aggregation():
    text = ["Aggregation.rule = @Krum()", "Aggregation.before = (@Nnm(),)", "Aggregation.faults = 2"]
    config.parse([], [*text, "Krum.neighbours = 'n-f-1'"])
    made = config.build(Aggregation)
    assert made == Aggregation(rule=Krum(neighbours="n-f-1"), before=(Nnm(),), faults=2)


def test_trees_are_stacked():
    stacked = stack([{"a": np.float32([1, 2])}, {"a": np.float32([3, 4])}])
    assert stacked["a"].tolist() == [[1, 2], [3, 4]]
