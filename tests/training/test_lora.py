"""Training adapters: what changes, what does not, what is kept of it, and the same numbers on every mesh."""

import dataclasses
import functools
import pathlib
import shutil

import jax
import numpy as np
import pytest

from capibara import config, sharding
from capibara.checkpoints.manager import Checkpointing, CheckpointReader
from capibara.core import tree
from capibara.core.types import UserError
from capibara.kernels.cross_entropy.dispatch import cross_entropy
from capibara.models import api
from capibara.models.api import DecoderConfig, Lora
from capibara.optim import Optimizer, Schedule
from capibara.sharding import Plan
from capibara.training import assembly, run_folder
from capibara.training import initialization as given
from capibara.training.base import state as states
from capibara.training.run_folder import origin
from capibara.training.setup import set_up
from capibara.training.step import make_train_step
from capibara.training.trainer import Trainer

LORA = Lora(rank=4, targets=("all-linear",))
CONFIG = DecoderConfig(
    vocab_size=64,
    embed_dim=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    mlp_dim=64,
    dtype="float32",
    head="separate",
    lora=LORA,
)
OPTIMIZER = Optimizer(schedule=Schedule(learning_rate=1e-2, warmup_steps=2))
ONE = Plan(batch_size=8, fsdp=1)


def batch_of(rows=8, length=16):
    tokens = np.random.default_rng(0).integers(0, 64, (rows, length)).astype(np.int32)
    return {
        "tokens": tokens,
        "targets": (tokens * 3 + 1) % 64,
        "weights": np.ones((rows, length), np.float32),
        "segment_ids": np.ones_like(tokens),
        "positions": np.tile(np.arange(length, dtype=np.int32), (rows, 1)),
    }


@functools.cache
def new_state(of, ema):
    """On the host: every mesh would compile it anew."""
    model = api.build(of)
    tx = OPTIMIZER.build(100, model.trained(model.axes))
    return jax.device_get(jax.jit(functools.partial(states.init_state, model, tx, ema=ema))(jax.random.key(0)))


def run(of, plan, steps, devices=None, **options):
    """Losses of the first steps, the first state and the last one."""
    model, mesh = api.build(of), sharding.make_mesh(plan, devices)
    tx = OPTIMIZER.build(100, model.trained(model.axes))
    ema = options.get("ema_decay") is not None
    shardings = states.state_shardings(model, tx, mesh, plan.rules, ema=ema)
    step = make_train_step(model, tx, OPTIMIZER.schedule.build(100), plan, mesh, **options)
    step = jax.jit(step, donate_argnums=0, out_shardings=(shardings, None))
    state, losses, first = jax.device_put(new_state(of, ema), shardings), [], new_state(of, ema)
    rows = sharding.batch_sharding(mesh, plan.rules)
    batch = sharding.global_batch(rows, batch_of())
    for _ in range(steps):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return np.array(losses), first, jax.device_get(state)


@functools.cache
def one_device():
    return run(CONFIG, ONE, 6, jax.devices()[:1])


def test_adapters_learn_and_the_base_stays_bit_by_bit():
    losses, first, last = one_device()
    model = api.build(CONFIG)
    assert losses[-1] < 0.95 * losses[0]
    jax.tree.map(np.testing.assert_array_equal, model.frozen(first.params), model.frozen(last.params))
    changed = jax.tree.map(
        lambda a, b: not np.array_equal(a, b), model.trained(first.params), model.trained(last.params)
    )
    assert all(jax.tree.leaves(changed)) and len(jax.tree.leaves(changed)) == 14


def test_the_optimizer_keeps_nothing_of_the_base():
    _, first, _ = one_device()
    trained = tree.byte_count(api.build(CONFIG).trained(first.params))
    assert tree.byte_count(first.opt_state) <= 2 * trained + 16
    assert not any("mlp/up/" in f"{name}/" for name in tree.path_names(first.opt_state))


@pytest.mark.parametrize(
    ("changes", "sizes"),
    [
        (dict(), dict(fsdp=4, tensor=2, accumulation=2)),
        pytest.param(
            dict(layer_loop="unroll"),
            dict(fsdp=2, tensor=2, context=2, remat="minimal"),
            marks=pytest.mark.heavy,
        ),
        pytest.param(dict(), dict(stage=2, fsdp=2, pipeline_microbatches=2, tensor=2), marks=pytest.mark.heavy),
        pytest.param(dict(), dict(fsdp=8), marks=pytest.mark.heavy),
    ],
    ids=str,
)
def test_every_mesh_and_loop_learn_alike(changes, sizes):
    losses, _, last = run(dataclasses.replace(CONFIG, **changes), Plan(**{"batch_size": 8, **sizes}), 6)
    want, _, want_last = one_device()
    np.testing.assert_allclose(losses, want, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), last.params, want_last.params)


@functools.cache
def qlora():
    model = dataclasses.replace(CONFIG, lora=dataclasses.replace(LORA, base_dtype="nf4", double_quantization=True))
    return model, run(model, ONE, 6, jax.devices()[:1])


def test_adapters_learn_beside_a_base_in_four_bits():
    small, (losses, first, last) = qlora()
    model = api.build(small)
    assert losses[-1] < 0.95 * losses[0]
    jax.tree.map(np.testing.assert_array_equal, model.frozen(first.params), model.frozen(last.params))
    full = api.build(dataclasses.replace(CONFIG, embed_dim=128, mlp_dim=512, lora=None)).abstract_params
    wide = api.build(dataclasses.replace(small, embed_dim=128, mlp_dim=512)).abstract_params
    assert tree.byte_count(wide) <= 0.35 * 4 * tree.byte_count(full)


@pytest.mark.heavy
def test_a_base_in_blocks_learns_alike_on_a_mesh():
    small, (losses, *_) = qlora()
    sharded, *_ = run(small, Plan(batch_size=8, fsdp=1, tensor=2), 6, jax.devices()[:2])
    np.testing.assert_allclose(sharded, losses, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["nf4", "bfloat16"])
def test_the_backward_pass_keeps_no_copy_of_the_base(dtype):
    """Nothing that the layers' scans put by is as large as a weight, neither in floating point nor in blocks."""
    of = dataclasses.replace(CONFIG, embed_dim=128, mlp_dim=512, lora=Lora(rank=4, base_dtype=dtype))
    model = api.build(of)
    batch = {k: jax.ShapeDtypeStruct(v.shape, v.dtype) for k, v in batch_of(rows=1, length=8).items()}

    def grad(params, batch):
        frozen = model.frozen(params)
        loss = lambda p: (model.hidden(tree.joined(p, frozen), batch)[0] ** 2).sum()  # noqa: E731
        return jax.grad(loss)(model.trained(params))

    jaxpr = jax.make_jaxpr(grad)(model.abstract_params, batch).jaxpr
    scans = [equation.outvars for equation in jaxpr.eqns if equation.primitive.name == "scan"]
    sizes = [out.aval.size for outs in scans for out in outs]
    assert len(scans) >= 2 and max(sizes) > of.num_layers * 8 * 128  # activations are there
    assert max(sizes) < of.num_layers * 128 * 128 // 2


@pytest.fixture
def make_lora_trainer(make_trainer):
    """(changes of Trainer's fields) -> a run of adapters that saves at every second step."""
    base = make_trainer()
    model = dataclasses.replace(base.model, lora=LORA)
    changes = dict(model=model, checkpointing=dataclasses.replace(base.checkpointing, every=2))
    return lambda **more: make_trainer(**{**changes, **more})


def files_written(model_dir, step):
    """Array -> bytes of the chunks that the folder of a step holds itself."""
    folder = pathlib.Path(model_dir) / "checkpoints" / str(step) / "state"
    arrays = (path for path in folder.iterdir() if path.is_dir())
    return {path.name: sum(f.stat().st_size for f in path.iterdir()) for path in arrays}


def test_a_run_from_given_weights_resumes_bit_for_bit_without_them(make_trainer, make_lora_trainer, train, tmp_path):
    source = str(tmp_path / "base")
    train = functools.partial(train, devices=jax.devices()[:2])
    plan = Plan(batch_size=8, fsdp=2)
    base = train(make_trainer(model_dir=source, steps=2, plan=plan)).state
    options = dict(steps=4, init_from=source, ema_decay=0.5, plan=plan)
    whole = train(make_lora_trainer(model_dir=str(tmp_path / "whole"), **options))
    model = api.build(make_lora_trainer().model)
    jax.tree.map(np.testing.assert_array_equal, model.frozen(whole.started.params), base.params)
    jax.tree.map(np.testing.assert_array_equal, model.frozen(whole.state.params), base.params)
    assert tree.path_names(whole.state.ema) == tree.path_names(model.trained(whole.state.params))
    jax.tree.map(np.testing.assert_array_equal, model.frozen(whole.state.eval_params), base.params)
    jax.tree.map(np.testing.assert_array_equal, model.trained(whole.state.eval_params), whole.state.ema)
    halves = dict(options, model_dir=str(tmp_path / "halves"))
    train(make_lora_trainer(**dict(halves, steps=2)))
    shutil.rmtree(source)
    resumed = train(make_lora_trainer(**halves))
    assert resumed.start_step == 2
    jax.tree.map(np.testing.assert_array_equal, resumed.state, whole.state)
    assert [resumed.losses[step] for step in (3, 4)] == [whole.losses[step] for step in (3, 4)]
    first, second = (files_written(halves["model_dir"], step) for step in (2, 4))
    frozen = {f"params.{name.replace('/', '.')}" for name in tree.path_names(base.params)}
    assert frozen <= first.keys() and not frozen & second.keys()
    assert sum(second.values()) < 0.6 * sum(first.values())
    check_inference_restores(halves["model_dir"], resumed.state)


def check_inference_restores(model_dir, state):
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=one), state.params)
    with CheckpointReader(model_dir, Checkpointing()) as checkpoints:
        _, params = checkpoints.newest_params(target)
    jax.tree.map(np.testing.assert_array_equal, params, state.eval_params)


def test_full_fine_tuning_begins_from_what_a_function_reads(make_trainer):
    trainer = make_trainer(init_from="elsewhere")
    made = jax.jit(api.build(trainer.model).init)(jax.random.key(5))
    told = []

    class Load:
        origin = {"config.json": b"{}", "LICENSE": b"of others"}

        def __init__(self, path, model, merge):
            told.append(path)

        def __call__(self, target):
            told.extend(jax.tree.leaves(target))
            return jax.tree.map(lambda s, x: jax.device_put(np.asarray(x), s.sharding), target, made)

    run, initial = set_up(trainer, load=Load)
    with run:
        assert origin.read(trainer.model_dir) == Load.origin
        state = assembly.begin(run, initial).state
        path, *leaves = told
        assert initial.step == 0 and path == "elsewhere" and len(leaves) == len(jax.tree.leaves(made))
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.params), made)
        assert jax.tree.leaves(state.params)[0].sharding == leaves[0].sharding


def test_a_foreign_model_is_looked_at_before_the_step_is_compiled(make_trainer):
    asked = []

    def load(path, model, merge):
        asked.append(f"looked at {path}")
        raise UserError("another model")

    status = lambda text: asked.append(text)  # noqa: E731
    with pytest.raises(UserError, match="another model"):
        set_up(make_trainer(init_from="elsewhere"), load=load, status=status)
    assert asked == ["looked at elsewhere"]
    params = jax.jit(api.build(make_trainer().model).init)(jax.random.key(0))
    run_folder.save(make_trainer().model_dir, params, "")
    assert (
        given.reader(make_trainer(init_from="elsewhere"), api.build(make_trainer().model), load) is None
    )  # it resumes


def test_a_run_begins_from_one_with_adapters_merged(make_trainer, tmp_path):
    source, plain = str(tmp_path / "source"), make_trainer().model
    lora = Lora(rank=3, alpha=5.0, targets=("query", "down"), dora=True, modules_to_save=("final_norm/scale",))
    model = api.build(dataclasses.replace(plain, lora=lora))
    drawn = tree.map_with_names(
        lambda name, x: jax.random.normal(jax.random.key(len(name)), x.shape) if model.config.lora.trains(name) else x,
        jax.jit(model.init)(jax.random.key(5)),
    )
    gin = ["Lora.dora = True", "DecoderConfig.lora = @Lora()", "Lora.rank = 3", "Lora.alpha = 5.0"]
    gin += ['Lora.targets = ("query", "down")', 'Lora.modules_to_save = ("final_norm/scale",)']
    run_folder.save(source, drawn, "\n".join(gin) + "\n")
    want = jax.jit(model.merge)(drawn)
    run, initial = set_up(make_trainer(init_from=source, model_dir=str(tmp_path / "run")))
    with run:
        params = assembly.begin(run, initial).state.params
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-6), jax.device_get(params), want)
        assert {len(x.sharding.device_set) for x in jax.tree.leaves(params)} == {8}


@pytest.mark.parametrize(
    ("where", "told"), [("nowhere", "'nowhere'.* holds no checkpoint"), ("", "init_from is empty")]
)
def test_a_source_without_a_checkpoint_is_refused(make_trainer, where, told):
    with pytest.raises(UserError, match=told):
        set_up(make_trainer(init_from=where))


def test_a_frozen_head_has_no_gradient_and_the_hidden_states_the_same():
    rng = np.random.default_rng(0)
    hidden, head = (rng.normal(size=shape).astype(np.float32) for shape in ((2, 8, 16), (32, 16)))
    targets, weights = rng.integers(0, 32, (2, 8)), np.ones((2, 8), np.float32)

    def gradients(trains_head):
        loss = lambda h, w: cross_entropy(h, w, targets, weights, z_loss=1e-3, trains_head=trains_head)[0]  # noqa: E731
        return jax.jit(jax.grad(loss, (0, 1)))(hidden, head)

    (want, of_head), (got, none) = gradients(True), gradients(False)
    np.testing.assert_array_equal(got, want)
    assert np.abs(of_head).max() > 0 and not np.any(none)


def test_the_run_file_configures_adapters_beside_given_weights():
    files = ["models/tiny.gin", "tasks/text.gin", "runs/lora.gin"]
    given = ["MODEL_DIR='x'", "TRAIN_STEPS=1", "FILES=('x',)", "INIT_FROM='runs/base'", "Lora.base_dtype='nf4'"]
    config.parse(files, given, [])
    trainer = config.build(Trainer)
    assert (trainer.init_from, trainer.model.lora.base_dtype) == ("runs/base", "nf4")
    assert trainer.saves.incremental and api.build(trainer.model).trained(api.build(trainer.model).axes)
