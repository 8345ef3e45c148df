"""Distillation as in TRL's GKDTrainer: its five steps in trl_distillation.json.

trl_distillation.json is the steps.json of test_transformers_distillation.py (trl 1.16 made the committed file), with how far
the parameters moved. The teacher's weights are half as large again as those of the student.
"""

import json
import pathlib
import sys

import jax
import pytest

from capibara.checkpoints.manager import Checkpointing
from capibara.data.chat.conversations import ChatJsonlSource
from capibara.data.chat.template import ChatTemplate
from capibara.data.dataset import Dataset
from capibara.data.tokenizers.vocabulary import TokenizerJsonVocabulary
from capibara.optim import Optimizer, Schedule
from capibara.sharding import Plan
from capibara.strategies.distillation.loss import Distillation
from capibara.strategies.distillation.teacher import Teacher
from capibara.training.base.options import Evaluation
from capibara.training.trainer import Trainer

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import test_trl  # noqa: E402
import test_trl_rollouts  # noqa: E402

STEPS, SCALE = 5, 1.5
LOSSES = {  # our options, and TRL's beta and temperature
    "forward_kl": (dict(beta=0.0), (0.0, 1.0)),
    "reverse_kl": (dict(beta=1.0), (1.0, 1.0)),
    "jsd": (dict(beta=0.5), (0.5, 1.0)),
    "jsd_uneven": (dict(beta=0.1), (0.1, 1.0)),
    "temperature": (dict(beta=0.5, temperature=2.0), (0.5, 2.0)),
}
IN_CI = ("forward_kl", "temperature")
RTOL = {"loss": 2e-5, "grad_norm": 2e-5}

pytestmark = pytest.mark.standard_promotion


def write_chats(folder):
    """One conversation a line, of the chosen answers of test_trl."""
    test_trl.write_pairs(folder / "pairs.jsonl")
    pairs = map(json.loads, (folder / "pairs.jsonl").read_text().splitlines())
    chats = [{"prompt": pair["prompt"], "completion": pair["chosen"]} for pair in pairs]
    (folder / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))


def trained(name, params, folder, tokenizer, monkeypatch):
    """The metrics of our steps with the loss of this name, from these parameters, and the parameters after them."""
    (folder / "teacher").mkdir(exist_ok=True)
    teacher = Teacher(path=str(folder / "teacher"), model=test_trl.MODEL)
    files = (str(folder / "chats.jsonl"),)
    source = ChatJsonlSource(files=files, validation_files=files, template=ChatTemplate(tokenizer=tokenizer))
    vocabulary = TokenizerJsonVocabulary(path=tokenizer)
    schedule = Schedule(kind="constant", learning_rate=1e-3, warmup_steps=0, warmup_fraction=0.0)
    trainer = Trainer(
        model_dir=str(folder / f"run_{name}"),
        steps=STEPS,
        model=test_trl.MODEL,
        init_from="the student",
        plan=Plan(batch_size=test_trl.ROWS),
        dataset=Dataset(source=source, vocabulary=vocabulary, length=48, packing="none", shuffle=False),
        optimizer=Optimizer(schedule=schedule, weight_decay=0.0, b2=0.95, eps=1e-6),
        evaluation=Evaluation(every=0),
        checkpointing=Checkpointing(every=0),
        loss=Distillation(teacher=teacher, **LOSSES[name][0]),
        log_every=1,
    )
    others = {teacher.path: jax.tree.map(lambda x: SCALE * x, params)}
    return test_trl.steps_of(trainer, params, 1, monkeypatch, others)


def too_large(differences):
    return {name: value for name, value in differences.items() if not value <= RTOL[name]}


@pytest.mark.parametrize("name", [x if x in IN_CI else pytest.param(x, marks=pytest.mark.heavy) for x in LOSSES])
def test_a_teacher_is_learned_from_as_by_trl(name, toy_tokenizer, tmp_path, monkeypatch):
    want = json.loads((HERE / "trl_distillation.json").read_text())[name]
    write_chats(tmp_path)
    got, params = trained(name, test_trl.drawn(), tmp_path, toy_tokenizer, monkeypatch)
    assert too_large(test_trl_rollouts.apart(got, want["steps"])) == {}
    assert test_trl_rollouts.moved(params, test_trl.drawn()) == pytest.approx(want["moved"], rel=2e-4)
