"""The steps that no retention rule keeps."""

import pytest

from capibara.checkpoints.policy import Checkpointing
from capibara.checkpoints.retention import expendable
from capibara.core.types import UserError

STEPS = [30, 10, 20, 40, 50]


@pytest.mark.parametrize(
    ("rules", "gone"),
    [
        ({"keep": 2}, [10, 20, 30]),
        ({"keep": 9}, []),
        ({"keep": 1, "keep_every": 20}, [10, 30]),
        ({"keep": 1, "milestones": (10, 25)}, [20, 30, 40]),
        ({"keep": 1, "keep_best": 2, "scores": {10: 3.0, 20: 1.0, 30: 2.0, 50: 4.0}}, [10, 40]),
        ({"keep": 1, "keep_best": 1, "scores": {10: 1.0, 20: 1.0}}, [10, 30, 40]),
        ({"keep": 1, "keep_best": 3}, [10, 20, 30, 40]),
    ],
)
def test_what_goes(rules, gone):
    assert expendable(STEPS, **rules) == gone


def test_of_nothing_nothing_goes():
    assert expendable([], keep=1) == []


@pytest.mark.parametrize("name", ["keep", "keep_every", "every"])
def test_a_number_out_of_its_range_is_named_alone(name):
    with pytest.raises(UserError, match=rf"^Checkpointing\.{name} is -1, must be at least [01]"):
        Checkpointing(**{name: -1})
