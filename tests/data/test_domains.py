"""Domain hints: every token carries its document's domain, from whichever source knows it."""

from __future__ import annotations

import json

import numpy as np
import pytest

from capibara import config
from capibara.data.dataset import Dataset, Kind
from capibara.data.packing.packing import Packing
from capibara.data.pipeline.loader import make_loader
from capibara.data.sources.sources import CombinedSource, JsonlSource, StdlibSource, TextSource
from capibara.data.tokenizers.vocabulary import ByteVocabulary

DOMAINS = ("python", "sql")
NUMBERS = {"p": 1, "s": 2, "o": 0}  # by the first letter of a text


def marked(dataset: Dataset) -> set[tuple[str, int]]:
    """The first letter of every packed text beside the domain of its tokens."""
    seen = set()
    for batch in make_loader(dataset, batch_size=2, epochs=1):
        assert {key: (value.shape, value.dtype) for key, value in batch.items()} == dataset.batch_spec(2)
        for row, segments, domains in zip(batch["targets"], batch["segment_ids"], batch["domains"], strict=True):
            assert not domains[segments == 0].any()
            for segment in range(1, segments.max(initial=0) + 1):
                (domain,) = set(domains[segments == segment].tolist())
                seen.add((ByteVocabulary().decode(row[segments == segment])[:1], domain))
    return seen


@pytest.fixture
def lines(tmp_path):
    path = tmp_path / "lines.jsonl"
    texts = [{"text": word * 3, "domain": word} for word in ("python", "sql", "other")] + [{"text": "o"}]
    texts = [dict(text, inputs="?") for text in texts] * 20
    path.write_text("".join(json.dumps(text) + "\n" for text in texts))
    return path


@pytest.mark.parametrize("packing", list(Packing))
def test_domains_of_json_lines(lines, packing):
    source = JsonlSource(files=(str(lines),))
    dataset = Dataset(source=source, vocabulary=ByteVocabulary(), length=64, packing=packing, domains=DOMAINS)
    seen = marked(dataset)
    # Where documents are cut anywhere, a piece may begin with any letter.
    assert (seen == set(NUMBERS.items())) if packing is not Packing.CONCAT else set(NUMBERS.items()) <= seen


def test_domains_of_pairs_and_masked_texts(lines):
    pairs = JsonlSource(files=(str(lines),), inputs_field="inputs")
    shared = dict(vocabulary=ByteVocabulary(), length=64, domains=DOMAINS)
    assert marked(Dataset(source=pairs, kind=Kind.ENCODER_DECODER, encoder_length=32, **shared)) == set(NUMBERS.items())
    masked = Dataset(source=JsonlSource(files=(str(lines),)), kind=Kind.MASKED, **shared)
    assert marked(masked) == set(NUMBERS.items())


def test_domains_of_folders_and_of_several_sources(tmp_path, lines):
    for i in range(4):
        (tmp_path / f"{i}.py").write_text("p = 1\n")
        (tmp_path / f"{i}.sql").write_text("select 1;\n")
        (tmp_path / f"{i}.txt").write_text("others\n")
    folder = TextSource(files=tuple(str(tmp_path / f"*.{end}") for end in ("py", "sql", "txt")))
    shared = dict(vocabulary=ByteVocabulary(), length=64, domains=DOMAINS)
    assert marked(Dataset(source=folder, **shared)) == set(NUMBERS.items())

    labelled = TextSource(files=(str(tmp_path / "*.txt"),), domain="sql")
    both = CombinedSource(sources=(labelled, TextSource(files=(str(tmp_path / "*.py"),))))
    assert marked(Dataset(source=both, **shared)) == {("o", 2), ("p", 1)}
    documents = both.open("train")
    parts = [source.open("train") for source in both.sources]
    assert [documents[i] for i in range(len(documents))] == [part[i] for part in parts for i in range(len(part))]
    assert documents.fingerprint() == {"0": parts[0].fingerprint(), "1": parts[1].fingerprint()}
    assert StdlibSource().open("validation").example(0).domain == "python"


def test_several_sources_in_gin(lines):
    config.parse(
        [],
        [
            "Dataset.source = @CombinedSource()",
            "CombinedSource.sources = (@sql/JsonlSource(), @py/JsonlSource())",
            f"JsonlSource.files = ('{lines}',)",
            "sql/JsonlSource.domain = 'sql'",
            "py/JsonlSource.domain_field = 'none'",
            "py/JsonlSource.domain = 'python'",
            "Dataset.vocabulary = @ByteVocabulary()",
            "Dataset.domains = ('python', 'sql')",
        ],
    )
    dataset = config.build(Dataset)
    assert [source.domain for source in dataset.source.sources] == ["sql", "python"]
    documents = dataset.source.open("train")
    assert {documents.example(i).domain for i in range(len(documents) // 2)} == {"sql", "python", "other"}
    assert {documents.example(i).domain for i in range(len(documents) // 2 + 1, len(documents))} == {"python"}


def test_without_domains_there_is_no_such_key(lines):
    dataset = Dataset(source=JsonlSource(files=(str(lines),)), vocabulary=ByteVocabulary(), length=64)
    assert "domains" not in next(make_loader(dataset, batch_size=1)) and "domains" not in dataset.batch_spec(1)


def test_domains_of_a_task():
    dataset = Dataset(
        mixture_or_task_name="python_stdlib",
        task_module="capibara.data.builtin_tasks",
        length=64,
        domains=("sql", "python_stdlib"),
    )
    loader = make_loader(dataset, batch_size=1)
    batch = next(loader)
    loader.close()
    np.testing.assert_array_equal(batch["domains"], np.where(batch["segment_ids"] > 0, 2, 0))
