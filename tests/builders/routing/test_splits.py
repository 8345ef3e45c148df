"""No source and no shared text is in two splits; domains are balanced by a seeded hash."""

from __future__ import annotations

import collections
import itertools
import json
import math
import random

import numpy as np
import pytest

from capibara.builders.routing.balance import Balance, BalanceMethod
from capibara.builders.routing.build import build
from capibara.builders.routing.settings import RoutingSet
from capibara.builders.routing.splits import NAMES, Splits, seeded
from capibara.core.types import UserError
from tests.builders.routing import data

for _package in ("tree_sitter_sql", "rensa", "detect_secrets", "pyarrow", "openlineage.client"):
    pytest.importorskip(_package)

EVEN = Splits(train=0.4, validation=0.3, test=0.3)


def keys(count: int) -> np.ndarray:
    return seeded(np.arange(count, dtype=np.uint64), 5)


def test_shares_are_those_of_the_settings():
    found = np.bincount(Splits(train=0.7, validation=0.2, test=0.1).of(keys(20_000)), minlength=3) / 20_000
    np.testing.assert_allclose(found, [0.7, 0.2, 0.1], atol=0.015)
    assert (Splits(train=0.5, validation=0, test=0.5).of(keys(1000)) != 1).all()
    assert (Splits(train=1, validation=0, test=0).of(keys(1000)) == 0).all()


def test_a_source_keeps_its_split_when_others_are_added():
    np.testing.assert_array_equal(EVEN.of(keys(100)), EVEN.of(keys(1000))[:100])
    assert (EVEN.of(keys(100)) != Splits(train=0.4, validation=0.3, test=0.3, seed=1).of(keys(100))).any()


COUNTS = {"python": 1000, "sql": 100, "api": 10}


@pytest.mark.parametrize(
    ("balance", "expected"),
    [
        (Balance(), {"python": 10, "sql": 10, "api": 10}),
        (Balance(temperature=1.0), COUNTS),
        (Balance(temperature=2.0), {"python": 100, "sql": 32, "api": 10}),
        (Balance(method=BalanceMethod.NONE), COUNTS),
        (Balance(method=BalanceMethod.NONE, per_domain=50), {"python": 50, "sql": 50, "api": 10}),
        (Balance(method=BalanceMethod.OVERSAMPLE), {"python": 1000, "sql": 1000, "api": 100}),
        (Balance(method=BalanceMethod.OVERSAMPLE, max_repeats=200), dict.fromkeys(COUNTS, 1000)),
        (Balance(method=BalanceMethod.OVERSAMPLE, temperature=2.0), {"python": 1000, "sql": 316, "api": 100}),
        (Balance(method=BalanceMethod.OVERSAMPLE, per_domain=300), {"python": 300, "sql": 300, "api": 100}),
        (Balance(splits=("test",)), COUNTS),
    ],
)
def test_targets_of_domains(balance, expected):
    assert balance.targets(COUNTS, "train") == expected


def test_a_domain_without_texts_is_no_limit_for_others():
    assert Balance().targets({"python": 4, "sql": 0}, "train") == {"python": 4, "sql": 0}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Splits(train=0.9, validation=0.2), "Splits.train, validation and test (0.9, 0.2, 0.05)"),
        (lambda: Splits(train=0, validation=0.5, test=0.5), "Splits.train (0)"),
        (lambda: Splits(train=math.nan), "sum to 1"),
        (lambda: Splits(min_sources=-1), "min_sources (-1)"),
        (lambda: Balance(temperature=0.5), "Balance.temperature (0.5)"),
        (lambda: Balance(max_repeats=0), "max_repeats (0)"),
        (lambda: Balance(splits=("dev",)), "'dev' is no split"),
        (lambda: RoutingSet(domains=("python",)), "must be at least 2"),
        (lambda: RoutingSet(min_confidence=2.0), "min_confidence (2.0)"),
        (lambda: RoutingSet(min_characters=9, max_characters=8), "min_characters (9)"),
        (lambda: RoutingSet(shards=0), "shards (0)"),
        (lambda: RoutingSet(min_examples=-1), "min_examples (-1)"),
    ],
)
def test_wrong_settings_are_named(make, words):
    with pytest.raises(UserError) as error:
        make()
    assert words in str(error.value) and "\n" not in str(error.value)


# --- leaks -----------------------------------------------------------------------------------------------------------


def made(tmp_path, records, **changes):
    settings = RoutingSet(
        **{"splits": EVEN, "balance": Balance(method=BalanceMethod.NONE), "min_examples": 0} | changes
    )
    path = data.write(tmp_path / "in" / "all.jsonl", records)
    return build([path], str(tmp_path / "out"), settings)


def splits_by(records, key):
    found = collections.defaultdict(set)
    for record in records:
        found[key(record)].add(record["split"])
    return found


def test_no_source_is_in_two_splits(tmp_path):
    manifest = made(tmp_path, data.documents(20, of_source=5))
    found = data.examples(tmp_path / "out")
    assert len(found) == manifest.counts["labelled"] == 120
    by_source = splits_by(found, lambda record: record["source"])
    assert len(by_source) == 24 and all(len(splits) == 1 for splits in by_source.values())
    assert {split for splits in by_source.values() for split in splits} == {*NAMES}
    assert "leaks prevented" not in manifest.counts


def planted(tmp_path):
    """Copies of a document with other spaces and case, its code in a conversation, and a version with other numbers."""
    records, draw = data.documents(15), random.Random(3)
    copies, pieces, versions = {}, {}, {}
    for number in draw.sample(range(len(records)), 12):
        text = records[number]["text"]
        copies[len(records)] = number
        records.append({"text": text.replace(" ", "  ").upper() + "\n", "source": f"copy {number}", "domain": "python"})
    for number in [i for i in range(90) if i % 6 == 0][:12]:
        pieces[len(records)] = number
        asked = f"What does it do?\n\n```python\n{records[number]['text']}```"
        messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": f"It finds item {number}."}]
        records.append({"messages": messages, "source": f"chat {number}"})
    long = "\n".join(f"total_{i} = combine(first_{i}, second_{i}) + {i}" for i in range(30))
    for number in range(12):
        versions[len(records)] = len(records) - number % 2
        records.append({"text": f"{long}\nprint({number})\n" + f"# {number}\n" * 3, "source": f"version {number}"})
    return records, copies, pieces, versions


def test_planted_leaks_are_found_and_prevented(tmp_path):
    records, copies, pieces, versions = planted(tmp_path)
    manifest = made(tmp_path, records)
    found = {int(record["record"].rpartition(":")[2]) - 1: record for record in data.examples(tmp_path / "out")}
    assert not found.keys() & copies.keys(), "equal texts are kept once"
    assert found.keys() == {*range(len(records))} - copies.keys(), "and nothing else is lost"
    assert manifest.counts["repeated texts of other sources"] == len(copies)
    for later, earlier in pieces.items():
        assert found[later]["split"] == found[earlier]["split"]
    assert len({found[number]["split"] for number in versions}) == 1
    leaks = data.read(tmp_path / "out", "leaks.jsonl")
    assert manifest.counts["leaks prevented"] == len(leaks)
    by_kind = collections.Counter(leak["shared"] for leak in leaks)
    assert by_kind["text"] > 3 and by_kind["piece"] > 3 and by_kind["near"] > 3
    path = str(tmp_path / "in" / "all.jsonl")
    for leak in leaks:
        assert leak["path"] == leak["of_path"] == path and leak["split"] != leak["of_split"]
        assert leak["action"] == ("dropped" if leak["shared"] == "text" else "linked")
    planted_pairs = {(later + 1, earlier + 1) for later, earlier in itertools.chain(copies.items(), pieces.items())}
    assert {(one["line"], one["of_line"]) for one in leaks if one["shared"] == "text"} <= planted_pairs
    assert {(one["line"], one["of_line"]) for one in leaks if one["shared"] == "piece"} <= planted_pairs
    # Without the links the same set leaks: the splits that leaks.jsonl names are those of unlinked sources.
    loose = Splits(train=0.4, validation=0.3, test=0.3, link_words=10_000, near=None)
    made(tmp_path / "loose", records, splits=loose)
    unlinked = {
        int(one["record"].rpartition(":")[2]): one["split"] for one in data.examples(tmp_path / "loose" / "out")
    }
    apart = [pair for pair in pieces.items() if unlinked[pair[0] + 1] != unlinked[pair[1] + 1]]
    assert len(apart) == by_kind["piece"]
    for leak in leaks:
        if leak["shared"] == "piece":
            assert (leak["split"], leak["of_split"]) == (unlinked[leak["line"]], unlinked[leak["of_line"]])


def test_texts_that_differ_in_spaces_and_case_are_kept_once(tmp_path):
    texts = [
        "strasse = f(a, b) + g(c)",
        "STRASSE=f(a,b)+g( c )",
        "straße = f(a, b)\n\n + g(c)",
        "strasse = f(a, b) + g(d)",
    ]
    records = [{"text": text, "source": str(i), "domain": "python"} for i, text in enumerate(texts)]
    manifest = made(tmp_path, data.documents(8) + records)
    assert manifest.counts["repeated texts of other sources"] == 2


def test_versions_of_a_text_in_many_files_are_in_one_split(tmp_path):
    """One in English, and one in a script without spaces."""
    english = [f"total{i} combine first{i} second{i}" for i in range(40)]
    chinese = [chr(0x4E00 + 7 * i) for i in range(120)]
    found, paths = data.documents(4), []
    for number in range(1, 13):
        found += [
            {"text": text, "source": f"{number} {len(text)}", "domain": "python"}
            for text in ("".join(chinese[:-number]), " ".join(english[:-number]))
        ]
    for number in range(3):
        paths.append(data.write(tmp_path / f"{number}.jsonl", found[number::3]))
    build(
        paths,
        str(tmp_path / "out"),
        RoutingSet(splits=EVEN, balance=Balance(method=BalanceMethod.NONE), min_examples=0),
    )
    written = data.examples(tmp_path / "out")
    for begin in (chinese[0], english[0]):
        here = [one for one in written if one["text"].startswith(begin)]
        assert len(here) > 3 and len({one["split"] for one in here}) == 1
    assert {leak["path"] != leak["of_path"] for leak in data.read(tmp_path / "out", "leaks.jsonl")} >= {True}


def test_documents_that_name_no_source_keep_their_split_beside_other_files(tmp_path):
    records = [{"text": record["text"]} for record in data.documents(4)]
    paths = [data.write(tmp_path / "in" / "all.jsonl", records)]
    paths += [data.write(tmp_path / "a.jsonl", data.documents(4, seed=1))]
    found = []
    for number in (1, 2):
        settings = RoutingSet(splits=EVEN, balance=Balance(method=BalanceMethod.NONE), min_examples=0)
        build(paths[:number], str(tmp_path / str(number)), settings)
        found.append({record["text"]: record["split"] for record in data.examples(tmp_path / str(number))})
    assert found[0].items() < found[1].items()


def test_the_order_of_records_and_files_changes_nothing(tmp_path):
    """Which texts are chosen, their splits and their order."""
    records, draw = data.documents(8, of_source=1), random.Random(2)
    balance, found = Balance(temperature=1.5), []
    for count in (1, 3):
        paths = [data.write(tmp_path / str(count) / f"{i}.jsonl", records[i::count]) for i in range(count)]
        build(paths, str(tmp_path / f"out{count}"), RoutingSet(splits=EVEN, balance=balance, min_examples=0))
        found.append([(one["id"], one["split"]) for one in data.examples(tmp_path / f"out{count}")])
        draw.shuffle(records)
    assert found[0] == found[1] and len(found[0]) < len(records)


def test_too_few_sources_are_an_error(tmp_path):
    records = [{**record, "source": "one"} for record in data.documents(3)]
    with pytest.raises(
        UserError, match=r"(train|validation) has 0 of 1 sources, must have at least 1 \(Splits.min_sources"
    ):
        made(tmp_path, records)
    with pytest.raises(UserError, match="must have at least 40"):
        made(tmp_path / "b", data.documents(12), splits=Splits(train=0.4, validation=0.3, test=0.3, min_sources=40))


# --- balance ---------------------------------------------------------------------------------------------------------


def unbalanced() -> list[dict]:
    """Ten times as much Python as of other domains."""
    draw = random.Random(9)
    more = [
        {"text": data.FORMS["python"].format(10_000 + i, data.prose(draw)), "source": f"more {i}"} for i in range(180)
    ]
    return data.documents(30, of_source=1) + more


@pytest.mark.parametrize("method", ["cap", "oversample"])
def test_domains_are_balanced_in_train_alone(tmp_path, method):
    manifest = made(tmp_path, unbalanced(), balance=Balance(method=BalanceMethod(method), max_repeats=100))
    train = data.read(tmp_path / "out", "train.jsonl")
    counts = collections.Counter(record["domain"] for record in train)
    assert len({*counts.values()}) == 1 and counts.keys() == {*data.DOMAINS}
    distinct = collections.Counter(record["domain"] for record in train if record["repeat"] == 0)
    statistics = json.loads((tmp_path / "out" / "statistics.json").read_text())["domains"]
    before = {domain: statistics[domain]["before_balancing"]["train"] for domain in data.DOMAINS}
    if method == "cap":
        assert set(distinct.values()) == {min(before.values())}
        assert manifest.counts["excluded by balancing"] == sum(before.values()) - len(train)
    else:
        assert distinct == before and set(counts.values()) == {max(before.values())}
        assert "excluded by balancing" not in manifest.counts
    for domain in data.DOMAINS:
        assert statistics[domain]["written"]["train"] == counts[domain] == manifest.counts[f"train {domain}"]
        assert statistics[domain]["written"]["test"] == statistics[domain]["before_balancing"]["test"]
    keyed = [(record["id"], record["repeat"]) for record in train]
    assert len({*keyed}) == len(keyed)


def test_another_seed_chooses_other_examples(tmp_path):
    chosen = []
    for seed in range(2):
        made(tmp_path / str(seed), unbalanced(), balance=Balance(seed=seed))
        chosen.append({record["id"] for record in data.read(tmp_path / str(seed) / "out", "train.jsonl")})
    assert chosen[0] != chosen[1] and len(chosen[0]) == len(chosen[1])


def test_the_order_mixes_the_domains(tmp_path):
    made(tmp_path, unbalanced())
    order = [record["domain"] for record in data.read(tmp_path / "out", "train.jsonl")]
    changes = sum(one != other for one, other in zip(order, order[1:]))
    assert changes > len(order) / 4
