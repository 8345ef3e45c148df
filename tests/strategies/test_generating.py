"""The progress of generation in several processes."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import pytest

import capibara as cb
from capibara.strategies import generating
from capibara.strategies.generating import Generator


class Finishing:
    """An engine that finishes an answer a step."""

    def __init__(self, left):
        self.left = left

    @property
    def load(self):
        return (self.left,)

    def step(self):
        self.left -= self.left > 0
        return self.left > 0


@pytest.mark.parametrize(
    ("chips", "counts", "want"),
    [
        ("own", (5, 3), ["2 of 8", "4 of 8", "6 of 8", "7 of 8"]),
        (None, (3, 3), ["1 of 3", "2 of 3"]),
    ],
)
def test_progress_counts_the_answers_of_all_processes(processes, toy_tokenizer, monkeypatch, chips, counts, want):
    """Once each where they generate together."""
    monkeypatch.setattr(generating, "ASK_EVERY_STEPS", 1)
    source = cb.PromptJsonlSource(files=("nowhere.jsonl",), template=cb.ChatTemplate(tokenizer=toy_tokenizer))
    vocabulary = cb.TokenizerJsonVocabulary(path=toy_tokenizer)
    dataset = cb.Dataset(source=source, vocabulary=vocabulary, length=8, packing="none")

    def process():
        texts, count = [], counts[jax.process_index()]
        reporter = SimpleNamespace(check=lambda turn: None, progress=texts.append)
        generator = Generator(
            SimpleNamespace(dataset=dataset, model=None, reporter=reporter), cb.Grpo(rewards=(lambda *_: 0.0,))
        )
        generator._engine, generator._chips = Finishing(count), chips
        generator._finish("documents", count)
        return texts

    assert processes(2, process) == [[f"documents: {text} answers" for text in want]] * 2
