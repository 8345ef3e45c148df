"""The integrated model of a round: shares of several merges, and of a soup that may be empty."""

import jax.numpy as jnp
import numpy as np
import pytest

from capibara.consensus.aggregation import Report
from capibara.strategies.consensus import integrated


def merge(value, masked=(), weights=None, spare=0):
    """A merge whose model is `value`, and that masks some of three nodes."""

    def combine(sent, agreed, key):
        del key
        is_masked = jnp.asarray([node in masked for node in range(3)])
        report = Report(is_masked=is_masked, spare_faults=jnp.int32(spare), distances=jnp.zeros(3), weights=weights)
        return {"w": jnp.full_like(agreed["w"], value)}, report

    return combine


SENT, AGREED = {"w": jnp.arange(6.0).reshape(3, 2)}, {"w": jnp.zeros(2)}


def test_only_the_ratios_of_shares_count_and_a_node_that_one_merge_masks_has_no_part():
    weights = jnp.full(3, 1 / 3)
    merges = {"a": (2.0, merge(10.0, masked=(1,), spare=2)), "b": (6.0, merge(20.0, weights=weights, spare=1))}
    mixed, report = integrated.combining(merges)(SENT, AGREED, None)
    np.testing.assert_allclose(mixed["w"], 17.5)
    assert report.is_masked.tolist() == [False, True, False] and report.spare_faults == 1
    np.testing.assert_array_equal(report.weights, weights)
    far = np.linalg.norm(np.asarray(SENT["w"]) - 17.5, axis=1)
    np.testing.assert_allclose(report.distances, [far[0], np.inf, far[2]], rtol=1e-6)


def test_a_node_that_a_merge_masks_has_no_part_in_the_next():
    def mean(sent, agreed, key):
        model, report = merge(0.0)(sent, agreed, key)
        return {"w": jnp.nanmean(sent["w"], axis=0)}, report

    mixed, _ = integrated.combining({"a": (1e-9, merge(0.0, masked=(2,))), "b": (1.0, mean)})(SENT, AGREED, None)
    np.testing.assert_allclose(mixed["w"], [1.0, 2.0], rtol=1e-6)


def test_a_merge_without_a_share_is_not_made():
    def never(*args):
        raise AssertionError

    mixed, _ = integrated.combining({"a": (1.0, merge(4.0)), "b": (0.0, never)})(SENT, AGREED, None)
    np.testing.assert_array_equal(mixed["w"], np.full(2, 4.0, np.float32))


@pytest.mark.parametrize("share, want", [(0.0, 4.0), (3.0, 7.0)])
def test_a_standing_model_has_its_share(share, want):
    standing = [(jnp.float32(share), {"w": jnp.full(2, 8.0)})]
    mixed, _ = integrated.combining({"a": (1.0, merge(4.0))}, standing)(SENT, AGREED, None)
    np.testing.assert_allclose(mixed["w"], want)
