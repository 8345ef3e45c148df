"""capibara convert of adapters: a run's into a PEFT folder, and a PEFT folder's merged into its base model."""

import dataclasses
import json
import os
import re

import jax
import numpy as np
import pytest

from capibara import config, sharding
from capibara.cli import convert
from capibara.cli.composition.models import load_run
from capibara.core import tree
from capibara.core.types import UserError
from capibara.interop import gin_of, open_model
from capibara.interop import peft_runs as adapters
from capibara.interop.hf import config as hf_config
from capibara.interop.hf import folder as hf_folder
from capibara.interop.peft import fields
from capibara.interop.peft import folder as peft
from capibara.models import api
from capibara.models.api import DecoderConfig, Lora
from capibara.multihost import exits
from capibara.training import initialization, run_folder
from capibara.training.base import state as states

SIZES = dict(vocab_size=272, embed_dim=32, num_layers=2, num_heads=4, mlp_dim=48, dtype="float32")
LLAMA = DecoderConfig(**SIZES, num_kv_heads=2, norm_eps=1e-5, head="separate")
GPT2 = DecoderConfig(
    **SIZES | dict(mlp_dim=128, norm="layer", bias="all", activation="gelu", positions="learned", max_length=64)
)
LORAS = {
    "llama": Lora(rank=2, alpha=4.0, targets=("query", "down"), rank_pattern=(("down", 3),)),
    "saved": Lora(rank=2, alpha=4.0, modules_to_save=("layers/mlp_norm/scale", "output")),
    "dora": Lora(rank=2, alpha=4.0, dora=True, targets=("all-linear",)),
    "rslora": Lora(rank=4, alpha=4.0, rslora=True),
    "tokens": Lora(rank=2, alpha=4.0, trainable_tokens=(9, 3, 271)),
    "phi3": Lora(rank=2, alpha=4.0),  # parts of a fused weight, whose names are another architecture's
    "gpt2": Lora(rank=2, alpha=4.0, targets=("query", "key", "value", "down")),
}


def run(*argv):
    config.reset()
    return exits.run_verb(convert.main, [str(arg) for arg in argv])


def drawn(shapes):
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda s: jax.numpy.asarray(0.3 * rng.standard_normal(s.shape, np.float32)), shapes)


def made(folder, name):
    """A Hugging Face folder and a run folder with adapters trained from it: its model and the merged parameters."""
    plain = api.build(GPT2 if name == "gpt2" else LLAMA)
    base = drawn(plain.abstract_params)
    like = {"model_type": name, "pad_token_id": 0}
    values = hf_config.to_hf(plain.config, like if name in ("phi3", "gpt2") else None, dtype="float32")
    shapes = open_model.hf_shapes(plain, values["model_type"])
    tensors = open_model.hf_tensors(base, plain, values["model_type"])
    hf_folder.save_hf(f"{folder}/base", values, shapes, tensors, {}, dtype="float32")
    model = api.build(dataclasses.replace(plain.config, lora=LORAS[name]))
    params = tree.joined(drawn(model.trained(jax.jit(model.adapt)(base, jax.random.key(0)))), base)
    os.makedirs(f"{folder}/run")
    own = gin_of.run(model.config, f"{folder}/run", {}) + f'\nTrainer.init_from = "{folder}/base"\n'
    run_folder.save(f"{folder}/run", params, own.replace("Dataset.length = 1024", "Dataset.length = 64"))
    return plain, jax.jit(model.merge)(params)


def read(path):
    foreign = open_model.open_model(str(path))
    return {name: foreign.read(name) for name in foreign.shapes()}


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.heavy) if x in ("rslora", "gpt2") else x for x in LORAS]
)
def test_adapters_of_a_run_go_out_and_are_merged_to_the_same(name, tmp_path, capsys):
    plain, want = made(tmp_path, name)
    assert run(f"--from={tmp_path}/run", f"--to={tmp_path}/adapter", "--format=peft") == 0
    about = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert about["base_model_name_or_path"] == f"{tmp_path}/base"
    assert about["base_model_name_or_path"] in capsys.readouterr().out
    modes = {os.stat(tmp_path / "adapter" / file).st_mode for file in (peft.CONFIG, peft.WEIGHTS)}
    assert len(modes) == 1
    assert (about["use_dora"], about["use_rslora"]) == (name == "dora", name == "rslora")
    assert about["modules_to_save"] == (["lm_head", "post_attention_layernorm"] if name == "saved" else None)
    assert about.get("trainable_token_indices") == ({"embed_tokens": [9, 3, 271]} if name == "tokens" else None)
    if name == "phi3":
        assert about["target_modules"] == ["qkv_proj"]
    # The base is found by its name or set by --base; both ways give the parameters of the run, merged.
    assert run(f"--from={tmp_path}/adapter", f"--to={tmp_path}/ours", "--format=capibara") == 0
    config.reset()
    ours = load_run(f"{tmp_path}/ours")
    model, got = ours.model, ours.params
    assert hf_config.resolved(model.config) == hf_config.resolved(plain.config) and model.config.lora is None
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=2e-6), got, want)
    os.rename(tmp_path / "base", tmp_path / "elsewhere")
    argv = [f"--from={tmp_path}/adapter", f"--base={tmp_path}/elsewhere"]  # in f32, like the base
    assert run(*argv, f"--to={tmp_path}/hf") == 0
    values = hf_folder.config_of(str(tmp_path / "hf"))
    assert values["model_type"] == hf_folder.config_of(str(tmp_path / "elsewhere"))["model_type"]
    wanted = dict(open_model.hf_tensors(got, plain, values["model_type"]))
    merged = read(tmp_path / "hf")
    assert merged.keys() == wanted.keys()
    for key, value in wanted.items():
        np.testing.assert_array_equal(merged[key], value)


def test_a_run_with_adapters_goes_out_merged_and_can_be_a_base(tmp_path):
    _, want = made(tmp_path, "llama")
    assert run(f"--from={tmp_path}/run", f"--to={tmp_path}/merged", "--format=capibara") == 0
    config.reset()
    again = load_run(f"{tmp_path}/merged")
    assert again.model.config.lora is None
    jax.tree.map(np.testing.assert_array_equal, again.params, want)
    assert run(f"--from={tmp_path}/run", f"--to={tmp_path}/adapter", "--format=peft") == 0
    argv = [f"--from={tmp_path}/adapter", f"--base={tmp_path}/merged", "--format=pytorch", "--dtype=f32"]
    assert run(*argv, f"--to={tmp_path}/twice") == 0  # a run folder, with the same adapters on top of it
    base, once, twice = (read(tmp_path / "base"), dict(hf(want)), read(tmp_path / "twice"))
    key = "model.layers.0.self_attn.q_proj.weight"
    np.testing.assert_allclose(twice[key] - once[key], once[key] - base[key], rtol=0, atol=1e-6)


def test_adapters_beside_a_base_in_four_bits_go_out_as_they_are(tmp_path, capsys):
    lora = Lora(rank=2, alpha=4.0, base_dtype="nf4")
    plain = api.build(dataclasses.replace(LLAMA, embed_dim=64, mlp_dim=64))
    model = api.build(dataclasses.replace(plain.config, lora=lora))
    params = jax.jit(model.adapt)(drawn(plain.abstract_params), jax.random.key(0))
    params = tree.joined(drawn(model.trained(params)), model.frozen(params))
    os.makedirs(tmp_path / "run")
    own = gin_of.run(model.config, f"{tmp_path}/run", {}).replace("Dataset.length = 1024", "Dataset.length = 64")
    run_folder.save(f"{tmp_path}/run", params, own)
    argv = [f"--from={tmp_path}/run", f"--to={tmp_path}/adapter", "--format=peft"]
    assert run(*argv) == 2  # the run began with new parameters
    assert "name the folder of the base model, --base=PATH" in capsys.readouterr().err
    assert run(*argv, "--base=org/Tiny") == 0
    assert fields.read(f"{tmp_path}/adapter")["base_model_name_or_path"] == "org/Tiny"
    read_as, values = peft.read_peft(str(tmp_path / "adapter"), plain, "llama")
    assert read_as.rank == 2 and read_as.alpha == 4.0
    jax.tree.map(np.testing.assert_array_equal, values, model.trained(params))


def hf(params):
    return open_model.hf_tensors(params, api.build(LLAMA), "llama")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["--from=base", "--format=peft"],
            "--format=peft is for a run with adapters, and --from=base is no run folder",
        ),
        (["--from=plain", "--format=peft"], "this one has none: use hf"),
        (["--from=plain", "--format=capibara"], "--from is a run folder already"),
        (["--from=run", "--base=base"], "--base=base is for adapters, and --from=run is none"),
        (["--from=run", "--format=peft", "--dtype=bf16"], "an adapter is stored in f32"),
        (["--from=adapter", "--format=peft"], "is an adapter of PEFT already"),
        (["--from=adapter", "--base=nowhere"], "is an adapter of 'nowhere', which is not here"),
        (["--from=adapter", "--base=other"], r"has the shape \[2, 32\], must be \[2, 64\]"),
        (["--from=cut"], "adapter_model.safetensors cannot be read"),
        (["--from=nameless"], "is an adapter of None, which is not here: name its folder with --base=PATH"),
        (["--from=run", "--format=t5x"], "T5X has only its T5 and its decoders .*, and this model is a llama"),
    ],
)
def test_mistakes_are_one_line(argv, message, folders, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(folders)
    capsys.readouterr()
    assert run(*argv, f"--to={tmp_path}/to") == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1

    assert re.search(message, told), told
    assert not (tmp_path / "to").exists()


def test_a_run_does_not_begin_from_an_adapter(folders):
    with pytest.raises(UserError, match="adapter is an adapter of PEFT: merge it first"):
        open_model.loader(str(folders / "adapter"), api.build(LLAMA))


def begun(folder, lora, begins="adapter", how="weights"):
    """A run that begins from the adapter, with these adapters of its own, and its parameters."""
    config.reset()
    trainer = load_run(f"{folder}/run").trainer
    model = api.build(dataclasses.replace(LLAMA, lora=lora))
    trainer = dataclasses.replace(trainer, init_from=f"{folder}/{begins}", model=model.config, init_with=how)
    mesh = sharding.make_mesh(trainer.plan, jax.devices()[:1])
    read = initialization.reader_again(trainer, model, adapters.loader)
    loaded = initialization.load_params(trainer, model, mesh, read)
    tx = trainer.optimizer.build(10, model.trained(model.axes))
    return model, states.init_state(model, tx, jax.random.key(0), ema=False, pretrained=loaded).params


@pytest.mark.parametrize("base_dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.heavy)])
def test_a_run_goes_on_with_an_adapter(folders, base_dtype):
    lora = dataclasses.replace(LORAS["llama"], base_dtype=base_dtype, dropout=0.1)
    model, params = begun(folders, lora)
    _, want = peft.read_peft(f"{folders}/adapter", model.plain, "llama")
    jax.tree.map(np.testing.assert_array_equal, model.trained(params), want)
    assert np.any(want["layers"]["attention"]["query_lora"]["b"])
    base = dict(open_model.hf_tensors(model.plain.merge(model.frozen(params)), model.plain, "llama"))
    close = dict(rtol=0, atol=0) if base_dtype == "float32" else dict(rtol=2**-8, atol=0)
    for name, value in read(folders / "base").items():
        np.testing.assert_allclose(np.asarray(base[name], np.float32), value, **close)


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        (None, "adapter is an adapter of PEFT, and DecoderConfig.lora is None: set it to @Lora.. to go on"),
        (dict(rank=3), "Lora.rank is 3, .*adapter was trained with 2: set it to that"),
        (
            dict(targets=("query",), rank_pattern=()),
            "Lora.targets is .'query',., .* with .'layers/attention/query', 'layers/mlp",
        ),
        (dict(alpha=8.0), "Lora.alpha is 8.0, .* was trained with 4.0"),
        (dict(modules_to_save=("output",)), "Lora.modules_to_save is .'output',., .* was trained with ..: set"),
    ],
    ids=str,
)
def test_an_adapter_of_other_kind_is_not_gone_on_with(folders, lora, message):
    lora = lora and dataclasses.replace(LORAS["llama"], **lora)
    with pytest.raises(UserError, match=message):
        begun(folders, lora)


def test_a_run_goes_on_with_the_adapters_of_a_run(folders):
    """The result equals that of the same adapter in PEFT's form, and the base is unchanged."""
    model, params = begun(folders, LORAS["llama"], "run", "adapters")
    _, want = begun(folders, LORAS["llama"], "adapter", "adapters")
    jax.tree.map(np.testing.assert_array_equal, params, want)


@pytest.mark.parametrize("begins", ["adapter", "run"])
def test_adapters_are_stacked(folders, begins):
    """The first adapters are merged into the base, and the new ones of another kind start at zero."""
    lora = Lora(rank=4, alpha=8.0, targets=("all-linear",))
    model, params = begun(folders, lora, begins, "merged")
    config.reset()
    merged = load_run(f"{folders}/run").params
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=2e-6), model.base(params), merged)
    assert not any(np.any(x) for n, x in zip(tree.path_names(params), jax.tree.leaves(params)) if n.endswith("lora/b"))
    plain, values = begun(folders, None, begins, "merged")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=2e-6), values, merged)


def test_what_has_no_adapters_is_not_gone_on_with(folders):
    with pytest.raises(UserError, match="Trainer.init_with is 'adapters', and Trainer.init_from .*base'. has none"):
        begun(folders, LORAS["llama"], "base", "adapters")
    with pytest.raises(UserError, match="Lora.alpha is 8.0, .*run was trained with 4.0: set it to that"):
        begun(folders, dataclasses.replace(LORAS["llama"], alpha=8.0), "run", "adapters")
    with pytest.raises(UserError, match="'adapters', and DecoderConfig.lora is None: set it to @Lora"):
        begun(folders, None, "run", "adapters")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    plain, want = made(folder, "llama")
    assert run(f"--from={folder}/run", f"--to={folder}/adapter", "--format=peft") == 0
    os.makedirs(folder / "plain")
    run_folder.save(f"{folder}/plain", want, gin_of.run(LLAMA, f"{folder}/plain", {}))
    for name, weights, base in (("cut", b"\x10", f"{folder}/base"), ("nameless", None, None)):
        os.makedirs(folder / name)
        about = json.loads((folder / "adapter" / peft.CONFIG).read_text()) | {"base_model_name_or_path": base}
        (folder / name / peft.CONFIG).write_text(json.dumps(about))
        (folder / name / peft.WEIGHTS).write_bytes(weights or (folder / "adapter" / peft.WEIGHTS).read_bytes())
    wide = api.build(dataclasses.replace(LLAMA, embed_dim=64))
    tensors = open_model.hf_tensors(drawn(wide.abstract_params), wide, "llama")
    values = hf_config.to_hf(wide.config)
    hf_folder.save_hf(f"{folder}/other", values, open_model.hf_shapes(wide, "llama"), tensors, {}, dtype="float32")
    return folder
