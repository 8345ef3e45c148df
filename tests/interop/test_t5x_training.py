"""Training as in T5X: its networks with its Adafactor, and its learning rates.

t5x.json holds T5X's own results (t5x_peer.py wrote it). Where T5X is installed everything is compared:

make test-peer PEER=t5x PEER_PYTHON=PATH/bin/python    (T5X is github.com/google-research/t5x)
"""

import dataclasses
import functools
import itertools
import json
import os
import pathlib
import shutil
import subprocess
import sys
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import serialization
from jax.sharding import SingleDeviceSharding

from capibara import sharding
from capibara.core import tree
from capibara.core.types import UserError
from capibara.interop import open_model
from capibara.interop.hf import config as hf_config
from capibara.interop.t5x import names as t5x_names
from capibara.interop.t5x import states as t5x_states
from capibara.interop.t5x import write as t5x_write
from capibara.models import api
from capibara.models.api import DecoderConfig, EncoderDecoderConfig
from capibara.objectives.base import Normalization, of_cross_entropy
from capibara.optim import Adafactor, FactorSchedule, Optimizer
from capibara.sharding import Plan, RematPolicy
from capibara.training.base import state as states
from capibara.training.step import make_train_step

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import t5x_peer  # noqa: E402
from t5x_peer import CASES  # noqa: E402

PYTHON = os.environ.get("T5X_PYTHON")
T5X = json.loads((HERE / "t5x.json").read_text())
SIZES = dict(vocab_size=64, embed_dim=16, num_heads=4, head_dim=4, mlp_dim=24, dtype="float32")
RELATIVE = dict(positions="relative", attention_scale=1.0)
MODELS = {
    "t5": EncoderDecoderConfig(**SIZES, num_layers=2, num_encoder_layers=2, activation="relu", head="tied"),
    "t5_1_1": EncoderDecoderConfig(**SIZES, num_layers=2, num_encoder_layers=1),
    "scalable_t5": EncoderDecoderConfig(**SIZES, num_layers=3, num_encoder_layers=2, relative_tables="each_layer"),
    "decoder_only": DecoderConfig(**SIZES, **RELATIVE, num_layers=3, activation="geglu", head="separate"),
    "prefix_lm": DecoderConfig(
        **SIZES, **RELATIVE, num_layers=2, activation="relu", logit_scale=0.25, inputs_attention="bidirectional"
    ),
    "t5_offset": EncoderDecoderConfig(**SIZES, num_layers=1, num_encoder_layers=1),
    "scalable_t5_map": EncoderDecoderConfig(**SIZES, num_layers=2, num_encoder_layers=2, relative_tables="each_layer"),
    "t5_options": EncoderDecoderConfig(**SIZES, num_layers=1, num_encoder_layers=1),
}
PLAIN = Optimizer(name="adafactor", schedule=FactorSchedule(**t5x_peer.LEARNING_RATE), weight_decay=0.0, clip_norm=None)
OPTIMIZERS = {
    "t5": PLAIN,
    "t5_1_1": dataclasses.replace(PLAIN, factored_min_size=8),
    "scalable_t5": dataclasses.replace(PLAIN, adafactor=Adafactor(factoring="stacked")),
    "decoder_only": dataclasses.replace(PLAIN, factored_min_size=16),
    "prefix_lm": PLAIN,
    "t5_offset": dataclasses.replace(PLAIN, factored_min_size=8, adafactor=Adafactor(step_offset=1000)),
    "scalable_t5_map": dataclasses.replace(
        PLAIN,
        factored_min_size=16,
        momentum=0.9,
        adafactor=Adafactor(
            factor_map=(
                ("attention/(query|key|value)", ("batch", "row", "batch", "column")),
                ("attention/out", ("batch", "column", "column", "row")),
                ("mlp/(gate|up)", ("batch", "row", "column")),
                ("mlp/down", ("batch", "none", "none")),
                ("relative_bias", ("none", "none", "none")),
            )
        ),
    ),
    "t5_options": dataclasses.replace(
        PLAIN,
        factored_min_size=16,
        momentum=0.9,
        clip_norm=0.1,
        adafactor=Adafactor(
            decay_rate=0.7,
            clipping_threshold=0.5,
            max_parameter_scale=0.9,
            weight_decay_rate=1e-3,
            weight_decay_rate_lr_exponent=2.0,
        ),
    ),
}
Z_LOSS = {"t5_1_1": 1e-3, "prefix_lm": 1e-3}
RTOL = 1e-5


def in_their_form(model, tensors):
    """T5X's name -> array, from tensors with Hugging Face's names."""
    values = hf_config.to_hf(model.config)
    shapes, scanned = open_model.hf_shapes(model, values["model_type"]), values["model_type"] == "umt5"
    heads = values["num_heads"] if scanned else None
    rows = t5x_names.rows_of(values)
    by_name = {row.hf.name: row for row in rows.values()}
    return dict(t5x_write._named(tensors, shapes, by_name, np.dtype(np.float32), heads))


def by_their_names(model, params):
    return in_their_form(model, open_model.hf_tensors(params, model, hf_config.to_hf(model.config)["model_type"]))


def begun(model, folder):
    """T5X's initial parameters, from a checkpoint in its form."""
    zeros = jax.tree.map(lambda s: np.zeros(s.shape, np.float32), model.abstract_params)
    drawn = {name: t5x_peer.drawn(name, value.shape) for name, value in by_their_names(model, zeros).items()}
    folder.mkdir()
    content = serialization.msgpack_serialize({"target": t5x_peer.nested(drawn)})
    (folder / "checkpoint").write_bytes(content)
    here = jax.tree.map(lambda _: SingleDeviceSharding(jax.devices()[0]), model.abstract_params)
    return open_model.load_params(open_model.open_model(str(folder)), model, here)


def batch(case="t5"):
    given = t5x_peer.batch(case)
    if CASES[case][0] == "decoder_only":
        return {
            "tokens": given["decoder_input_tokens"],
            "targets": given["decoder_target_tokens"],
            "weights": given["decoder_loss_weights"],
            "segment_ids": given["decoder_segment_ids"],
            "positions": given["decoder_positions"],
            "prefix": given["decoder_causal_attention"],
        }
    return {
        "tokens": given["decoder_input_tokens"],
        "targets": given["decoder_target_tokens"],
        "weights": given["decoder_loss_weights"],
        "segment_ids": (given["decoder_target_tokens"] > 0).astype(np.int32),
        "encoder_tokens": given["encoder_input_tokens"],
        "encoder_segment_ids": (given["encoder_input_tokens"] > 0).astype(np.int32),
    }


def shapes_of(model):
    abstract = model.abstract_params
    return dict(zip(tree.path_names(abstract), (leaf.shape for leaf in jax.tree.leaves(abstract)), strict=True))


def places_of(model):
    values = hf_config.to_hf(model.config)
    scanned = values["model_type"] == "umt5"
    return list(t5x_states.locations(shapes_of(model), t5x_names.rows_of(values), scanned=scanned))


def states_by_their_names(model, opt_state):
    """The kept states, in T5X's form."""
    of_params = t5x_states.to_t5x(opt_state, shapes_of(model), places_of(model))
    flat = {f"{name}/{part}": value for name, of in of_params for part, value in of.items()}
    return {name: value for name, value in flat.items() if value.shape != (1,)}


@functools.cache
def training(case):
    """(the model, its optimizer, the jitted step)."""
    model, optimizer = api.build(MODELS[case]), OPTIMIZERS[case]
    tx, plan = optimizer.build(t5x_peer.STEPS, model.axes), Plan(batch_size=2)
    mesh = sharding.make_mesh(plan, jax.devices()[:1])
    schedule, z_loss = optimizer.schedule.build(t5x_peer.STEPS), Z_LOSS.get(case, 0.0)
    objective = of_cross_entropy(model, z_loss, normalization=Normalization.SUM)  # T5X's default
    step = jax.jit(make_train_step(model, tx, schedule, plan, mesh, objective=objective))
    return model, tx, step


def went(step, state, case, steps):
    """The losses of that many steps, and the state after each."""
    for _ in range(steps):
        state, metrics = step(state, batch(case))
        yield float(metrics["loss"] + metrics["z_loss"]) * float(metrics["tokens"]), state


@functools.cache
def trained(case, folder):
    """The losses, and the parameters and Adafactor's states after the steps that T5X's results cover."""
    model, tx, step = training(case)
    params = begun(model, folder)
    begun_at = jnp.asarray(t5x_peer.BEGUN.get(case, 0), jnp.int32)
    opt_state = t5x_states.at_step(tx.init(params), begun_at)
    state = states.TrainState(step=begun_at, params=params, opt_state=opt_state, ema=None)
    losses, kept = [], {}
    for number, (loss, now) in enumerate(went(step, state, case, t5x_peer.STEPS), 1):
        losses.append(loss)
        if number in t5x_peer.KEPT:
            state_here = jax.device_get(now)
            own = by_their_names(model, state_here.params), states_by_their_names(model, state_here.opt_state)
            kept[number] = dict(zip(("params", "states"), own))
    return losses, kept


def but(heavy, values):
    """All values; some of them only in the heavy tests."""
    return [pytest.param(value, marks=pytest.mark.heavy) if value in heavy else value for value in values]


@pytest.mark.parametrize(
    "case", but(["t5_1_1", "scalable_t5", "t5_offset"], MODELS)
)  # the optimizer is decoder_only's, the loss prefix_lm's
def test_losses_parameters_and_states_are_those_of_t5x(case, tmp_path):
    losses, kept = trained(case, tmp_path / "t5x")
    np.testing.assert_allclose(losses, T5X[case]["losses"], rtol=RTOL)
    for step, found in kept.items():
        for what, arrays in found.items():
            want = T5X[case][what][str(step)]
            assert arrays.keys() == want.keys()
            for name, value in arrays.items():
                got, where = t5x_peer.sums(name, value), f"{step} {name}"
                np.testing.assert_allclose(got, want[name], rtol=RTOL, atol=RTOL * want[name][1], err_msg=where)


def resumed(model, tx, path):
    """The state of a run that resumes from a T5X checkpoint."""
    loader = open_model.loader(str(path), model)
    here = SingleDeviceSharding(jax.devices()[0])
    params = loader(
        jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=here), model.abstract_params)
    )
    step, opt_state = loader.optimizer(jax.eval_shape(tx.init, params))
    opt_state = jax.tree.map(jnp.asarray, opt_state)
    return states.TrainState(step=jnp.asarray(step, jnp.int32), params=params, opt_state=opt_state, ema=None)


def stored(model, state, folder, optimizer):
    """Our run's checkpoint in T5X's form."""
    values = hf_config.to_hf(model.config)
    model_type = values["model_type"]
    shapes, tensors = open_model.hf_shapes(model, model_type), open_model.hf_tensors(state.params, model, model_type)
    moments = dict(t5x_states.to_t5x(state.opt_state, shapes_of(model), places_of(model)))
    kept = t5x_states.Stored(int(state.step), moments, t5x_states.gin_of(optimizer))
    t5x_write.save_t5x(str(folder), values, shapes, tensors, {}, dtype="float32", optimizer=kept)


@pytest.mark.parametrize(
    "case",
    ["scalable_t5_map", "prefix_lm", *(pytest.param(c, marks=pytest.mark.heavy) for c in ("t5_1_1", "t5_options"))],
)
def test_a_run_goes_on_from_a_checkpoint_of_t5x_with_its_losses(case, tmp_path):
    """After 3 steps the run is stored in T5X's form, with T5X's states (see above), and read again."""
    model, tx, step = training(case)
    params = begun(model, tmp_path / "begun")
    state = states.TrainState(step=jnp.zeros((), jnp.int32), params=params, opt_state=tx.init(params), ema=None)
    *_, (_, state) = went(step, state, case, 3)
    stored(model, jax.device_get(state), tmp_path / "run", OPTIMIZERS[case])
    assert (tmp_path / "run" / "checkpoint_3").is_dir()
    losses = [loss for loss, _ in went(step, resumed(model, tx, tmp_path / "run"), case, 17)]
    np.testing.assert_allclose(losses, T5X[case]["losses"][3:], rtol=RTOL)


def test_states_of_another_factoring_are_refused(tmp_path):
    model, tx, step = training("t5_1_1")
    params = begun(model, tmp_path / "begun")
    state = states.TrainState(step=jnp.zeros((), jnp.int32), params=params, opt_state=tx.init(params), ema=None)
    stored(model, state, tmp_path / "run", OPTIMIZERS["t5_1_1"])
    for changes in (dict(factored_min_size=128), dict(momentum=0.9)):
        other = dataclasses.replace(OPTIMIZERS["t5_1_1"], **changes).build(t5x_peer.STEPS, model.axes)
        with pytest.raises(UserError, match="this run's Adafactor factors otherwise"):
            resumed(model, other, tmp_path / "run")
    written_alone = dataclasses.replace(OPTIMIZERS["t5_1_1"], name="adamw").build(t5x_peer.STEPS, model.axes)
    with pytest.raises(UserError, match="T5X supports only Adafactor's state"):
        resumed(model, written_alone, tmp_path / "run")


def normalized():
    """All normalizations for a decoder, whose rows hold documents; the other ones for an encoder-decoder."""
    for name, case in itertools.product(t5x_peer.NORMALIZATIONS, t5x_peer.NORMALIZED_CASES):
        short = case != "t5_options" or name in ("places", "documents")
        yield pytest.param(name, case, marks=() if short else pytest.mark.heavy)


@pytest.mark.parametrize("name, case", list(normalized()))
def test_smoothed_and_normalized_losses_are_those_of_t5x(name, case, tmp_path):
    """With z-loss; and the gradient's norm, which shows the divisor.

    A decoder's rows hold several documents, of which only the targets have loss.
    """
    model = api.build(MODELS[case])
    params, plan = begun(model, tmp_path / "t5x"), Plan(batch_size=2)
    tx = Optimizer(name="sgd", clip_norm=None).build(1, model.axes)
    normalization = 233.0 if name == "233.0" else Normalization(name)
    mesh = sharding.make_mesh(plan, jax.devices()[:1])
    objective = of_cross_entropy(model, normalization=normalization, **t5x_peer.NORMALIZED)
    step = jax.jit(make_train_step(model, tx, lambda step: 0.0, plan, mesh, objective=objective))
    state = states.TrainState(step=jnp.zeros((), jnp.int32), params=params, opt_state=tx.init(params), ema=None)
    _, metrics = step(state, batch(case))
    tokens, positions, documents = (17, 20, 2) if case == "t5_options" else (14, 40, 3)
    assert metrics["tokens"] == tokens
    weight = documents if name == "documents" else tokens
    divisor = {"sum": 1, "positions": positions, "233.0": 233}.get(name, weight)
    loss = float(metrics["smoothed_loss"] + metrics["z_loss"]) * weight / divisor
    want = T5X[t5x_peer.NORMALIZED_CASES[case]][name]
    np.testing.assert_allclose([loss, metrics["grad_norm"]], want, rtol=RTOL)


@pytest.mark.parametrize("case", t5x_peer.DROPPED)
def test_dropout_is_applied_where_t5x_applies_it(case, tmp_path, monkeypatch):
    """With masks that depend on their shapes alone the loss is the same: every mask is applied, and has T5X's shape."""
    config = EncoderDecoderConfig(**SIZES, num_layers=2, num_encoder_layers=2) if case == "t5" else MODELS[case]
    model = api.build(dataclasses.replace(config, **t5x_peer.DROPOUT))
    params, objective = begun(model, tmp_path / "t5x"), of_cross_entropy(model, 0.0)
    monkeypatch.setattr(jax.random, "bernoulli", t5x_peer.mask)
    loss = jax.jit(lambda params: objective.sums(params, batch(case), RematPolicy(), jnp.int32(1))[0])(params)
    np.testing.assert_allclose(loss, T5X["dropout"][case], rtol=RTOL)


@pytest.mark.parametrize("name", t5x_peer.SCHEDULES)
def test_learning_rates_are_those_of_t5x(name):
    schedule = FactorSchedule(**t5x_peer.SCHEDULES[name]).build(t5x_peer.SCHEDULE_STEPS)
    got = jax.vmap(schedule)(jnp.asarray(t5x_peer.SHOWN_STEPS, jnp.int32))
    np.testing.assert_allclose(got, T5X["schedules"][name], rtol=1e-6)


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        (dict(factors="constant * rsqrt"), "factors has 'rsqrt', which is no factor: did you mean rsqrt_decay"),
        (dict(base_learning_rate=0.0), "base_learning_rate is 0.0, must be finite and above 0"),
        (dict(warmup_steps=0), "warmup_steps is 0, must be at least 1"),
        (dict(step_offset=-1), "step_offset is -1"),
        (dict(min_learning_rate=11.0), "min_learning_rate is 11.0, must be from 0 to 10"),
    ],
)
def test_bad_factors(fields, word):
    with pytest.raises(UserError, match=word):
        FactorSchedule(**fields)


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """T5X's own results, where it is installed."""
    if not PYTHON:
        pytest.skip("T5X_PYTHON names no python with t5x")
    folder = tmp_path_factory.mktemp("t5x")
    peer("train", folder)
    return folder


def peer(*argv):
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "XLA_FLAGS")}
    done = subprocess.run(
        [PYTHON, HERE / "t5x_peer.py", *map(str, argv)],
        env=env | {"JAX_PLATFORMS": "cpu"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, done.stdout[-3000:]


def written(case, folder):
    """A checkpoint that we write from T5X's initial state."""
    model = api.build(MODELS[case])
    params, values = begun(model, folder / f"{case}_theirs"), hf_config.to_hf(model.config)
    model_type = values["model_type"]
    shapes, tensors = open_model.hf_shapes(model, model_type), open_model.hf_tensors(params, model, model_type)
    t5x_write.save_t5x(str(folder / case), values, shapes, tensors, {}, dtype="float32")


@pytest.mark.skipif(not PYTHON, reason="T5X_PYTHON names no python with t5x")
def test_t5x_trains_from_what_we_write(tmp_path):
    for case in t5x_peer.READ:
        written(case, tmp_path)
    peer("read", tmp_path)
    for case in t5x_peer.READ:
        np.testing.assert_allclose(np.load(tmp_path / f"{case}.npz")["losses"], T5X[case]["losses"][:3], rtol=RTOL)


@pytest.mark.skipif(not PYTHON, reason="T5X_PYTHON names no python with t5x")
def test_t5x_goes_on_where_our_runs_stood(tmp_path):
    for case in t5x_peer.GO_ON:
        model, tx, step = training(case)
        params = begun(model, tmp_path / f"{case}_begun")
        state = states.TrainState(step=jnp.zeros((), jnp.int32), params=params, opt_state=tx.init(params), ema=None)
        *_, (_, state) = went(step, state, case, t5x_peer.STORED_AT)
        stored(model, jax.device_get(state), tmp_path / case, OPTIMIZERS[case])
    peer("go_on", tmp_path)
    for case in t5x_peer.GO_ON:
        got = np.load(tmp_path / f"{case}.npz")["losses"]
        print(f"{case}: T5X goes on from ours: losses {np.abs(got / T5X[case]['losses'][3:] - 1).max():.1e}")
        np.testing.assert_allclose(got, T5X[case]["losses"][t5x_peer.STORED_AT :], rtol=RTOL)


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("packed")
    with zipfile.ZipFile(HERE / "t5x_stored.zip") as archive:
        archive.extractall(folder)
    return folder


def test_every_form_in_which_t5x_stores_a_run_is_read(packed, tmp_path):
    """Parameters and states equal T5X's after 3 steps, and a run resumes with its losses."""
    case, kept = t5x_peer.PACKED, str(t5x_peer.STORED_AT)
    model, tx, step = training(case)
    for form in t5x_peer.FORMS:
        state = resumed(model, tx, packed / form / case)
        assert int(state.step) == t5x_peer.STORED_AT
        own = {"params": by_their_names(model, state.params), "states": states_by_their_names(model, state.opt_state)}
        for what, arrays in own.items():
            want = T5X[case][what][kept]
            assert arrays.keys() == want.keys()
            for name, value in arrays.items():
                np.testing.assert_allclose(t5x_peer.sums(name, value), want[name], rtol=1e-6, err_msg=f"{form} {name}")
    losses = [loss for loss, _ in went(step, state, case, 3)]
    np.testing.assert_allclose(losses, T5X[case]["losses"][3:6], rtol=RTOL)
    shutil.copy(packed / "msgpack" / case / "checkpoint_3", tmp_path / "alone")
    assert int(resumed(model, tx, tmp_path / "alone").step) == t5x_peer.STORED_AT
    content = serialization.msgpack_restore((tmp_path / "alone").read_bytes())
    for other, told in (
        ({"target": content["target"]}, "has no optimizer state: set Trainer.init_with = 'weights'"),
        ({"params": content["target"]}, "is a file, and neither a .gguf nor a state of T5X in msgpack"),
        (content | {"state": content["state"] | {"step": "three"}}, "is no T5X checkpoint"),
        (content | {"state": content["state"] | {"step": -1}}, "has the step -1"),
    ):
        (tmp_path / "other").write_bytes(serialization.msgpack_serialize(other))
        with pytest.raises(UserError, match=told) as error:
            resumed(model, tx, tmp_path / "other")
        assert "\n" not in str(error.value)


@pytest.fixture(scope="module")
def of_t5x(tmp_path_factory):
    """Runs after 3 steps, as T5X itself stores them, where it is installed."""
    if not PYTHON:
        pytest.skip("T5X_PYTHON names no python with t5x")
    folder = tmp_path_factory.mktemp("stored")
    peer("write", folder)
    return folder


@pytest.mark.parametrize("case", t5x_peer.GO_ON)
@pytest.mark.parametrize("form", t5x_peer.FORMS)
def test_our_runs_go_on_where_those_of_t5x_stood(form, case, of_t5x):
    model, tx, step = training(case)
    losses = [loss for loss, _ in went(step, resumed(model, tx, of_t5x / form / case), case, 17)]
    print(
        f"{case}: we go on from its {form}: losses {np.abs(losses / np.array(T5X[case]['losses'][3:]) - 1).max():.1e}"
    )
    np.testing.assert_allclose(losses, T5X[case]["losses"][t5x_peer.STORED_AT :], rtol=RTOL)


@pytest.mark.parametrize("case", t5x_peer.READ)
def test_what_we_write_has_the_state_that_its_adafactor_begins_with(case, tmp_path):
    written(case, tmp_path)
    content = serialization.msgpack_restore((tmp_path / case / "checkpoint_0" / "checkpoint").read_bytes())["optimizer"]
    states = t5x_peer.flat(content["state"]["param_states"])
    kernel = (
        "encoder/encoder/attention/out/kernel" if case == "scalable_t5" else "encoder/layers_0/attention/out/kernel"
    )
    found = {name: states[f"{kernel}/{name}"].shape for name in ("v_row", "v_col", "v", "m")}
    if case == "scalable_t5":  # [heads, layers, features, embed], for all sizes
        assert found == {"v_row": (2, 16), "v_col": (4, 2, 4), "v": (1,), "m": (1,)}
        assert states["encoder/encoder/relpos_bias/rel_embedding/v"].shape == (4, 2, 32)
    else:
        assert found == {"v_row": (1,), "v_col": (1,), "v": (16, 16), "m": (1,)}
    assert {name.rpartition("/")[0] for name in states} == set(t5x_names_of(content["target"]))


def t5x_names_of(target, prefix=""):
    """The names of the arrays; each one is a specification."""
    for name, inner in target.items():
        if "driver" in inner:
            yield prefix + name
        else:
            yield from t5x_names_of(inner, f"{prefix}{name}/")


@pytest.mark.parametrize("case", MODELS)
def test_every_value_is_that_of_t5x(case, answers, tmp_path):
    want, (losses, kept) = np.load(answers / f"{case}.npz"), trained(case, tmp_path / "t5x")
    np.testing.assert_allclose(losses, want["losses"], rtol=RTOL)
    worst = {}
    for step, found in kept.items():
        for what, arrays in found.items():
            for name, value in arrays.items():
                theirs = want[f"{step}/{name}"]
                scale = np.sqrt(np.mean(np.square(theirs)))
                worst[step, what] = max(worst.get((step, what), 0), np.abs(value - theirs).max() / scale)
    loss = np.abs(np.array(losses) / want["losses"] - 1).max()
    shown = ", ".join(f"{what} {step}: {difference:.1e}" for (step, what), difference in worst.items())
    print(f"{case}: losses {loss:.1e}; over their RMS {shown}")
    assert max(worst.values()) < 10 * RTOL


@pytest.mark.parametrize("name", t5x_peer.SCHEDULES)
def test_every_learning_rate_is_that_of_t5x(name, answers):
    schedule = FactorSchedule(**t5x_peer.SCHEDULES[name]).build(t5x_peer.SCHEDULE_STEPS)
    got = jax.vmap(schedule)(jnp.arange(t5x_peer.SCHEDULE_STEPS, dtype=jnp.int32))
    np.testing.assert_allclose(got, np.load(answers / "schedules.npz")[name], rtol=1e-6)
