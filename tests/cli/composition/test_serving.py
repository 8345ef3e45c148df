"""A server's rows are as long as the model allows, in the memory of slots of Dataset.length."""

from __future__ import annotations

import dataclasses

import pytest

from capibara import config
from capibara.cli.composition import serving
from capibara.data.dataset import Dataset
from capibara.data.sources.sources import StdlibSource
from capibara.data.tokenizers.vocabulary import ByteVocabulary
from capibara.inference.engine.engine import EngineConfig
from capibara.interop.open_model import LoadedModel
from capibara.models import api
from capibara.models.api import DecoderConfig, Rope, ShortConv

SIZES = dict(vocab_size=384, embed_dim=32, num_heads=4, mlp_dim=64, num_layers=2)
PLAIN = DecoderConfig(**SIZES, max_length=1000)
DYNAMIC = dataclasses.replace(PLAIN, rope=Rope(scaling="dynamic", factor=2.0, original_length=100))
STATES = DecoderConfig(**SIZES, mixer=ShortConv(), layer_pattern=("recurrent",), positions="none")


@pytest.mark.parametrize(
    "model, platform, bindings, length, pages",
    [
        (PLAIN, "cpu", (), 1000, (128, 8 * 2)),
        (PLAIN, "tpu", (), 1000, (32, 8 * 5)),
        (PLAIN, "cpu", ("Dataset.length = 130",), 130, (128, 8 * 2)),
        (PLAIN, "cpu", ("rows.gin",), 130, (128, 8 * 2)),
        (PLAIN, "cpu", ("TEXT = 130",), 130, (128, 8 * 2)),
        (PLAIN, "tpu", ("Dataset.length = 130",), 130, (0, None)),
        (dataclasses.replace(PLAIN, max_length=None), "cpu", (), 130, (128, 8 * 2)),
        (dataclasses.replace(PLAIN, max_length=9000), "cpu", (), 9000, (128, 71)),  # one whole row
        (DYNAMIC, "cpu", (), 130, (128, 8 * 2)),  # frequencies would be those of 1,000 tokens for every row
        (STATES, "cpu", (), 130, (0, None)),
    ],
)
def test_length_and_pages(model, platform, bindings, length, pages, monkeypatch, tmp_path):
    (tmp_path / "rows.gin").write_text("Dataset.length = 130\n")
    files = [str(tmp_path / name) for name in bindings if name.endswith(".gin")]
    record = config.Recorded("TEXT = 130\nDataset.length = %TEXT\n", "run.gin")
    config.parse(files, [one for one in bindings if "=" in one], recorded=record)
    monkeypatch.setattr(serving, "platform", lambda: platform)
    loaded = LoadedModel(
        api.build(model),
        {},
        Dataset(source=StdlibSource(), vocabulary=ByteVocabulary(), length=130),
        "m",
        None,
        "stored",
    )
    got, batching = serving.served_rows(loaded, EngineConfig(slots=8))
    assert (got, batching.page_size, batching.pages) == (length, *pages)
    config.reset()


def test_pages_that_are_bound_stay():
    config.reset()
    config.parse([], ["EngineConfig.page_size = 0"])
    loaded = LoadedModel(
        api.build(PLAIN),
        {},
        Dataset(source=StdlibSource(), vocabulary=ByteVocabulary(), length=130),
        "m",
        None,
        "stored",
    )
    assert serving.served_rows(loaded, EngineConfig()) == (130, EngineConfig())
    config.reset()
