"""`import capibara as cb`: the names of the package, and a run that Python describes."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

import capibara as cb
from capibara import config
from capibara.cli import train as verb
from capibara.config.search import defining_modules
from capibara.monitoring.metrics_file.loggers import read_metrics
from capibara.multihost import exits

# What Python alone has: a model, its data, and the verbs as functions.
PYTHON = """
Comparison LanguageModel PlannedRun SequentialStopping SweepResult TrainingResult compare convert cpo dashboard distill dpo evaluate expert_statistics finetune grpo index kto load merge model_config orpo plan prepare_executions prepare_index prepare_playbooks prepare_rope prepare_routing process_reward_model prove
read_run rewire reward_model serve simpo sweep train write_data
""".split()
CHECKOUT = pathlib.Path(__file__).resolve().parent.parent


def test_the_package_has_what_gin_files_can_name():
    listed = cb._listed()
    assert {name: (module, name) for name, module in defining_modules().items()}.items() <= listed.items()
    assert set(listed) - {*defining_modules()} == {"UserError", *PYTHON}
    assert {*listed} <= {*dir(cb)}
    for name, (module, own) in listed.items():
        assert getattr(cb, name) is getattr(importlib.import_module(module), own)


def test_other_names_are_unknown():
    with pytest.raises(AttributeError, match="module 'capibara' has no attribute 'Trainee'"):
        cb.Trainee  # noqa: B018


def test_names_are_imported_when_they_are_used_and_submodules_stay():
    code = (
        "import sys, capibara as cb; assert 'jax' not in sys.modules and 'gin' not in sys.modules; cb.Schedule(); "
        "import capibara.train, capibara.merge; from capibara.train import main; assert callable(cb.train) and callable(cb.merge); "
        "from capibara import config; print(config.__name__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(CHECKOUT)}
    )
    assert (done.stdout, done.stderr) == ("capibara.config\n", "")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(["river", "grass", "swims", "eats"], int(rng.integers(3, 40)))) for _ in range(99)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def trainer(folder, corpus, steps=3, **fields):
    model = cb.DecoderConfig(
        vocab_size=384, embed_dim=32, num_layers=1, num_heads=2, mlp_dim=64, dtype="float32", rope=cb.Rope(theta=500.0)
    )
    return cb.Trainer(
        model_dir=str(folder),
        steps=steps,
        model=model,
        plan=cb.Plan(batch_size=8, fsdp=4, data=2),
        dataset=cb.Dataset(
            source=cb.JsonlSource(files=(corpus,)), vocabulary=cb.ByteVocabulary(), length=64, workers=0
        ),
        optimizer=cb.Optimizer(schedule=cb.Schedule(kind="constant", learning_rate=1e-2)),
        evaluation=cb.Evaluation(every=0),
        log_every=1,
        **fields,
    )


def losses(folder):
    return {record["step"]: record["loss"] for record in read_metrics(str(folder)) if record["kind"] == "train"}


def test_a_run_of_python_is_that_of_its_gin_text(corpus, tmp_path, monkeypatch, capfd):
    """It trains, the command line resumes it, and both have the losses of a run from a Gin file."""
    monkeypatch.chdir(tmp_path)
    outcome = cb.train(trainer(tmp_path / "python", corpus))
    assert (outcome.step, outcome.reason) == (3, "finished")
    recorded = (tmp_path / "python" / "config.gin").read_text()
    assert "Rope.theta = 500.0" in recorded and "Plan.fsdp = 4" in recorded
    config.reset()
    assert exits.run_verb(verb.main, ["--gin_file=python/config.gin", "--gin.Trainer.steps=5"]) == 0
    (tmp_path / "whole.gin").write_text(config.written.text_of(trainer(tmp_path / "gin", corpus, steps=5)))
    assert exits.run_verb(verb.main, ["--gin_file=whole.gin"]) == 0
    found = losses(tmp_path / "python")
    assert sorted(found) == [1, 2, 3, 4, 5] and found == losses(tmp_path / "gin")
    loaded = cb.load(str(tmp_path / "python"))
    assert loaded.step == 5 and loaded.model.config.rope.theta == 500.0


def test_other_objects_are_configured_as_by_gin(corpus, tmp_path):
    cb.train(trainer(tmp_path / "run", corpus, steps=1), cb.Monitoring(callbacks=()))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    assert "Monitoring.callbacks = ()" in (tmp_path / "run" / "config.gin").read_text()


MODULE = """
import dataclasses
import capibara.config
from capibara.optim import Schedule, ScheduleConfig, StandardOptimizer
import optax

@capibara.config.configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnSgd(StandardOptimizer):
    schedule: ScheduleConfig = Schedule()
    momentum: float = 0.5

    def rule(self, axes):
        return optax.trace(self.momentum)
"""


def test_a_class_of_ones_own(corpus, tmp_path, monkeypatch, capfd):
    (tmp_path / "own_sgd.py").write_text(MODULE)
    (tmp_path / "own.gin").write_text("import own_sgd\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "own_sgd", raising=False)
    import own_sgd

    own = dataclasses.replace(trainer("run", corpus, steps=1), optimizer=own_sgd.OwnSgd(momentum=0.25))
    cb.train(own)
    assert "of this script" not in capfd.readouterr().out
    recorded = (tmp_path / "run" / "config.gin").read_text()
    assert "OwnSgd.momentum = 0.25" in recorded and "own_sgd" in recorded
    again = ["--gin_file=own.gin", "--gin_file=run/config.gin", "--gin.Trainer.steps=2"]
    assert exits.run_verb(verb.main, again) == 0 and sorted(losses("run")) == [1, 2]
    scripted = subprocess.run(
        [sys.executable, "-m", "capibara.train", again[1]],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(CHECKOUT)},
    )
    assert scripted.returncode == 2 and "no configurable named" in scripted.stderr
    assert scripted.stderr.endswith("the run imported own_sgd: name a Gin file before this one that imports it\n")


def test_a_class_that_no_module_defines_is_told(corpus, tmp_path, capfd):
    @config.configurable
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Inner(cb.Optimizer):
        pass

    own = dataclasses.replace(trainer(tmp_path / "run", corpus, steps=1), optimizer=Inner())
    cb.train(own)
    assert "note: Inner is of this script: only this process can read the run folder" in capfd.readouterr().out


@config.configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Growing(cb.Optimizer):
    factor: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "factor", 2 * self.factor)


def test_an_object_that_its_text_does_not_build_again_is_refused(corpus, tmp_path):
    own = dataclasses.replace(trainer(tmp_path / "run", corpus), optimizer=Growing(factor=2.0))
    with pytest.raises(cb.UserError, match="Growing.factor is 4.0, and Gin text makes 8.0 of it"):
        cb.train(own)
    assert not (tmp_path / "run").exists()


def test_mistakes_are_user_errors(corpus, tmp_path):
    with pytest.raises(cb.UserError, match="Trainer.steps is 0, must be from 1"):
        trainer(tmp_path, corpus, steps=0)
    for cls, wrong, hint in (
        (cb.Trainer, "step", "did you mean steps"),
        (cb.Plan, "batchsize", "did you mean batch_size"),
        (cb.Optimizer, "learning_rate", r"did you mean Schedule\.learning_rate"),
        (cb.Trainer, "learning_rate", r"did you mean Schedule\.learning_rate"),
        (cb.SampleText, "temperature", r"did you mean Sampling\.temperature"),
        (cb.ByteVocabulary, "zzz", "its parameters are extra_ids, size_multiple"),
    ):
        with pytest.raises(cb.UserError, match=f"{cls.__name__} has no parameter {wrong}: {hint}"):
            cls(**{wrong: 1})
    with pytest.raises(cb.UserError, match="Plan has no parameter tensr: did you mean tensor"):
        dataclasses.replace(cb.Plan(batch_size=8), tensr=2)
    wrong_name = subprocess.run(
        [sys.executable, "-c", "import capibara as cb; cb.Trainr"], capture_output=True, text=True
    )
    assert wrong_name.stderr.rstrip().endswith("has no attribute 'Trainr'. Did you mean: 'Trainer'?")
    with pytest.raises(cb.UserError, match="at most one of each class"):
        cb.train(trainer(tmp_path / "run", corpus), cb.Plan(batch_size=4))
    with pytest.raises(cb.UserError, match="SpanCorruption.noise_density is bound but nothing uses it"):
        cb.train(trainer(tmp_path / "run", corpus), cb.SpanCorruption(noise_density=0.3))
    for unused, name in (
        (cb.EngineConfig(slots=4), "EngineConfig.slots"),
        (cb.DashboardConfig(port=1), "DashboardConfig.port"),
    ):
        with pytest.raises(cb.UserError, match=f"{name} is bound but nothing uses it"):
            cb.train(trainer(tmp_path / "run", corpus), unused)
    for wrong, name in (("runs/x", "str"), (cb.Trainer, "type"), (cb.Plan(batch_size=8), "Plan"), (None, "NoneType")):
        with pytest.raises(cb.UserError, match=f"cb.train is given a {name}, must be given a cb.Trainer"):
            cb.train(wrong)
    with pytest.raises(cb.UserError, match="emulate is '8', must be a number of devices"):
        cb.train(trainer(tmp_path / "run", corpus), emulate="8")
    with pytest.raises(
        cb.UserError, match="--emulate is 3, and JAX has begun with 8 devices: emulate 8, or start another"
    ):
        cb.train(trainer(tmp_path / "run", corpus), emulate=3)
    assert not (tmp_path / "run").exists()
