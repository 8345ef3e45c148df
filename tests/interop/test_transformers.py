"""Every family against transformers itself, in both directions; needs an environment with torch:

make test-peer PEER=transformers PEER_PYTHON=PATH/bin/python    (pip install torch "transformers==5.*" peft safetensors)
"""

import dataclasses
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from capibara import sharding
from capibara.core import tree
from capibara.data.packing.packing import Document, Packing, Window, empty_batch
from capibara.data.packing.pairs import Pair, Pairs, PairWindow
from capibara.data.tokenizers.vocabulary import ByteVocabulary
from capibara.inference.engine.engine import Engine, EngineConfig
from capibara.inference.sampling.sampling import Sampling
from capibara.interop import open_model
from capibara.interop.hf import config as hf_config
from capibara.interop.hf import folder as hf_folder
from capibara.interop.peft import folder as peft
from capibara.models import api
from capibara.models.api import Lora
from capibara.models.parts.config import ComputeDtype
from capibara.optim import Optimizer, Schedule
from capibara.sharding import Plan
from capibara.training.base import state as states
from capibara.training.step import make_train_step

HERE = pathlib.Path(__file__).resolve().parent
PYTHON = os.environ.get("TORCH_PYTHON")
DECODERS = (
    "gpt2", "gpt_neox", "gpt_neox_unbiased", "gpt_neox_tanh", "llama", "llama_linear", "llama_llama3", "llama_yarn",
    "llama_dynamic", "llama_biased", "llama_mlp_biased", "llama_all_biased", "smollm2", "mistral", "gemma", "gemma_biased",
    "gemma2", "gemma3", "gemma3n", "gemma3n_mix", "qwen2", "qwen3", "qwen3_biased", "phi3", "phi3_partial", "phi3_long", "phi3_short", "mixtral",
    "qwen3_moe", "gpt_oss",
)  # fmt: skip
OTHERS = ("t5", "t5_1_1", "t5_1_1_tied", "bert")
ATOL = 2e-4
ADAPTERS = {
    "llama": Lora(rank=4, alpha=8.0, targets=("query", "value", "up"), modules_to_save=("layers/mlp_norm/scale",)),
    "qwen3": Lora(rank=4, alpha=8.0, targets=("query", "out", "down"), dora=True),
    "gpt2": Lora(rank=4, alpha=8.0, targets=("all-linear",), rank_pattern=(("value", 3),)),
    "gpt_neox": Lora(rank=4, alpha=8.0, targets=("query", "key", "value", "down"), rslora=True),
    "phi3": Lora(rank=4, alpha=8.0, rank_pattern=(("value", 3),)),
    "phi3_partial": Lora(
        rank=4, alpha=8.0, targets=("all-linear",), fused=(("query", "key", "value"), ("gate", "up")), rslora=True
    ),
    "mistral": Lora(
        rank=4,
        alpha=8.0,
        targets=("layers/1/attention/*", "up"),
        rank_pattern=(("layers/0/mlp/up", 2), ("layers/1/attention/value", 3)),
        alpha_pattern=(("layers/0/mlp/up", 3.0),),
    ),
    "gemma3n": Lora(
        rank=4, alpha=8.0, targets=("all-linear",), rank_pattern=(("left", 3), ("layers/1/attention/key", 2))
    ),
    "qwen2": Lora(rank=4, alpha=8.0, targets=("query", "out"), modules_to_save=("query_bias",)),
    "mixtral": Lora(rank=4, alpha=8.0, targets=("all-linear",), rank_pattern=(("up", 3), ("down", 2)), rslora=True),
    "qwen3_moe": Lora(rank=4, alpha=8.0, targets=("query", "up", "router"), alpha_pattern=(("router", 3.0),)),
    "gpt_oss": Lora(rank=4, alpha=8.0, targets=("all-linear",), rank_pattern=(("up", 3), ("down", 2))),
}
EXPERTS = ("mixtral", "qwen3_moe")

pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="TORCH_PYTHON names no python with torch"),
    pytest.mark.strict_promotion,
]


def peer(*argv):
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "XLA_FLAGS")}
    done = subprocess.run(
        [PYTHON, HERE / "peer.py", *map(str, argv)],
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """For each family: transformers' folder, our folder written from it, and transformers' results with both."""
    folder = tmp_path_factory.mktemp("transformers")
    peer("write", folder)
    for name in (*DECODERS, *OTHERS):
        model, params, foreign = loaded(folder / name / "theirs")
        values = hf_config.to_hf(model.config, foreign.config)
        shapes = open_model.hf_shapes(model, values["model_type"])
        tensors = open_model.hf_tensors(params, model, values["model_type"])
        tensors = dict(tensors)
        for where, state_dict in (("ours", False), ("state_dict", True)):
            how = {"dtype": "float32", "state_dict": state_dict}
            hf_folder.save_hf(str(folder / name / where), values, shapes, tensors.items(), {}, **how)
        if name in ADAPTERS:
            model, params = adapted(name, model, params)
            peft.write_peft(str(folder / name / "adapter"), params, model, values["model_type"])
        if name in EXPERTS:
            fused = str(folder / name / "adapter_fused")
            peft.write_peft(fused, params, model, values["model_type"], fused_experts=True)
    peer("read", folder)
    return folder


def adapted(name, plain, base):
    """A model with adapters that change its results, and its parameters."""
    model = api.build(dataclasses.replace(plain.config, lora=ADAPTERS[name]))
    params, rng = jax.jit(model.adapt)(base, jax.random.key(0)), np.random.default_rng(0)
    drawn = lambda x: jax.numpy.asarray(0.25 * rng.standard_normal(x.shape, np.float32))  # noqa: E731
    # An `a` is zero beyond a layer's rank, and must stay zero.
    of = {"_lora/a": lambda x: jax.numpy.where(x != 0, drawn(x), 0.0), "_lora/b": drawn, "query_bias": lambda x: 2 * x}
    trained = lambda name: next((of[end] for end in of if name.endswith(end)), lambda x: x)  # noqa: E731
    return model, tree.map_with_names(lambda n, x: trained(n)(x) if model.config.lora.trains(n) else x, params)


def loaded(path):
    foreign = open_model.open_model(str(path))
    model = api.build(hf_config.from_hf(foreign.config, dtype=ComputeDtype.FLOAT32.value))
    here = SingleDeviceSharding(jax.devices()[0])
    return model, open_model.load_params(foreign, model, jax.tree.map(lambda _: here, model.abstract_params)), foreign


def batch_of(tokens, padding=0):
    segments = np.ones(tokens.shape, np.int32)
    segments[-1, tokens.shape[1] - padding :] = 0
    positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    return {"tokens": tokens.astype(np.int32), "segment_ids": segments, "positions": positions}


def golden_tokens(rows=2, length=24, seed=0, entries=96):
    return np.random.default_rng(seed).integers(0, entries, (rows, length))


def batch_to_learn(name, given):
    """transformers' training batch, in the layout of our training data."""
    tokens, labels = given["input_ids"].astype(np.int32), given["labels"].astype(np.int32)
    if name in DECODERS:
        return batch_of(tokens) | {"targets": labels, "weights": np.ones(labels.shape, np.float32)}
    sizes = {"length": labels.shape[1], "packing": Packing.NONE, "pad_id": 0}
    real = given["attention_mask"] == 1
    if name == "bert":
        rows = zip(tokens, labels, real, strict=True)
        texts = [(np.where(row < 0, read, row)[m], (row >= 0)[m], read[m]) for read, row, m in rows]
        window = Window(
            [Document(ids, hidden.astype(np.float32), 0, read=read) for ids, hidden, read in texts], **sizes
        )
        batch, more = empty_batch(2, labels.shape[1]), {"token_types": given["token_type_ids"].astype(np.int32)}
    else:
        rows = zip(tokens, labels, real, strict=True)
        pairs = [Pair(read[m], row[row >= 0]) for read, row, m in rows]
        window = PairWindow([Pairs(pairs)], encoder_length=tokens.shape[1], **sizes)
        batch, more = empty_batch(2, labels.shape[1], encoder_length=tokens.shape[1]), {}
    for row in range(2):
        window.fill(batch, row, row)
    assert batch["weights"].sum() == (labels >= 0).sum() < labels.size
    np.testing.assert_array_equal(batch["targets"][labels >= 0], labels[labels >= 0])
    return batch | more


def batch_to_answer(name, padding=7):
    """transformers' answer, and which of its logits are not padding."""
    if name in DECODERS:
        return batch_of(golden_tokens()), np.s_[:]
    if name == "bert":
        batch = batch_of(golden_tokens(), padding) | {"token_types": golden_tokens(seed=1, entries=2).astype(np.int32)}
        return batch, np.s_[:, : 24 - padding]
    encoder = batch_of(golden_tokens(length=32, seed=2), padding)
    return batch_of(golden_tokens()) | {f"encoder_{key}": value for key, value in encoder.items()}, np.s_[:]


def report(name, what, value):
    print(f"\n{name:>14}: {what} {value:.2e}", file=sys.stderr)


@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_answers_as_transformers_does(name, folder):
    model, params, _ = loaded(folder / name / "theirs")
    want = np.load(folder / name / "answers.npz")
    logits = jax.jit(model.logits)
    got = np.asarray(logits(params, batch_of(golden_tokens())))
    report(name, "logits differ by", np.abs(got - want["logits"]).max())
    np.testing.assert_allclose(got, want["logits"], rtol=0, atol=ATOL)
    ids = want["greedy"][:, :8]
    while ids.shape[1] < want["greedy"].shape[1]:
        padded = np.pad(ids, ((0, 0), (0, 16 - ids.shape[1])))
        best = np.asarray(logits(params, batch_of(padded)))[:, ids.shape[1] - 1].argmax(-1)
        ids = np.concatenate([ids, best[:, None]], axis=1)
    np.testing.assert_array_equal(ids, want["greedy"])


@pytest.mark.parametrize("name", OTHERS)
def test_an_encoder_answers_as_transformers_does(name, folder):
    model, params, _ = loaded(folder / name / "theirs")
    want = np.load(folder / name / "answers.npz")["logits"]
    batch, kept = batch_to_answer(name)
    got = np.asarray(jax.jit(model.logits)(params, batch))
    report(name, "logits differ by", np.abs(got - want)[kept].max())
    np.testing.assert_allclose(got[kept], want[kept], rtol=0, atol=ATOL)


@pytest.mark.parametrize("what, penalty", [("greedy", 1.0), ("penalized", 4.0)])
@pytest.mark.parametrize("name", ("t5", "t5_1_1", "t5_1_1_tied"))
def test_an_engine_generates_what_transformers_does(name, what, penalty, folder):
    model, params, _ = loaded(folder / name / "theirs")
    want, given = np.load(folder / name / "answers.npz")[what], np.load(folder / name / "labelled.npz")
    vocabulary, length = ByteVocabulary(), given["input_ids"].shape[1]  # its padding and end are T5's: 0 and 1
    engine = Engine(model, params, vocabulary, want.shape[1], EngineConfig(slots=2), encoder_length=length)
    texts = [row[mask == 1].tolist() for row, mask in zip(given["input_ids"], given["attention_mask"], strict=True)]
    assert [len(text) for text in texts] == [32, 32 - 7]
    asked = Sampling(temperature=0.0, max_new_tokens=want.shape[1] - 1, repetition_penalty=penalty)
    streams = [engine.submit(text, asked) for text in texts]
    for stream, (start, *row) in zip(streams, want.tolist(), strict=True):
        row = row[: row.index(vocabulary.eos_id)] if vocabulary.eos_id in row else row
        print(f"\n{name:>14}: {what}: {len(row)} tokens, {len(set(row))} different ones", file=sys.stderr)
        assert start == vocabulary.pad_id and len(row) >= 4
        assert what == "greedy" or len(set(row)) >= 4
        assert stream.result().tokens == row


@pytest.mark.parametrize("name", (*DECODERS, *OTHERS))
def test_transformers_answers_alike_with_what_we_write(name, folder):
    want, got = np.load(folder / name / "answers.npz"), np.load(folder / name / "read.npz")
    assert str(got["strange"]) == "{}"  # missing and unexpected keys, other shapes, and differences between state dicts
    report(name, "transformers with our folder differs by", np.abs(got["logits"] - want["logits"]).max())
    np.testing.assert_allclose(got["logits"], want["logits"], rtol=0, atol=ATOL)
    if name != "bert":
        np.testing.assert_array_equal(got["greedy"], want["greedy"])


@pytest.mark.parametrize(("name", "layout"), [(name, "") for name in ADAPTERS] + [(name, "_fused") for name in EXPERTS])
def test_peft_answers_alike_with_our_adapters(name, layout, folder):
    """Against PEFT in float64; the difference between its float32 and that is its own rounding."""
    plain, base, _ = loaded(folder / name / "theirs")
    model, params = adapted(name, plain, base)
    want = np.load(folder / name / f"adapted{layout}.npz")
    got = np.asarray(jax.jit(model.logits)(params, batch_of(golden_tokens())))
    assert np.abs(got - np.asarray(jax.jit(plain.logits)(base, batch_of(golden_tokens())))).max() > 0.1
    report(name, "PEFT's float32 differs from its float64 by", np.abs(want["float32"] - want["float64"]).max())
    report(name, "logits with adapters differ by", np.abs(got - want["float64"]).max())
    np.testing.assert_allclose(got, want["float64"], rtol=0, atol=ATOL)
    np.testing.assert_allclose(got, want["float32"], rtol=0, atol=ATOL)


@pytest.mark.parametrize("name", EXPERTS)
def test_adapters_of_experts_that_peft_saves_answer_alike(name, folder):
    plain, base, _ = loaded(folder / name / "theirs")
    lora, adapters = peft.read_peft(str(folder / name / "of_peft"), plain, name)
    model = api.build(dataclasses.replace(plain.config, lora=lora))
    got = np.asarray(jax.jit(model.logits)(tree.joined(adapters, base), batch_of(golden_tokens())))
    want = np.load(folder / name / "of_peft.npz")["logits"]
    assert len(lora.targets) == 4 + 3 + 1
    report(name, "logits with adapters of PEFT differ by", np.abs(got - want).max())
    np.testing.assert_allclose(got, want, rtol=0, atol=ATOL)


@pytest.mark.parametrize("name", (*DECODERS, *OTHERS))
def test_what_torch_saves_is_what_transformers_saves(name, folder):
    _, params, _ = loaded(folder / name / "pickled")
    jax.tree.map(np.testing.assert_array_equal, params, loaded(folder / name / "theirs")[1])


# Rounding moves t5_1_1_tied's losses further, in torch too: the training tests compare them in float64.
@pytest.mark.parametrize("name", [name for name in (*DECODERS, *OTHERS) if name != "t5_1_1_tied"])
@pytest.mark.standard_promotion
def test_the_first_losses_are_those_of_torch(name, folder):
    model, params, _ = loaded(folder / name / "theirs")
    if model.config.moe is not None:  # transformers adds a balance loss only if it is configured
        moe = dataclasses.replace(model.config.moe, balance_loss=0.0)
        model = api.build(dataclasses.replace(model.config, moe=moe))
    plan, batch = Plan(batch_size=2), batch_to_learn(name, np.load(folder / name / "labelled.npz"))
    mesh = sharding.make_mesh(plan, jax.devices()[:1])
    optimizer = Optimizer(schedule=Schedule(kind="constant", learning_rate=1e-4), weight_decay=0.0, b2=0.95)
    tx = optimizer.build(100, model.axes)
    shardings = states.state_shardings(model, tx, mesh, plan.rules, ema=False)
    state = states.init_state(model, tx, jax.random.key(0), ema=False)
    state = jax.device_put(dataclasses.replace(state, params=params), shardings)
    step = make_train_step(model, tx, optimizer.schedule.build(100), plan, mesh)
    step = jax.jit(step, out_shardings=(shardings, None))
    batch = sharding.global_batch(sharding.batch_sharding(mesh, plan.rules), batch)
    losses = []
    want = np.load(folder / name / "answers.npz")["losses"]
    for _ in want:
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    report(name, "losses differ by", np.abs(np.array(losses) - want).max())
    np.testing.assert_allclose(losses, want, rtol=0, atol=1e-4)
