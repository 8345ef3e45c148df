"""docs/unsupported.md names what the code refuses: parameters of the server, options of training methods, formats."""

from __future__ import annotations

import importlib
import pathlib
import re

import pytest

import capibara as cb
from capibara.multihost import exits

PAGE = (pathlib.Path(__file__).resolve().parents[2] / "docs" / "unsupported.md").read_text()


def names(start: str) -> set[str]:
    """What the last cell of the row that begins so has in backticks."""
    (row,) = [line for line in PAGE.splitlines() if line.startswith(f"| {start}")]
    return {*re.findall(r"`([^`]+)`", row.strip("| ").rpartition("|")[2].partition("; `Dataset.packing`")[0])}


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ("`/v1/chat", "openai.requests.ChatRequest"),
        ("`/v1/responses", "responses.requests.ResponsesRequest"),
        ("`/v1/messages", "anthropic.requests.MessagesRequest"),
    ],
)
def test_the_parameters_of_the_server_are_those_that_it_refuses(path, place):
    module, _, name = place.rpartition(".")
    body = getattr(importlib.import_module(f"capibara.inference.server.{module}"), name)
    assert names(path) == {*body.unsupported}


@pytest.mark.parametrize("word", ["nodes", "grouped", "private"])
def test_the_options_are_those_that_the_method_refuses(word):
    module = importlib.import_module(f"capibara.training.methods.{word}")
    method = {"nodes": "Nodes", "grouped": "Grouped", "private": "Private"}[word]
    trainer = cb.Trainer(
        model_dir="unused",
        steps=1,
        model=cb.DecoderConfig(vocab_size=384, embed_dim=32, num_layers=1, num_heads=2, mlp_dim=64, rope=cb.Rope()),
        plan=cb.Plan(batch_size=8),
        dataset=cb.Dataset(source=cb.StdlibSource(), vocabulary=cb.ByteVocabulary(), length=64),
        optimizer=cb.Optimizer(),
    )
    assert names(word) == {*getattr(module, method).unsupported(None, trainer)}


@pytest.mark.parametrize("name", ["model.onnx", "model.keras"])
def test_formats_that_are_not_read_are_refused(name, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_bytes(b"\x08\x07" * 64)
    main = importlib.import_module("capibara.cli.convert").main
    assert exits.run_verb(main, [f"--from={name}", "--to=out"]) == 2
    err = capfd.readouterr().err
    assert name in err and err.startswith("error: ") and err.count("\n") == 1, err
    assert not (tmp_path / "out").exists()
