"""Every file of examples/extend runs, resumes with the same bits, and does what it says: all that is new is in that file."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import pathlib
import shutil

import jax.numpy as jnp
import numpy as np
import pytest

from capibara import config
from capibara.core import devices
from capibara.core.types import UserError
from capibara.monitoring.metrics_file.loggers import read_metrics
from capibara.multihost import exits

FOLDER = pathlib.Path(__file__).resolve().parents[2] / "examples" / "extend"


@pytest.fixture
def run(monkeypatch, capfd, tmp_path):
    """(verb, name, arguments) -> what it printed; in the folder of the examples, the run folder elsewhere."""
    emulate = devices.emulate

    def emulate_as_before(count):
        with contextlib.suppress(RuntimeError):  # JAX has computed in this process: its devices stay as they are
            emulate(count)

    monkeypatch.setattr(devices, "emulate", emulate_as_before)
    monkeypatch.chdir(FOLDER)

    def run(verb, *args, code=0):
        capfd.readouterr()
        done = exits.run_verb(importlib.import_module(f"capibara.{verb}").main, list(args))
        out, err = capfd.readouterr()
        assert done == code, (out, err)
        return out + err

    return run


@pytest.fixture
def train(run, tmp_path):
    """(name, steps, arguments, folder) -> train metrics by step, of a run that ends there; a second call resumes."""

    def train(name, steps, *args, folder="run"):
        where = tmp_path / folder
        given = [f"--gin_file={name}.gin", "--emulate=8", f"--gin.MODEL_DIR={where}", f"--gin.TRAIN_STEPS={steps}"]
        run("train", *given, *args)
        return {r["step"]: r for r in read_metrics(str(where)) if r["kind"] == "train"}

    return train


def losses(metrics):
    return {step: record["loss"] for step, record in metrics.items()}


@pytest.fixture
def resumed(train, tmp_path):
    """(name) -> the metrics of a run of 4 steps, of which the last two, made again from step 2, are the same."""

    def resumed(name):
        whole = train(name, 4)
        shutil.rmtree(tmp_path / "run" / "checkpoints" / "4")
        assert sorted(whole) == [1, 2, 3, 4] and losses(train(name, 4)) == losses(whole)
        assert (tmp_path / "run" / "checkpoints" / "4").is_dir()
        return whole

    return resumed


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["my_optimizer", "my_source", "my_schedule", "my_tokenizer", "my_block", "my_model"])
def test_others_resume_too(resumed, name):
    resumed(name)


def test_method(resumed, run, tmp_path):
    """Its step, its metric and its end."""
    metrics = resumed("my_method")
    assert all(record["norm_before_signs"] < record["grad_norm"] for record in metrics.values())
    given = ["--gin_file=my_method.gin", "--emulate=8", f"--gin.MODEL_DIR={tmp_path / 'run'}"]
    out = run("train", *given, "--gin.TRAIN_STEPS=5", code=2)
    assert "the signs are spent at step 4: raise SignDescent.most_steps to continue" in out
    out = run("train", *given, "--gin.Trainer.ema_decay=0.9", code=2)
    assert "Trainer.ema_decay is not supported with Trainer.method (@SignDescent()): leave it out" in out


def trainer_of(name):
    from capibara.training.trainer import Trainer

    config.parse([f"{name}.gin"], ["MODEL_DIR=unused"])
    return config.build(Trainer)


def test_optimizer(train):
    """The planner counts its average, in 16 bits for the weights, and asks it which others it has."""
    import jax

    from capibara.core import tree
    from capibara.models import api
    from capibara.optim import decay_mask
    from capibara.planner.model import workload

    train("my_optimizer", 1)
    trainer = trainer_of("my_optimizer")
    assert type(trainer.optimizer).__name__ == "Signum" and trainer.optimizer.state_dtype == "bfloat16"
    model, work = api.build(trainer.model), workload.of_run(trainer, ["float32", "bfloat16"])
    one = dict.fromkeys(("data", "stage", "fsdp", "expert", "context", "tensor"), 1)
    params = tree.byte_count(model.abstract_params)
    assert work.state["float32"].on_device(one) == pytest.approx(params, abs=16)
    in_16_bits = sum(
        leaf.size
        for leaf, decays in zip(jax.tree.leaves(model.abstract_params), jax.tree.leaves(decay_mask(model.axes)))
        if decays
    )
    assert work.state["bfloat16"].on_device(one) == pytest.approx(params - 2 * in_16_bits, abs=16)
    halved = dict(one, fsdp=2)
    assert work.state["float32"].on_device(halved) < 0.6 * params


def test_both_are_called_from_python(monkeypatch):
    """As any other class; a field of a wrong type is refused as in Gin."""
    monkeypatch.chdir(FOLDER)
    trainer = trainer_of("my_optimizer")
    signum = type(trainer.optimizer)
    restarts = type(trainer_of("my_schedule").optimizer.schedule)
    built = signum(schedule=restarts(cycles=2), weight_decay=0.0).build(4, {"w": ("embed", "mlp")})
    weights = {"w": jnp.ones((2, 2))}
    updates, _ = built.update({"w": jnp.array([[3.0, -2.0], [0.5, -0.1]])}, built.init(weights), weights)
    np.testing.assert_allclose(updates["w"], [[-1e-3, 1e-3], [-1e-3, 1e-3]], rtol=1e-6)
    with pytest.raises(UserError, match="Trainer.optimizer .* must be OptimizerConfig"):
        dataclasses.replace(trainer, optimizer=restarts())


def test_a_verdict_of_the_compiler_is_of_the_users_code_too(monkeypatch):
    from capibara.planner.compiler import compile_cache

    monkeypatch.chdir(FOLDER)
    assert list(compile_cache.users_digest(trainer_of("my_optimizer"))) == ["my_optimizer"]
    assert compile_cache.users_digest(trainer_of("tiny")) == {}


def test_schedule(train):
    rates = [record["learning_rate"] for record in train("my_schedule", 4).values()]
    np.testing.assert_allclose(rates, [1e-2, 5e-3, 1e-2, 5e-3], rtol=1e-6)


def test_source(train):
    """Its topics, and a split that holds some out."""
    import pydoc_data.topics

    train("my_source", 1)
    source = trainer_of("my_source").dataset.source
    shown, held_out = source.open("train"), source.open("validation")
    texts = [shown[i] for i in range(len(shown))] + [held_out[i] for i in range(len(held_out))]
    assert sorted(texts) == sorted(pydoc_data.topics.topics.values()) and len(shown) > 3 * len(held_out)


def test_tokenizer(train, run, tmp_path, monkeypatch):
    """Nothing is lost; the run folder carries the words, and is read where there are no others."""
    vocabulary = trainer_of("my_tokenizer").dataset.vocabulary
    ids = vocabulary.encode("import née")
    assert vocabulary.decode(ids) == "import née" and len(ids) == 1 + 1 + len("née".encode())
    train("my_tokenizer", 1)
    assert (tmp_path / "run" / "tokenizer" / "words.txt").read_bytes() == (FOLDER / "data/words.txt").read_bytes()
    shutil.copytree(tmp_path / "run", tmp_path / "moved" / "run")
    monkeypatch.chdir(tmp_path / "moved")
    asked = ["--model_dir=run", "--prompt=import", "--gin.Sampling.max_new_tokens=2"]
    assert run("infer", *asked, "--trust_config").startswith("import")


@pytest.mark.parametrize("is_compared", [False, pytest.param(True, marks=pytest.mark.heavy)])
def test_store(train, tmp_path, is_compared):
    """What the first disk loses, the second has; a step that is removed is on neither."""
    from capibara.checkpoints.manager import Checkpointing, CheckpointReader

    mirror = f"--gin.MirroredStore.mirror={tmp_path / 'mirror'}"
    train("my_store", 4, mirror)
    folder = tmp_path / "run" / "checkpoints"
    shutil.rmtree(folder / "4" / "state")
    with CheckpointReader(str(tmp_path / "run"), Checkpointing()) as alone:
        assert alone.verified_step() == 2 and "is gone" in alone.corrupted[4]
    found = losses(train("my_store", 6, mirror, "--gin.Checkpointing.keep=1"))
    assert sorted(path.name for path in folder.glob("[0-9]*")) == ["6"]
    assert [path.name for path in pathlib.Path(f"{tmp_path / 'mirror'}{folder}").glob("[0-9]*")] == ["6"]
    assert len(found) == 6
    if is_compared:
        assert found == losses(train("my_store", 6, mirror, folder="whole"))


def test_tracker(resumed, tmp_path):
    told = resumed("my_tracker")
    lines = (tmp_path / "run" / "table.csv").read_text().splitlines()
    wanted = [f"{step},{told[step]['loss']},{told[step]['grad_norm']}" for step in (1, 2, 3, 4)]
    assert lines == [*wanted, *wanted[2:]]  # the last two steps were made again


def test_metric(train, run, tmp_path):
    import json

    from my_metric import numbers_apart

    assert numbers_apart(["4", "7"], ["it is 6.", "-"], most=9.0) == {"numbers_apart": [2.0, 9.0]}
    train("my_source", 1)
    out = tmp_path / "out.json"
    run(
        "evaluate",
        f"--model_dir={tmp_path / 'run'}",
        "--gin_file=my_metric.gin,my_source.gin",
        "--limit=8",
        f"--out={out}",
    )
    found = json.loads(out.read_text())["tasks"]["sums"]["metrics"]["numbers_apart"]
    assert 0 <= found["value"] <= 50


def test_reward(resumed):
    rewards = [record["reward"] for record in resumed("my_reward").values()]
    assert all(0 <= reward <= 1 for reward in rewards)


def evaluations(folder):
    return {r["step"]: r["loss"] for r in read_metrics(str(folder)) if r["kind"] == "eval"}


def test_loss(resumed, train, tmp_path):
    """It is below the cross entropy and evaluated as it is trained; with gamma 0 it is the cross entropy, up to rounding."""
    told = resumed("my_loss")
    assert all(0 < record["loss"] < record["nll"] for record in told.values())
    assert 0 < evaluations(tmp_path / "run")[4] < told[4]["nll"]
    once = ("--gin.Evaluation.every=2", "--gin.Evaluation.max_batches=2", "--gin.Checkpointing.every=0")
    focal, plain = (
        train("my_loss", 2, "--gin.FocalLoss.gamma=0.0", *once, folder="g"),
        train("tiny", 2, *once, folder="p"),
    )
    np.testing.assert_allclose([*losses(focal).values()], [*losses(plain).values()], rtol=1e-5)
    np.testing.assert_allclose(evaluations(tmp_path / "g")[2], evaluations(tmp_path / "p")[2], rtol=1e-5)


def test_batch_provider(train, resumed):
    """Without noise the run is that of a plain loss, bit by bit."""
    noisy = resumed("my_batches")
    clean = losses(train("my_batches", 2, "--gin.NoisyInputs.share=0.0", folder="clean"))
    assert clean == losses(train("tiny", 2, folder="plain"))
    assert losses(noisy)[1] != clean[1]


def test_decoder_block(train, run, tmp_path):
    """Its vectors are trained, each step of its cache is what training reads, and it writes text."""
    import jax

    from capibara.models import api

    train("my_block", 2)
    model = api.build(trainer_of("my_block").model)
    params = model.init(jax.random.key(0))
    assert model.abstract_params["layers"]["mlp_scale"].shape == (2, 16)
    np.testing.assert_array_equal(params["layers"]["attention_scale"], np.float32(0.2))
    tokens = jnp.arange(12, dtype=jnp.int32).reshape(2, 6)
    rows = {"tokens": tokens, "positions": jnp.tile(jnp.arange(6), (2, 1)), "segment_ids": jnp.ones_like(tokens)}
    whole = jax.jit(model.logits)(params, rows)
    last, cache = jax.jit(model.prefill)(
        params, {"tokens": tokens[:, :5], "counts": jnp.full(2, 5)}, model.start_cache(2, 6)
    )
    np.testing.assert_allclose(last, whole[:, 4], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(jax.jit(model.decode)(params, tokens[:, 5], cache)[0], whole[:, 5], rtol=1e-4, atol=1e-5)
    told = run(
        "infer",
        f"--model_dir={tmp_path / 'run'}",
        "--gin_file=my_block.gin",
        "--prompt=def",
        "--gin.Sampling.max_new_tokens=2",
    )
    assert told.startswith("def")


def test_model(train, run, tmp_path):
    """It sees no later token and no other document; the planner weighs it, and what cannot write says so."""
    import jax

    from capibara.models import api
    from capibara.planner.model import workload

    told = train("my_model", 4)
    assert told[4]["loss"] < told[1]["loss"]
    trainer = trainer_of("my_model")
    model = api.build(trainer.model)
    params = model.init(jax.random.key(0))
    tokens = jnp.array([[5, 6, 7, 8, 9, 10]], jnp.int32)
    rows = {
        "tokens": tokens,
        "positions": jnp.array([[0, 1, 2, 0, 1, 2]]),
        "segment_ids": jnp.array([[1, 1, 1, 2, 2, 2]]),
    }
    of_rows = jax.jit(lambda rows: model.hidden(params, rows)[0])
    hidden = of_rows(rows)
    changed = of_rows(rows | {"tokens": tokens.at[0, 1].set(99)})
    same = np.isclose(hidden, changed, atol=1e-6).all(axis=-1)[0]
    assert same.tolist() == [True, False, False, True, True, True]
    assert workload.of_run(trainer).model_flops_per_token > 6 * 2 * 3 * 16 * 32
    refused = run("infer", f"--model_dir={tmp_path / 'run'}", "--gin_file=my_model.gin", "--prompt=def", code=2)
    assert "MinGruConfig has no `read`" in refused


def test_hugging_face_family(run, tmp_path):
    """A folder comes in, may have buffers, trains as a run, and goes out with the same tensors under the same names."""
    import json

    from safetensors.numpy import load_file, save_file

    rng, D, F, V = np.random.default_rng(0), 16, 32, 258
    blocks = {
        "norm_1": (D,),
        "qkv": (3 * D, D),
        "out": (D, D),
        "norm_2": (D,),
        "gate": (F, D),
        "up": (F, D),
        "down": (D, F),
    }
    shapes = {f"blocks.{i}.{name}.weight": shape for i in range(2) for name, shape in blocks.items()}
    shapes |= {"embed.weight": (V, D), "norm.weight": (D,), "head.weight": (V, D)}
    tensors = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    folder = tmp_path / "folder"
    folder.mkdir()
    save_file(tensors | {"blocks.0.rotary_buffer": np.ones(4, np.float32)}, folder / "model.safetensors")
    sizes = {"vocab_size": V, "width": D, "depth": 2, "heads": 2, "mlp_width": F, "model_type": "my_decoder"}
    (folder / "config.json").write_text(json.dumps(sizes | {"architectures": ["MyDecoderForCausalLM"]}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(FOLDER / "data" / "tokenizer" / name, folder)
    gin = "--gin_file=my_family.gin"
    run("convert", gin, f"--from={folder}", f"--to={tmp_path / 'run'}", "--format=capibara")
    run("convert", gin, f"--from={tmp_path / 'run'}", f"--to={tmp_path / 'back'}", "--dtype=f32")
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == tensors.keys()
    for name, value in tensors.items():
        np.testing.assert_array_equal(back[name], value, err_msg=name)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["width"] == D
    told = run("infer", gin, f"--model={folder}", "--prompt=def", "--gin.Sampling.max_new_tokens=1")
    assert told.startswith("def")

    gin = "--gin_file=my_gguf_family.gin"
    run("convert", gin, f"--from={folder}", f"--to={tmp_path / 'mine.gguf'}", "--dtype=f32")
    run("convert", gin, f"--from={tmp_path / 'mine.gguf'}", f"--to={tmp_path / 'again'}", "--dtype=f32")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert again.keys() == tensors.keys()
    for name, value in tensors.items():
        np.testing.assert_array_equal(again[name], value, err_msg=name)
