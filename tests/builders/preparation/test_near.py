"""Signatures estimate the similarity of texts, and groups join what is similar."""

import numpy as np
import pytest

from capibara.builders.preparation import near, tables
from capibara.core.types import UserError
from tests.builders.preparation import corpora

SETTINGS = near.NearDuplicates()


def grams(text, size=5):
    words = text.rstrip(".").split()
    return {tuple(words[i : i + size]) for i in range(len(words) - size + 1)}


def test_signatures_estimate_the_similarity():
    errors = []
    for seed in range(60):
        one = corpora.text(seed, 400)
        other = corpora.changed(one, seed, seed)
        real = len(grams(one) & grams(other)) / len(grams(one) | grams(other))
        found = near.signatures([one, other], SETTINGS)
        errors.append((found[0] == found[1]).mean() - real)
    # The standard deviation of 112 independent slots is at most 0.5 / sqrt(112).
    assert abs(np.mean(errors)) < 0.02 and np.sqrt(np.mean(np.square(errors))) < 0.5 / 112**0.5


def test_signatures_do_not_depend_on_other_texts():
    texts = [corpora.text(seed) for seed in range(5)] + ["", "...", "a b"]
    every = near.signatures(texts, SETTINGS)
    assert all(np.array_equal(near.signatures([text], SETTINGS)[0], every[i]) for i, text in enumerate(texts))
    assert not np.array_equal(every[5], every[6])  # texts without words are not alike


def test_keys_are_shared_by_equal_bands_only():
    signatures = near.signatures([corpora.text(0), corpora.text(1)], SETTINGS)
    mixed = signatures[:1].copy()
    mixed[0, : SETTINGS.rows] = signatures[1, : SETTINGS.rows]
    one, other = near.keys(signatures, SETTINGS), near.keys(mixed, SETTINGS)[:, 0]
    assert other[0] == one[0, 1] and (other[1:] == one[1:, 0]).all()
    assert len(np.unique(one)) == one.size  # also between bands


def test_groups_are_joined_through_others():
    groups = near.Groups(np.zeros(9, np.int64))
    groups.join(np.array([7, 3, 5]), np.array([5, 2, 7]))
    groups.join(np.array([3]), np.array([7]))
    assert groups.first(np.arange(9)).tolist() == [0, 1, 2, 2, 4, 2, 6, 2, 8]


def test_groups_do_not_depend_on_the_order():
    pairs = np.random.default_rng(0).integers(0, 300, (2, 200))
    found = []
    for order in (np.arange(200), np.random.default_rng(1).permutation(200)):
        groups = near.Groups(np.zeros(300, np.int64))
        for at in order.tolist():
            groups.join(pairs[0, at : at + 1], pairs[1, at : at + 1])
        found.append(groups.first(np.arange(300)).tolist())
    whole = near.Groups(np.zeros(300, np.int64))
    whole.join(*pairs)
    assert found[0] == found[1] == whole.first(np.arange(300)).tolist()


def test_tables_are_read_by_ranges(tmp_path):
    random = np.random.default_rng(0)
    keys = random.integers(0, 1 << 64, (2, 5000), dtype=np.uint64)
    keys[:, 2500:] = keys[:, :2500]
    path = tmp_path / "table"
    path.write_bytes(b"head" + tables.encoded(keys, np.arange(5000)))
    assert path.stat().st_size == 4 + tables.size(5000, 2)
    found = []
    with open(path, "rb") as file:
        for within in [(0, 64), (64, 65), (65, 256)]:
            part, documents = tables.read(file, 4, 5000, within, 2)
            assert np.array_equal(keys[:, documents], part)
            found += tables.repeated(part, documents)[0].tolist()
    assert sorted(found) == [*range(2500, 5000)]


@pytest.mark.parametrize("total, pieces", [(0, 1), (1 << 20, 1), (1 << 23, 4), (1 << 40, 256)])
def test_ranges_hold_all_keys(total, pieces):
    found = tables.ranges(total)
    assert len(found) == pieces and found[0][0] == 0 and found[-1][1] == 256
    assert all(one[1] == other[0] for one, other in zip(found, found[1:]))


@pytest.mark.parametrize("wrong", [{"words": 0}, {"bands": 1000}, {"similarity": 1.5}, {"seed": -1}])
def test_wrong_settings_are_refused(wrong):
    with pytest.raises(UserError, match=f"NearDuplicates.{next(iter(wrong))}"):
        near.NearDuplicates(**wrong)
