"""capibara convert --from --to: our run into a Hugging Face folder, and a foreign model into a run, bit for bit."""

import dataclasses
import json
import os

import jax
import numpy as np
import pytest
import tokenizers
from safetensors import numpy as safetensors

from capibara import config
from capibara.cli import convert
from capibara.cli.composition.models import load_run
from capibara.config import written
from capibara.data.dataset import Dataset
from capibara.data.sources.sources import StdlibSource
from capibara.data.tokenizers.vocabulary import ByteVocabulary
from capibara.interop import conversion, gin_of, open_model
from capibara.interop.hf import config as hf_config
from capibara.models import api
from capibara.models.api import DecoderConfig, Moe, Rope
from capibara.multihost import exits
from capibara.training import run_folder

TINY = DecoderConfig(
    vocab_size=272, embed_dim=32, num_layers=2, num_heads=4, num_kv_heads=2, mlp_dim=48, qk_norm="head", dtype="float32"
)


def run(*argv):
    return exits.run_verb(convert.main, [str(arg) for arg in argv])


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A byte-level tokenizer.json with an end token, and a chat template beside it."""
    folder = tmp_path_factory.mktemp("tokenizer")
    pieces = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    vocabulary = {piece: i for i, piece in enumerate(["<eos>", *sorted(pieces)])}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(["<eos>"])
    made.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


@pytest.fixture(scope="module")
def params():
    rng = np.random.default_rng(0)
    model = api.build(TINY)
    return jax.tree.map(lambda s: jax.numpy.asarray(rng.standard_normal(s.shape, np.float32)), model.abstract_params)


@pytest.fixture(scope="module")
def model_dir(tokenizer, params, tmp_path_factory):
    """A run folder."""
    folder = str(tmp_path_factory.mktemp("runs") / "mine")
    os.makedirs(folder)
    gin = gin_of.run(TINY, folder, {}).replace(
        "Dataset.vocabulary = @ByteVocabulary()",
        "Dataset.vocabulary = @TokenizerJsonVocabulary()\n"
        f'TokenizerJsonVocabulary.path = "{tokenizer}/tokenizer.json"\nTokenizerJsonVocabulary.size_multiple = 1',
    )
    run_folder.save(folder, params, gin)
    return folder


def assert_equal(got, want):
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), got, want)


def test_a_run_goes_out_and_comes_back(model_dir, params, tokenizer, tmp_path, capsys):
    assert run(f"--from={model_dir}", f"--to={tmp_path}/hf", "--dtype=f32") == 0
    assert "qwen3, 24 tensors in f32" in capsys.readouterr().out
    foreign = open_model.open_model(f"{tmp_path}/hf")
    assert foreign.tokenizer["tokenizer.json"] == (tokenizer / "tokenizer.json").read_bytes()
    assert foreign.tokenizer["chat_template.jinja"] == b"{{ messages }}"
    assert json.loads(foreign.tokenizer["tokenizer_config.json"])["eos_token"] == "<eos>"
    assert json.loads(foreign.tokenizer["generation_config.json"])["eos_token_id"] == 0
    assert foreign.config["max_position_embeddings"] == 1024
    assert run(f"--from={tmp_path}/hf", f"--to={tmp_path}/ours", "--format=capibara") == 0
    config.reset()
    ours = load_run(f"{tmp_path}/ours")
    trainer, model, again = ours.trainer, ours.model, ours.params
    assert hf_config.resolved(model.config) == hf_config.resolved(TINY)
    assert_equal(again, params)
    vocabulary = trainer.dataset.get_vocabulary()
    assert vocabulary.path == f"{tmp_path}/ours" and vocabulary.spelling(vocabulary.eos_id) == "<eos>"
    assert vocabulary.size == 257
    config.reset()
    assert run(f"--from={tmp_path}/ours", f"--to={tmp_path}/again", "--dtype=f32", "--gin.Dataset.length=64") == 0
    assert open_model.open_model(f"{tmp_path}/again").config == foreign.config  # with its maximum length
    with (
        open(f"{tmp_path}/again/model.safetensors", "rb") as one,
        open(f"{tmp_path}/hf/model.safetensors", "rb") as two,
    ):
        assert one.read() == two.read()
    os.rename(tmp_path / "ours", tmp_path / "moved")
    config.reset()
    vocabulary = load_run(f"{tmp_path}/moved").trainer.dataset.get_vocabulary()
    assert vocabulary.path == f"{tmp_path}/moved" and vocabulary.spelling(vocabulary.eos_id) == "<eos>"


def test_a_folder_goes_to_a_folder_of_another_dtype(model_dir, params, tmp_path):
    assert run(f"--from={model_dir}", f"--to={tmp_path}/full", "--dtype=f32") == 0
    assert run(f"--from={tmp_path}/full", f"--to={tmp_path}/half", "--dtype=bf16") == 0
    full, half = open_model.open_model(f"{tmp_path}/full"), open_model.open_model(f"{tmp_path}/half")
    assert half.config == full.config | {"dtype": "bfloat16", "torch_dtype": "bfloat16"}
    assert half.tokenizer == full.tokenizer
    for name in full.shapes():
        np.testing.assert_array_equal(half.read(name), full.read(name).astype(half.read(name).dtype))
    assert run(f"--from={tmp_path}/half", f"--to={tmp_path}/same") == 0  # as stored
    same = open_model.open_model(f"{tmp_path}/same")
    assert all(np.array_equal(same.read(name), half.read(name)) for name in full.shapes())


def test_tensors_of_several_dtypes_lose_nothing(model_dir, tmp_path):
    assert run(f"--from={model_dir}", f"--to={tmp_path}/mixed", "--dtype=bf16") == 0
    path = str(tmp_path / "mixed" / "model.safetensors")
    values = {name: value.astype(np.float32) for name, value in safetensors.load_file(path).items() if value.ndim == 1}
    values = {name: value + np.float32(1e-5) for name, value in values.items()}
    safetensors.save_file(safetensors.load_file(path) | values, path)
    (tmp_path / "mixed.gguf.partial").write_text("mine")
    assert run(f"--from={tmp_path}/mixed", f"--to={tmp_path}/out") == 0
    assert run(f"--from={tmp_path}/mixed", f"--to={tmp_path}/mixed.gguf", "--dtype=f16") == 0
    out = safetensors.load_file(str(tmp_path / "out" / "model.safetensors"))
    assert all(np.array_equal(out[name], value) for name, value in values.items())
    # Vectors in a GGUF file are f32, whatever the model's dtype.
    assert open_model.stored_dtype(open_model.open_model(f"{tmp_path}/mixed.gguf")) == "float16"
    assert (tmp_path / "mixed.gguf.partial").read_text() == "mine"


def test_experts_of_a_layer_in_one_tensor_are_written_one_by_one(tmp_path):
    model = api.build(
        DecoderConfig(
            **dict(vocab_size=96, embed_dim=32, num_layers=2, num_heads=4, mlp_dim=48), moe=Moe(num_experts=4)
        )
    )
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda s: rng.standard_normal(s.shape, np.float32), model.abstract_params)
    want = dict(open_model.hf_tensors(params, model, "mixtral"))

    class Fused:
        config, tokenizer = hf_config.to_hf(model.config), {}
        tensors = {name: value for name, value in want.items() if "block_sparse_moe" not in name}

        def shapes(self):
            return {name: value.shape for name, value in self.tensors.items()}

        def read(self, name):
            return self.tensors[name]

    for layer in range(2):
        old, new = f"model.layers.{layer}.block_sparse_moe.", f"model.layers.{layer}.mlp."
        of = lambda kind, old=old: np.stack([want[f"{old}experts.{e}.{kind}.weight"] for e in range(4)])  # noqa: E731
        Fused.tensors[f"{new}gate.weight"] = want[f"{old}gate.weight"]
        Fused.tensors[f"{new}experts.gate_up_proj"] = np.concatenate([of("w1"), of("w3")], axis=1)
        Fused.tensors[f"{new}experts.down_proj"] = of("w2")
    got = dict(open_model.foreign_tensors(Fused(), model, "mixtral"))
    assert list(got) == list(want) == list(open_model.hf_shapes(model, "mixtral"))
    assert all(np.array_equal(got[name], want[name]) for name in want)
    here = jax.tree.map(lambda _: jax.sharding.SingleDeviceSharding(jax.devices()[0]), model.abstract_params)
    assert_equal(open_model.load_params(Fused(), model, here), params)


def test_a_configuration_is_the_same_as_gin_text():
    model = DecoderConfig(
        **dict(vocab_size=96, embed_dim=32, num_layers=2, num_heads=4, mlp_dim=48, norm_eps=1e-5, window=8),
        layer_pattern=("local",),
        activation="geglu",
        rope=Rope(theta=5e5, scaling="llama3", factor=8.0, original_length=64),
        moe=Moe(num_experts=4, gates="scores"),
    )
    config.parse([], [line for line in written.bindings(model) if line])
    assert config.build(DecoderConfig) == model


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--from=x"], "convert needs --from=PATH and --to=PATH"),
        ([], "convert needs --from=PATH and --to=PATH"),
        (["--from=nowhere", "--to=y"], "nowhere does not exist"),
        (["list", "x", "--to=y"], "--to=y is for a model, not for list"),
        (["--from=x", "--to=y", "--keep=2"], "--keep=2 is for prune, not for a model"),
        (["--from=HF", "--to=HF"], "exists already"),
        (["--from=HF", "--to=y", "--dtype=q8_0"], "--dtype=q8_0 is for gguf"),
        (["--from=HF", "--to=y", "--format=capibara", "--dtype=bf16"], "a run folder is stored in f32"),
        (["--from=HF", "--to=y", "--format=gguf"], "--to=y with --format=gguf must end in .gguf"),
        (["--from=HF", "--to=y.gguf", "--format=hf"], "--to=y.gguf with --format=hf must not end in .gguf"),
        (["--from=HF", "--to=y", "--format=hf_token_classification"], "this model has no scores: use hf"),
        (["--from=HF", "--to=HF/config.json/y"], "cannot be written (Not a directory)"),
        (["--from=HF", "--to=HF/config.json/y", "--format=capibara"], "cannot be written (Not a directory)"),
        (["--from=HF", "--to=HF/config.json/y.gguf"], "cannot be written (Not a directory)"),
        (["--from=nowhere", "--to=."], "is the current folder"),
    ],
)
def test_mistakes_are_one_line(argv, message, model_dir, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    if "HF" in str(argv):
        assert run(f"--from={model_dir}", "--to=HF") == 0
    before = sorted(os.listdir(tmp_path))
    capsys.readouterr()
    assert run(*argv) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1 and message in captured.err
    assert sorted(os.listdir(tmp_path)) == before


def test_the_verb_offers_every_form():
    assert set(convert.FORMATS) == set(conversion.FORMATS)


def test_a_run_of_bytes_has_no_tokenizer_file(params):
    dataset = Dataset(source=StdlibSource(), vocabulary=ByteVocabulary(), length=64)
    source = conversion.of_run(api.build(TINY), params, dataset)
    assert source.tokenizer == {} and source.config["eos_token_id"] == 1
    assert source.config["max_position_embeddings"] == 64


@pytest.mark.parametrize("heads", [((0,), ()), None], ids=["pattern", "gates"])
def test_streaming_heads_stay_behind(params, model_dir, tmp_path, caplog, heads):
    """A config.json cannot say them; of a pattern that is told."""
    config = dataclasses.replace(
        TINY, streaming=api.StreamingHeads(heads=heads and (*heads, *[()] * (TINY.num_layers - 2)))
    )
    gin = gin_of.run(config, str(tmp_path / "run"), {})
    gates = {} if heads else {api.GATES: jax.numpy.ones((TINY.num_layers, TINY.kv_heads))}
    run_folder.save(str(tmp_path / "run"), params | gates, gin)
    assert run(f"--from={tmp_path}/run", f"--to={tmp_path}/hf", "--dtype=f32") == 0
    assert ("streaming heads, which its new configuration cannot say" in caplog.text) is (heads is not None)
    assert run(f"--from={model_dir}", f"--to={tmp_path}/plain", "--dtype=f32") == 0
    tensors = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("hf", "plain")]
    assert tensors[0] == tensors[1]
