"""How the answers of a step are drawn."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

import capibara as cb
from capibara.strategies.distillation.batches import TeacherBatches


class Drawing:
    """Answers each prompt with two tokens, and keeps the options."""

    def __init__(self):
        self.samplings = {}

    def share(self, items):
        return items

    def streams(self, prompts, samplings, what):
        self.samplings = {prompt.row: samplings(prompt.row)[0] for prompt in prompts}
        completion = SimpleNamespace(tokens=[7, 8], drawn=[-1.0, -1.0], end=None)
        return {prompt.row: [SimpleNamespace(result=lambda: completion)] for prompt in prompts}


def drawn(step):
    """The options of a step, and its rows."""
    dataset = cb.Dataset(source=cb.StdlibSource(), vocabulary=cb.ByteVocabulary(), length=8, packing="none")
    rows = {name: value for name, value in dataset.empty_batch(3).items() if name != "numbers"}
    for row, length in enumerate((2, 6)):  # the last row is padding
        rows["tokens"][row] = np.arange(8) + 10 * row
        rows["weights"][row, length - 1 :] = 1.0
    batches = TeacherBatches.__new__(TeacherBatches)
    batches._run = SimpleNamespace(seed=3, dataset=dataset)
    batches._options = SimpleNamespace(sampling=cb.Sampling(max_new_tokens=4, temperature=1.0))
    batches._first_row = lambda rows: 0
    drawing = Drawing()
    rows = batches._with_drawn_answers(drawing, rows, step)
    return drawing.samplings, rows


def test_each_row_and_step_has_a_seed_and_room():
    seeds = []
    for step in (1, 2, 1):
        samplings, rows = drawn(step)
        assert {row: sampling.max_new_tokens for row, sampling in samplings.items()} == {0: 4, 1: 2}
        seeds.append([sampling.seed for sampling in samplings.values()])
        np.testing.assert_array_equal(rows["targets"][:2], [[1, 7, 8, 0, 0, 0, 0, 0], [11, 12, 13, 14, 15, 7, 8, 0]])
        np.testing.assert_array_equal(rows["weights"].sum(1), [2, 2, 0])
    assert seeds[0] == seeds[2] and len({*seeds[0], *seeds[1]}) == 4
