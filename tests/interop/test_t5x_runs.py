"""`train` resumes from a T5X checkpoint, and `convert` writes a run as one."""

import json
import os

import jax
import numpy as np
import pytest

from capibara import config
from capibara.cli import convert, train
from capibara.core.types import UserError
from capibara.interop import open_model
from capibara.interop.hf import config as hf_config
from capibara.interop.t5x import read as t5x_read
from capibara.interop.t5x import write as t5x_write
from capibara.models import api
from capibara.models.api import DecoderConfig
from capibara.multihost import exits

GIN = """
Trainer.model_dir = %MODEL_DIR
Trainer.steps = %TRAIN_STEPS
Trainer.model = @DecoderConfig()
DecoderConfig.vocab_size = 384
DecoderConfig.embed_dim = 16
DecoderConfig.num_layers = 2
DecoderConfig.num_heads = 2
DecoderConfig.mlp_dim = 24
DecoderConfig.positions = "relative"
DecoderConfig.attention_scale = 1.0
DecoderConfig.activation = "geglu"
DecoderConfig.head = "separate"
DecoderConfig.dtype = "float32"
Trainer.dataset = @Dataset()
Dataset.source = @JsonlSource()
Dataset.vocabulary = @ByteVocabulary()
Dataset.length = 16
Dataset.workers = 0
Trainer.plan = @Plan()
Plan.batch_size = 8
Trainer.optimizer = @Optimizer()
Optimizer.name = "adafactor"
Optimizer.weight_decay = 0.0
Optimizer.momentum = 0.9
Optimizer.schedule = @FactorSchedule()
Evaluation.every = 0
Trainer.evaluation = @Evaluation()
Trainer.log_every = 1
"""


@pytest.fixture
def ready(tmp_path):
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps({"text": f"line {i}"}) + "\n" for i in range(40)))
    (tmp_path / "run.gin").write_text(GIN + f'JsonlSource.files = ("{tmp_path}/lines.jsonl",)\n')

    def trained(folder, steps, *bindings):
        config.reset()
        flags = [f"--gin.MODEL_DIR={tmp_path}/{folder}", f"--gin.TRAIN_STEPS={steps}", *bindings]
        return exits.run_verb(train.main, [f"--gin_file={tmp_path}/run.gin", *flags])

    def converted(source, target, form):
        config.reset()
        return exits.run_verb(
            convert.main, [f"--from={tmp_path}/{source}", f"--to={tmp_path}/{target}", f"--format={form}"]
        )

    return tmp_path, trained, converted


def steps_in(folder):
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [row["step"] for row in rows if any(name.endswith("loss") for name in row)]


@pytest.mark.parametrize("inputs", ["causal", "bidirectional"])
def test_a_decoder_of_t5x_has_no_other_form(inputs, ready, capsys):
    folder, _, converted = ready
    sizes = dict(vocab_size=64, embed_dim=16, num_layers=2, num_heads=2, mlp_dim=24, positions="relative")
    model = api.build(DecoderConfig(**sizes, attention_scale=1.0, logit_scale=0.25, inputs_attention=inputs))
    values, rng = hf_config.to_hf(model.config), np.random.default_rng(0)
    params = jax.tree.map(lambda s: rng.standard_normal(s.shape, np.float32), model.abstract_params)
    shapes, tensors = (
        of(model, values["model_type"]) for of in (open_model.hf_shapes, lambda *of: open_model.hf_tensors(params, *of))
    )
    t5x_write.save_t5x(str(folder / "t5x"), values, shapes, tensors, {}, dtype="float32")
    read = open_model.open_model(str(folder / "t5x"))
    assert hf_config.resolved(hf_config.from_hf(read.config)) == hf_config.resolved(model.config)
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    got = open_model.load_params(read, model, jax.tree.map(lambda _: here, params))
    jax.tree.map(np.testing.assert_array_equal, got, params)
    for form in ("hf", "pytorch"):
        assert converted("t5x", form, form) == 2
        told = f"--format={form} has no decoder with T5's relative positions: use t5x or capibara"
        assert told in capsys.readouterr().err
    assert converted("t5x", "again", "t5x") == 0
    os.remove(folder / "t5x" / "checkpoint_0" / "target.decoder.decoder_norm.scale" / "0")
    with pytest.raises(UserError, match="decoder_norm/scale is missing or corrupted"):
        open_model.load_params(open_model.open_model(str(folder / "t5x")), model, jax.tree.map(lambda _: here, params))


@pytest.mark.heavy
def test_a_run_goes_on_from_t5xs_form(ready, capsys):
    """test_t5x_training.py compares its states."""
    folder, trained, converted = ready
    assert trained("first", 2) == 0
    assert converted("first", "t5x", "t5x") == 0
    assert "in f32, Adafactor at step 2" in capsys.readouterr().out
    assert (folder / "t5x" / "checkpoint_2").is_dir()
    assert "adafactor.Adafactor:" in (folder / "t5x" / "config.gin").read_text()
    begin = (f"--gin.Trainer.init_from={folder}/t5x", "--gin.Trainer.init_with=state")
    assert trained("second", 3, *begin) == 0
    assert steps_in(folder / "second") == [3]
    capsys.readouterr()
    for number, (steps, bindings, told) in enumerate((
        (2, begin, "Trainer.steps (2) must be above the step of Trainer.init_from (2)"),
        (5, begin[1:], "Trainer.init_with is 'state', and Trainer.init_from is None"),
    )):  # fmt: skip
        code, error = trained(f"wrong{number}", steps, *bindings), capsys.readouterr().err
        assert (code, error.count("\n")) == (2, 1) and told in error


@pytest.mark.heavy
def test_from_t5xs_form_it_goes_on_as_from_its_own(ready):
    folder, trained, converted = ready
    assert trained("first", 3) == 0 and converted("first", "t5x", "t5x") == 0
    goes_on = (f"--gin.Trainer.init_from={folder}/t5x", "--gin.Trainer.init_with=state")
    assert trained("second", 5, *goes_on) == 0
    # Resumed from its own folder with the same data, it equals the run from T5X's form.
    own = (f"--gin.Trainer.init_from={folder}/first", "--gin.Trainer.init_with=state")
    assert trained("third", 5, *own) == 0
    assert converted("second", "t5x2", "t5x") == 0 and converted("third", "t5x3", "t5x") == 0
    two, three = (t5x_read.T5xModel(str(folder / name)) for name in ("t5x2", "t5x3"))
    for name in two.shapes():
        np.testing.assert_array_equal(two.read(name), three.read(name), err_msg=name)
    two, three = (t5x_read._leaves(model.path, "state") for model in (two, three))
    assert int(two["step"]) == 5
    jax.tree.map(np.testing.assert_array_equal, two, three)
    # From the parameters alone it is a new run, from step 0.
    assert trained("fourth", 5, f"--gin.Trainer.init_from={folder}/t5x") == 0
    assert steps_in(folder / "fourth")[0] == 1
