"""Five steps of AdamW, for every family and kind of training, against transformers and PEFT.

In float32, as users train, and in float64 on both sides, where only the arithmetic can differ.

Needs an environment with torch: make test-peer PEER=transformers PEER_PYTHON=PATH/bin/python, which prints the table of the
differences.
"""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

from capibara import sharding
from capibara.core import tree
from capibara.interop import open_model
from capibara.interop.hf import config as hf_config
from capibara.interop.hf import folder as hf_folder
from capibara.interop.peft import folder as peft
from capibara.models import api
from capibara.models.api import Lora
from capibara.optim import Optimizer, Schedule
from capibara.sharding import Plan
from capibara.training.base import state as states
from capibara.training.step import make_train_step

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import double  # noqa: E402
import test_transformers as answers  # noqa: E402

PYTHON = os.environ.get("TORCH_PYTHON")
NAMES = (*answers.DECODERS, *answers.OTHERS)
LLAMA_LIKE = ["q_proj", "v_proj", "down_proj"]
TARGETS = {
    "gpt2": ["attn.c_proj", "c_fc"],
    "gpt_neox": ["dense", "dense_h_to_4h"],
    "gemma3n": [*LLAMA_LIKE, "linear_left", "per_layer_input_gate"],
    "phi3": ["o_proj", "down_proj"],
    "mixtral": ["q_proj", "o_proj"],
    "gpt_oss": ["q_proj", "o_proj"],
    "t5": ["q", "wo"],
    "bert": ["query", "intermediate.dense"],
}
FUSED = {
    "gpt2": dict(target_modules=["c_attn"]),
    "gpt_neox": dict(target_modules=["query_key_value"]),
    "phi3": dict(target_modules=["qkv_proj", "gate_up_proj"]),
    "mixtral": dict(target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"], target_modules=["q_proj"]),
    "qwen3_moe": dict(target_parameters=["mlp.experts.gate_up_proj"], target_modules=["q_proj", "k_proj"]),
    "gpt_oss": dict(target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"], target_modules=["q_proj"]),
}
# Further fields of LoraConfig, for one family.
MORE = {
    "llama": dict(
        lora_dora=dict(target_modules=["q_proj", "o_proj"], use_dora=True),
        lora_rslora=dict(target_modules=LLAMA_LIKE, use_rslora=True, modules_to_save=["input_layernorm", "lm_head"]),
        lora_layers=dict(target_modules=LLAMA_LIKE, layers_to_transform=[1]),
        lora_patterns=dict(
            target_modules=r"model\.layers\.(0\.self_attn\.[qk]_proj|\d\.mlp\.up_proj)",
            rank_pattern={"layers.1.mlp.up_proj": 2, r".*\.k_\w+": 3},
            alpha_pattern={r"layers\.[0-4]\.mlp\.\w+": 5, "q_proj": 1},
        ),
        lora_tokens=dict(target_modules=LLAMA_LIKE, trainable_token_indices=[7, 90, 3]),
    ),
    "qwen2": dict(
        lora_biases=dict(target_modules=["q_proj", "o_proj"], bias="lora_only"),
        lora_tokens=dict(target_modules=["q_proj", "o_proj"], trainable_token_indices=[7, 90, 3]),  # its head is tied
    ),
    "gpt2": dict(fused_biases=dict(target_modules=["c_attn"], bias="all")),
    "phi3": dict(fused_dora=dict(target_modules=["qkv_proj"], use_dora=True)),
}
COLUMNS = ("logits", "grad_norm", "losses", "parameters")
# grad_norm is relative. With float64 on both sides two differences remain: files keep parameters in float32, and
# torch's clipping adds 1e-6 to the norm, which shows in later losses.
EXACT = {"logits": 1e-10, "grad_norm": 1e-10, "losses": 1e-8, "parameters": 2.5e-7}
MOST = {"logits": 5e-5, "grad_norm": 2e-5, "losses": 2e-5, "parameters": 1e-5}
# Multiples of float32's own error in torch: models of random weights with many layers amplify it. For the norm the
# bound is the relative error of the whole gradient, which the norm's error cannot exceed.
ROUNDING = {"logits": 4, "grad_norm": 2, "losses": 4, "parameters": 4}
TABLE: dict[tuple[str, str], dict[str, float]] = {}
IN_FLOAT64: dict[tuple[str, str], dict[str, float]] = {}
OWN: dict[tuple[str, str], dict[str, float]] = {}

pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="TORCH_PYTHON names no python with torch"),
    pytest.mark.standard_promotion,
]


def family(name):
    if name in ("qwen3_moe", "gpt_oss"):
        return name
    return name.partition("_")[0] if not name.startswith("gpt_neox") else name[:9].rstrip("_")


def cases(name):
    """Each kind of training of a family: the initial folder, and LoraConfig's arguments."""
    of, common = family(name), dict(r=4, lora_alpha=8)
    if of == "gpt2":
        common["fan_in_fan_out"] = True
    plain = dict(target_modules=TARGETS.get(of, LLAMA_LIKE if of != "qwen3_moe" else ["q_proj", "v_proj"]))
    found = {"full": ("base", None), "lora": ("base", common | plain), "qlora": ("nf4", common | plain)}
    if name == "gemma3n_mix":
        return {"full": ("base", None)}  # adapters need layers of one width
    if of in FUSED and name in answers.DECODERS:
        found["fused"] = ("base", common | FUSED[of])
        found["fused_qlora"] = ("nf4", common | FUSED[of])
    if name in ("gpt_neox", "llama", "mistral", "qwen3", "phi3", "mixtral", "qwen3_moe", "gpt_oss"):
        found["tied"] = ("tied_base", None)
    return found | {how: ("base", common | more) for how, more in MORE.get(name, {}).items()}


ALL = [(name, how) for name in NAMES for how in cases(name)]


def peer(what, folder):
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "XLA_FLAGS")}
    argv = [PYTHON, str(HERE / "training_peer.py"), what, str(folder)]
    done = subprocess.run(argv, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 0, done.stdout[-3000:]


def loaded(path):
    return answers.loaded(path)


def without_balance(model):
    """transformers adds a balance loss only if it is configured."""
    if model.config.moe is None:
        return model
    moe = dataclasses.replace(model.config.moe, balance_loss=0.0)
    return api.build(dataclasses.replace(model.config, moe=moe))


def write_stored(base, folder):
    """The dequantized model of a base in 4 bits, as a folder: PEFT's QLoRA is LoRA beside the dequantized weights."""
    plain, params, foreign = loaded(base)
    model = api.build(dataclasses.replace(plain.config, lora=Lora(targets=("query",), base_dtype="nf4")))
    stored = jax.jit(lambda p: model.merge(model.adapt(p, jax.random.key(0))))(params)
    model_type = hf_config.text_part(foreign.config)["model_type"]
    shapes = open_model.hf_shapes(plain, model_type)
    tensors = open_model.hf_tensors(stored, plain, model_type)
    hf_folder.save_hf(str(folder), foreign.config, shapes, tensors, {}, dtype="float32")


@pytest.fixture(scope="module")
def folder(request, tmp_path_factory):
    """The peer program's training results for every selected case."""
    folder = tmp_path_factory.mktemp("training")
    peer("make", folder)
    asked = (item.callspec.params for item in request.session.items if item.path == request.path)
    for name, how in sorted({(one["name"], one["how"]) for one in asked}):
        base, lora = cases(name)[how]
        (folder / name / how).mkdir(parents=True)
        (folder / name / how / "case.json").write_text(json.dumps({"base": f"../{base}", "lora": lora}))
        if base == "nf4" and not (folder / name / "nf4").exists():
            write_stored(folder / name / "base", folder / name / "nf4")
    peer("train", folder)
    yield folder
    show("Largest differences to torch in float64; in brackets those of torch in float32:", TABLE)
    show("Largest differences with float64 on both sides:", IN_FLOAT64)


def show(title, table):
    print(f"\n{title}\n{'family':>18} {'training':>14} " + " ".join(f"{x:>19}" for x in COLUMNS), file=sys.stderr)
    for one, found in table.items():
        own = OWN.get(one) if table is TABLE else None
        numbers = (f"{found[x]:9.1e}" + (f" ({own[x]:.1e})" if own else 10 * " ") for x in COLUMNS)
        print("{:>18} {:>14} ".format(*one) + " ".join(numbers), file=sys.stderr)


def model_and_params(path, name, how):
    """The initial parameters, and the expected ones after the steps."""
    base, lora = cases(name)[how]
    plain, params, foreign = loaded(path.parent / ("base" if how.endswith("qlora") else base))
    plain = without_balance(plain)
    if lora is None:
        return plain, params, loaded(path / "after")[1]
    model_type = hf_config.text_part(foreign.config)["model_type"]
    read, adapters = peft.read_peft(str(path / "before"), plain, model_type)
    if how.endswith("qlora"):
        read = dataclasses.replace(read, base_dtype="nf4")
    model = api.build(dataclasses.replace(plain.config, lora=read))
    params = tree.joined(adapters, jax.jit(model.adapt)(params, jax.random.key(0)))
    again, after = peft.read_peft(str(path / "after"), plain, model_type)
    assert again == dataclasses.replace(read, base_dtype=again.base_dtype)
    return model, params, after


def learned(model, params, batch, steps):
    """Losses, the norm of the first gradient, and the trained parameters after the steps."""
    plan = Plan(batch_size=2)
    mesh = sharding.make_mesh(plan, jax.devices()[:1])
    optimizer = Optimizer(schedule=Schedule(kind="constant", learning_rate=1e-4), weight_decay=0.1, b2=0.95, eps=1e-6)
    tx = optimizer.build(100, model.trained(model.axes))
    shardings = states.state_shardings(model, tx, mesh, plan.rules, ema=False)
    state = states.init_state(model, tx, jax.random.key(0), ema=False)
    state = jax.device_put(dataclasses.replace(state, params=params), shardings)
    step = jax.jit(
        make_train_step(model, tx, optimizer.schedule.build(100), plan, mesh), out_shardings=(shardings, None)
    )
    batch = sharding.global_batch(sharding.batch_sharding(mesh, plan.rules), batch)
    found = []
    for _ in range(steps):
        state, metrics = step(state, batch)
        found.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    losses, norms = np.array(found).T
    return losses, norms[0], jax.tree.map(np.asarray, model.trained(state.params))


def apart(path, name, how, given=lambda values: values):
    """The differences of our five steps from theirs, by column; `given` converts the arrays before use."""
    model, params, after = model_and_params(path, name, how)
    params, want = given(params), np.load(path / "found.npz")
    batch, kept = answers.batch_to_answer(name)
    logits = np.asarray(jax.jit(model.logits)(params, batch))
    learn = answers.batch_to_learn(name, np.load(path.parent / "labelled.npz"))
    losses, norm, got = learned(model, params, given(learn), len(want["losses"]))
    assert jax.tree.structure(got) == jax.tree.structure(after)
    parameters = jax.tree.map(lambda a, b: np.abs(np.float32(a) - np.float32(b)).max(), got, after)
    return {
        "logits": np.abs(logits - want["logits"])[kept].max(),
        "grad_norm": abs(norm - want["grad_norm"]) / want["grad_norm"],
        "losses": np.abs(losses - want["losses"]).max(),
        "parameters": max(jax.tree.leaves(parameters)),
    }


@pytest.mark.parametrize(("name", "how"), ALL, ids=["-".join(one) for one in ALL])
def test_five_steps_are_those_of_transformers(name, how, folder):
    """In float32, as users train; its rounding may add as much error as in torch."""
    want = np.load(folder / name / how / "found.npz")
    found = TABLE[name, how] = apart(folder / name / how, name, how)
    own = OWN[name, how] = {column: float(want[f"own_{column}"]) for column in COLUMNS}
    most = {column: max(MOST[column], ROUNDING[column] * own[column]) for column in COLUMNS}
    assert {column: (value, most[column]) for column, value in found.items() if not value <= most[column]} == {}


@pytest.mark.parametrize(("name", "how"), ALL, ids=["-".join(one) for one in ALL])
def test_without_rounding_five_steps_are_the_same(name, how, folder, monkeypatch):
    with double.precision(monkeypatch):
        found = IN_FLOAT64[name, how] = apart(folder / name / how, name, how, double.wide)
    assert {column: value for column, value in found.items() if not value <= EXACT[column]} == {}
