"""What the validation split of a run says; its figures are held against training's in integration/test_evaluate.py."""

from __future__ import annotations

import types

import pytest

from capibara.core.types import UserError
from capibara.evaluation import validation
from capibara.objectives.preference import Dpo


def test_a_run_on_preferences_has_no_loss_of_texts():
    trainer = types.SimpleNamespace(loss=Dpo())
    subject = types.SimpleNamespace(trainer=trainer, mesh=None, about={"model": "runs/dpo"})
    with pytest.raises(UserError, match="runs/dpo was trained with Dpo, .* name tasks"):
        validation.validated(subject, None, lambda *_: None)
