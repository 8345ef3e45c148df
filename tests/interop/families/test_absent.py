"""Files of encoder-decoders that lack what transformers computes, and tensors of theirs that stand for others."""

from __future__ import annotations

import json
import pathlib
import sys

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from jax.sharding import SingleDeviceSharding

from capibara.core.types import UserError
from capibara.data.tokenizers import files as tokenizer_files
from capibara.data.tokenizers.decoder_start import start_id
from capibara.data.tokenizers.vocabulary import TokenizerJsonVocabulary
from capibara.interop import open_model
from capibara.interop.hf import config as hf_config
from capibara.models import api
from tests.data.tokenizers import kinds

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1] / "models" / "golden")]

import answers  # noqa: E402


def write(folder, name, change):
    """The folder of a family, with tensors that `change` makes of its own."""
    recorded = json.loads((HERE / "recorded" / f"{name}.json").read_text())
    (folder / "config.json").write_text(json.dumps(recorded["config"]))
    tensors = {key: answers.draw(key, tuple(shape)) for key, shape in recorded["tensors"].items()}
    safetensors.numpy.save_file(change(tensors), folder / "model.safetensors")
    return tensors


def loaded(folder):
    foreign = open_model.open_model(str(folder))
    model = api.build(hf_config.from_hf(foreign.config, dtype="float32"))
    here = SingleDeviceSharding(jax.devices()[0])
    return open_model.load_params(foreign, model, jax.tree.map(lambda _: here, model.abstract_params))


def test_sines_and_a_bias_that_a_file_lacks_are_those_of_transformers(tmp_path):
    write(
        tmp_path,
        "pegasus",
        lambda tensors: {key: x for key, x in tensors.items() if "positions" not in key and key != "final_logits_bias"},
    )
    params = loaded(tmp_path)
    assert not np.asarray(params["output_bias"]).any()
    np.testing.assert_array_equal(params["encoder"]["position_embedding"], api.sine_table(64, 32))


TABLES = {f"model.{side}.embed_positions.weight": api.sine_table(64, 32) for side in ("encoder", "decoder")}
PER_LAYER = "esm.encoder.layer.0.attention.self.rotary_embeddings.inv_freq"


def decays(layer):
    """MiniMax's tables of a layer of 3, with 4 heads and blocks of 8 tokens."""
    slopes = [2.0 ** (-2 * head) * (1 - layer / (2 + 1e-5) + 1e-5) for head in range(1, 5)]
    left = lambda steps: np.array([[[np.exp(-slope * step)] for step in steps] for slope in slopes])  # noqa: E731
    lower = [[[np.exp(slope * (j - i)) if i >= j else 0.0 for j in range(8)] for i in range(8)] for slope in slopes]
    tables = {
        "slope_rate": np.reshape(slopes, (4, 1, 1)),
        "query_decay": left(range(1, 9)),
        "key_decay": left(range(7, -1, -1)),
        "diagonal_decay": np.array([lower]),
    }
    return {f"model.layers.{layer}.self_attn.{name}": table.astype(np.float32) for name, table in tables.items()}


CONSTANTS = {
    "marian": TABLES,
    "roformer": {"roformer.encoder.embed_positions.weight": api.sine_table(64, 8)},
    "esm": {PER_LAYER: (500.0 ** (-np.arange(0, 8, 2) / 8)).astype(np.float32)},
    "minimax": decays(0) | decays(2),
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_tensors_of_what_is_computed_are_compared(name, tmp_path):
    """transformers takes them as they are, whatever the values."""
    write(tmp_path, name, lambda tensors: tensors | CONSTANTS[name])
    loaded(tmp_path)
    for tensor, value in CONSTANTS[name].items():
        for other in (value + 0.01, value + 1e6, value * np.float32(1.001), value[..., None], value[:0]):
            write(tmp_path, name, lambda tensors: tensors | CONSTANTS[name] | {tensor: other})  # noqa: B023
            with pytest.raises(UserError, match=f"{tensor} has other values than capibara's {name} computes"):
                open_model.open_model(str(tmp_path))


@pytest.mark.parametrize("name", CONSTANTS)
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["float16", "bfloat16"])
def test_tensors_of_what_is_computed_may_be_rounded(dtype, name, tmp_path):
    """As transformers writes them in another dtype, and a model in float32 that it has read of such a file."""
    for then in (dtype, np.float32):
        rounded = {tensor: value.astype(dtype).astype(then) for tensor, value in CONSTANTS[name].items()}
        write(tmp_path, name, lambda tensors: tensors | rounded)  # noqa: B023
        open_model.open_model(str(tmp_path))
        tensor = min(rounded)
        far = {tensor: (rounded[tensor] * then(1.02)).astype(dtype).astype(then)}
        write(tmp_path, name, lambda tensors: tensors | rounded | far)  # noqa: B023
        with pytest.raises(UserError, match=f"{tensor} has other values"):
            open_model.open_model(str(tmp_path))


@pytest.mark.parametrize(
    "name, key",
    [("esm", "hidden_size"), ("esm", "num_attention_heads"), ("marian", "d_model"), ("minimax", "num_hidden_layers")],
)
def test_a_config_without_the_sizes_of_what_is_computed_is_refused(name, key, tmp_path):
    write(tmp_path, name, lambda tensors: tensors | CONSTANTS[name])
    values = json.loads((tmp_path / "config.json").read_text())
    for changed in ({**values, key: 0}, {at: value for at, value in values.items() if at != key}):
        (tmp_path / "config.json").write_text(json.dumps(changed))
        with pytest.raises(UserError):
            loaded(tmp_path)


def test_published_files_of_axk1_have_no_correction_and_norms_of_dense_layers(tmp_path):
    norm, corrections = "model.layers.{}.post_mlp_layernorm.weight", "mlp.gate.e_score_correction_bias"

    def published(tensors):
        changed = {key: x for key, x in tensors.items() if not key.endswith(corrections)}
        return changed | {norm.format(0): np.ones(32, np.float32)}

    tensors = write(tmp_path, "axk1", published)
    mlp = loaded(tmp_path)["layers"]["mlp"]
    assert mlp["correction"].shape == (2, 8) and not np.asarray(mlp["correction"]).any()
    scales = [tensors[norm.format(layer)] for layer in (1, 2)]
    np.testing.assert_array_equal(mlp["output_norm"]["scale"], scales)


def test_modules_that_predict_further_tokens_and_are_not_read_are_reported(tmp_path, caplog):
    more = {"mtp.layers.0.norm.weight": np.ones(32, np.float32)}
    write(tmp_path, "nemotron_h", lambda tensors: tensors | more)
    loaded(tmp_path)
    assert "1 tensors of other parts than the language model are not read, mtp.layers.0.norm.weight" in caplog.text


def test_a_file_of_the_model_without_its_head_is_read(tmp_path):
    tensors = write(
        tmp_path,
        "bart",
        lambda tensors: {key.removeprefix("model."): np.ascontiguousarray(x) for key, x in tensors.items()},
    )
    np.testing.assert_array_equal(loaded(tmp_path)["embedding"], tensors["model.shared.weight"])


def test_first_files_of_gte_have_the_name_of_another_class(tmp_path):
    def first(tensors):
        return {key.replace("gte.", "new.", 1): x for key, x in tensors.items()} | {
            "classifier.weight": np.ones((2, 32))
        }

    tensors = write(tmp_path, "gte", first)
    np.testing.assert_array_equal(loaded(tmp_path)["embedding"], tensors["gte.embeddings.word_embeddings.weight"])


V3 = {"cls.predictions.bias": "lm_predictions.lm_head.bias"}


def of_v3(name):
    return V3.get(name) or name.replace("cls.predictions.transform.", "lm_predictions.lm_head.")


def test_the_head_of_deberta_v3_is_read_under_its_name(tmp_path):
    tensors = write(tmp_path, "deberta-v2", lambda tensors: {of_v3(name): x for name, x in tensors.items()})
    params = loaded(tmp_path)
    np.testing.assert_array_equal(params["output_bias"], tensors["cls.predictions.bias"])
    np.testing.assert_array_equal(params["transform"], tensors["cls.predictions.transform.dense.weight"].T)


def test_two_heads_that_differ_are_refused(tmp_path):
    """A file may have them by the names of both versions."""
    write(
        tmp_path,
        "deberta-v2",
        lambda tensors: {**tensors, **{of_v3(name): x + 1 for name, x in tensors.items() if "cls." in name}},
    )
    with pytest.raises(UserError, match="differ, and both are cls.predictions"):
        loaded(tmp_path)


def test_a_scaled_head_is_tied_whatever_its_file_says(tmp_path):
    """As in transformers 5.24, where scale_decoder_outputs counts alone; with a head of its own there is no such model."""
    write(tmp_path, "longt5", lambda tensors: tensors)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"tie_word_embeddings": False, "scale_decoder_outputs": True})
    )
    read = hf_config.from_hf(open_model.open_model(str(tmp_path)).config)
    assert (read.head, read.head_scale) == ("tied", "inverse_sqrt_dim")
    stored = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    stored["lm_head.weight"] = stored["shared.weight"] + 1
    safetensors.numpy.save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="scale_decoder_outputs = true and tie_word_embeddings = false"):
        open_model.open_model(str(tmp_path))


@pytest.mark.parametrize("stem", ["", "model."])
def test_embeddings_of_a_side_that_differ_are_refused(stem, tmp_path):
    name = f"{stem}encoder.embed_tokens.weight"
    write(tmp_path, "bart", lambda tensors: {**tensors, name: tensors["model.shared.weight"] + 1})
    with pytest.raises(UserError, match=f"{name} differs from model.shared.weight"):
        loaded(tmp_path)


@pytest.mark.parametrize(
    "files, wanted",
    [
        ({}, 0),
        ({"config.json": {"decoder_start_token_id": 2}}, 2),
        ({"config.json": {"decoder_start_token_id": 2}, "generation_config.json": {"decoder_start_token_id": 1}}, 1),
        ({"config.json": {"decoder_start_token_id": 2}, "generation_config.json": {"eos_token_id": 1}}, 2),
    ],
)
def test_a_decoder_begins_with_what_the_files_beside_its_tokenizer_say(files, wanted, tmp_path):
    kinds.llama_2().save(str(tmp_path / "tokenizer.json"))
    special = {"pad_token": "<unk>", "eos_token": "</s>", "bos_token": "<s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(special))
    for name, values in files.items():
        (tmp_path / name).write_text(json.dumps(values))
    vocabulary = TokenizerJsonVocabulary(path=str(tmp_path))
    assert start_id(vocabulary) == (wanted if files else vocabulary.pad_id)
    copy = tmp_path / "copy"  # as a run keeps it, without the model's file
    copy.mkdir()
    for name, content in tokenizer_files.carried(str(tmp_path)).items():
        (copy / name).write_bytes(content)
    assert start_id(TokenizerJsonVocabulary(path=str(copy))) == start_id(vocabulary)


def test_a_start_that_the_tokenizer_does_not_have_is_refused(tmp_path):
    kinds.llama_2().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    (tmp_path / "config.json").write_text(json.dumps({"decoder_start_token_id": 10**7}))
    with pytest.raises(UserError, match="decoder_start_token_id = 10000000, must be a token's number below"):
        start_id(TokenizerJsonVocabulary(path=str(tmp_path)))


def test_convolutions_that_are_cut_elsewhere_are_read_as_they_were(tmp_path):
    """transformers 5.24 writes those of OLMo Hybrid in three equal parts, whatever widths queries and values have."""
    names = [f"model.layers.0.linear_attn.{of}_conv1d.weight" for of in "qkv"]
    whole = np.random.default_rng(0).normal(size=(48, 1, 3)).astype(np.float32)
    parts = dict(zip(names, np.split(whole, [10, 31]), strict=True))
    write(tmp_path, "olmo_hybrid", lambda tensors: tensors | parts)
    foreign = open_model.open_model(str(tmp_path))
    assert [foreign.shapes()[name] for name in names] == [(16, 1, 3)] * 3
    np.testing.assert_array_equal(np.concatenate([foreign.read(name) for name in names]), whole)


@pytest.mark.parametrize(
    "name, change, says",
    [("bart", {"vocab_size": None}, "config.json"), ("pegasus", {"d_model": None, "hidden_size": 32}, None)],
)
def test_what_a_file_lacks_is_made_of_its_values_as_they_are_read(name, change, says, tmp_path):
    lacking = {"final_logits_bias", *(f"model.{side}.embed_positions.weight" for side in ("encoder", "decoder"))}
    write(tmp_path, name, lambda tensors: {key: x for key, x in tensors.items() if key not in lacking})
    path = tmp_path / "config.json"
    values = {key: value for key, value in (json.loads(path.read_text()) | change).items() if value is not None}
    path.write_text(json.dumps(values))
    if says is None:
        assert loaded(tmp_path)
        return
    with pytest.raises(UserError, match=says):
        loaded(tmp_path)
