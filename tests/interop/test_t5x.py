"""T5X checkpoints: we read those that TensorStore and msgpack alone write as T5X does, and they read ours.

Facts: github.com/google-research/t5x, t5x/checkpoints.py and t5x/examples/{t5,scalable_t5}/network.py; flax/serialization.py.
"""

import dataclasses
import json
import os
import shutil

import jax
import ml_dtypes
import msgpack
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore
from jax.sharding import SingleDeviceSharding

from capibara import config
from capibara.cli import convert
from capibara.cli.composition.models import load_run
from capibara.core import tree
from capibara.core.types import UserError
from capibara.interop import open_model
from capibara.interop.hf import config as hf_config
from capibara.interop.t5x import names as t5x_names
from capibara.interop.t5x import read as t5x_read
from capibara.interop.t5x import write as t5x_write
from capibara.models import api
from capibara.models.api import EncoderDecoderConfig
from capibara.multihost import exits

T5_1_1 = EncoderDecoderConfig(
    **dict(vocab_size=96, embed_dim=16, num_layers=2, num_encoder_layers=3, num_heads=4, head_dim=8, mlp_dim=24),
    dtype="float32",
)
T5 = dataclasses.replace(T5_1_1, activation="relu", head="tied", num_encoder_layers=2)
D, N, H = 16, 4, 8
GIN = """
from __gin__ import dynamic_registration
from t5x.examples.t5 import network
NUM_HEADS = 4  # of all attention
seqio.SentencePieceVocabulary.sentencepiece_model_file = "gs://t5-data/vocabs/cc_all.32000.100extra/sentencepiece.model"
network.Transformer.config = @network.T5Config()
network.T5Config:
  vocab_size = 96  # rounded
  dtype = 'bfloat16'
  emb_dim = 16
  num_heads = %NUM_HEADS
  num_encoder_layers = 3
  num_decoder_layers = 2
  head_dim = 8
  mlp_dim = 24
  mlp_activations = ('silu', 'linear')
  dropout_rate = %DROPOUT_RATE
  logits_via_embedding = False

trainer.Trainer:
  num_microbatches = None
"""


@pytest.fixture(scope="module")
def params():
    return {name: drawn(api.build(own)) for name, own in (("t5_1_1", T5_1_1), ("t5", T5))}


def drawn(model):
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda s: rng.standard_normal(s.shape, np.float32), model.abstract_params)


def arrays_of(params, *, fused=True):
    """T5X's name -> array for each layer; with `fused`, kernels have heads and features in one dimension."""
    flat = (lambda x, *shape: x.reshape(shape)) if fused else (lambda x, *shape: x)
    found = {"token_embedder/embedding": params["embedding"]}
    if "output" in params:
        found["decoder/logits_dense/kernel"] = params["output"].T
    for side in ("encoder", "decoder"):
        own = params[side]
        found[f"{side}/{side}_norm/scale"] = own["norm"]["scale"]
        found[f"{side}/relpos_bias/rel_embedding"] = own["relative_bias"]["table"].T
        attention = "attention" if side == "encoder" else "self_attention"
        named = {attention: "attention"} | (
            {} if side == "encoder" else {"encoder_decoder_attention": "cross_attention"}
        )
        layers = own["layers"]
        for number in range(len(layers["mlp"]["down"])):
            at = f"{side}/layers_{number}"
            for theirs, ours in named.items():
                for part in ("query", "key", "value"):
                    found[f"{at}/{theirs}/{part}/kernel"] = flat(layers[ours][part][number], D, N * H)
                found[f"{at}/{theirs}/out/kernel"] = flat(layers[ours]["out"][number], N * H, D)
            found[f"{at}/pre_{attention}_layer_norm/scale"] = layers["attention_norm"]["scale"][number]
            if side == "decoder":
                found[f"{at}/pre_cross_attention_layer_norm/scale"] = layers["cross_attention_norm"]["scale"][number]
            found[f"{at}/pre_mlp_layer_norm/scale"] = layers["mlp_norm"]["scale"][number]
            into = {"wi_0": "gate", "wi_1": "up"} if "gate" in layers["mlp"] else {"wi": "up"}
            for theirs, ours in (into | {"wo": "down"}).items():
                found[f"{at}/mlp/{theirs}/kernel"] = layers["mlp"][ours][number]
    return found


def scanned(arrays, inner="{side}"):
    """The same with the layers stacked along the second dimension, and a table of relative positions in each."""
    found, stacks = {}, {}
    for name, value in arrays.items():
        side, _, rest = name.partition("/")
        if rest.startswith("layers_"):
            stacks.setdefault(f"{side}/{inner.format(side=side)}/{rest.partition('/')[2]}", []).append(value)
        elif not rest.startswith("relpos_bias"):
            found[name] = value
    found |= {name: np.stack(values, axis=1) for name, values in stacks.items()}
    for side in ("encoder", "decoder"):
        layers = found[f"{side}/{inner.format(side=side)}/pre_mlp_layer_norm/scale"].shape[1]
        table = arrays[f"{side}/relpos_bias/rel_embedding"]
        found[f"{side}/{inner.format(side=side)}/relpos_bias/rel_embedding"] = np.stack([table] * layers, axis=1)
    return found


def packed(value):
    return msgpack.ExtType(1, msgpack.packb((value.shape, value.dtype.name, value.tobytes()), use_bin_type=True))


def write_array(path, value, chunks=None):
    metadata = {"shape": value.shape, "chunks": chunks or value.shape, "compressor": {"id": "gzip"}}
    spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": f"{path}/"}, "metadata": metadata}
    tensorstore.open(spec | {"dtype": value.dtype.name}, create=True).result().write(value).result()


def spec_of(name, value, old=False):
    metadata = {"shape": list(value.shape), "chunks": list(value.shape), "compressor": {"id": "gzip"}}
    spec = {"driver": "zarr", "dtype": value.dtype.name, "metadata": metadata}
    if old:  # before TensorStore 0.1.14, in a bucket
        return spec | {"kvstore": {"driver": "gcs", "bucket": "t5x-dummy-bucket"}, "path": name}
    return spec | {"kvstore": {"driver": "file", "path": name}}


def write_legacy(folder, arrays, *, version=3, old=False):
    """As T5X's Checkpointer saves: scales in the msgpack file, one kernel as its chunks, the rest in zarr."""
    os.makedirs(folder)
    leaves = {}
    for name, value in arrays.items():
        if name.endswith("scale"):
            leaves[name] = packed(value)
            continue
        if name.endswith("layers_1/mlp/wo/kernel"):
            parts = np.array_split(value.reshape(-1), 3)
            leaves[name] = {
                "__msgpack_chunked_array__": True,
                "shape": {str(i): size for i, size in enumerate(value.shape)},
                "chunks": {str(i): packed(part) for i, part in enumerate(parts)},
            }
            continue
        stored = value.view(np.uint16) if version == 2 and value.dtype == ml_dtypes.bfloat16 else value
        file = f"target.{name.replace('/', '.')}"
        write_array(f"{folder}/{file}", stored, [-(-value.shape[0] // 2), *value.shape[1:]])
        leaves[name] = spec_of(file, stored, old)
    slot = {"state.param_states.token_embedder.embedding.v_row": np.ones(16, np.float32)}
    for file, value in slot.items():
        write_array(f"{folder}/{file}", value)
    state = {"step": packed(np.asarray(7, np.int32)), "param_states": {"token_embedder": {"embedding": {"m": None}}}}
    content = {"version": version, "optimizer": {"target": tree.nested(leaves), "state": state}}
    with open(f"{folder}/checkpoint", "wb") as file:
        file.write(msgpack.packb(content, use_bin_type=True))
    return str(folder)


def loaded(path, dtype="float32"):
    foreign = open_model.open_model(str(path))
    model = api.build(hf_config.from_hf(foreign.config, dtype="float32"))
    here = jax.tree.map(lambda _: SingleDeviceSharding(jax.devices()[0]), model.abstract_params)
    return foreign, model, open_model.load_params(foreign, model, here, dtype=dtype)


def assert_equal(got, want):
    names = tree.path_names(want)
    assert tree.path_names(got) == names
    for name, a, b in zip(names, jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), err_msg=name)


@pytest.mark.parametrize("layers", ["each", "scanned", "scanned in layers"])
@pytest.mark.parametrize("name", ["t5", "t5_1_1"])
def test_a_checkpoint_is_read_to_the_bit(name, layers, params, tmp_path):
    arrays = arrays_of(params[name], fused=layers != "scanned")  # scalable T5s exist in both forms
    if layers != "each":
        arrays = scanned(arrays, "{side}" if layers == "scanned" else "layers")
    foreign, model, got = loaded(write_legacy(tmp_path / "checkpoint_7", arrays, old=layers == "scanned"))
    assert hf_config.resolved(model.config) == hf_config.resolved(T5 if name == "t5" else T5_1_1)
    assert_equal(got, params[name])
    assert foreign.guessed == {"activation"} and foreign.tokenizer == {}


@pytest.mark.parametrize("version", [2, 3])
def test_bfloat16_of_both_versions(version, params, tmp_path):
    half = jax.tree.map(lambda x: x.astype(ml_dtypes.bfloat16), params["t5_1_1"])
    path = write_legacy(tmp_path / "checkpoint_7", arrays_of(half), version=version)
    foreign, _, got = loaded(path, ml_dtypes.bfloat16)
    assert foreign.read("shared.weight").dtype == ml_dtypes.bfloat16
    assert_equal(got, half)


@pytest.mark.parametrize("form", ["folders", pytest.param("store", marks=pytest.mark.heavy), "placeholders"])
def test_the_layout_of_orbax(form, params, tmp_path):
    """Orbax's two present layouts, and its older file with placeholders; for a run the newest step is read."""
    state = tmp_path / "checkpoint_20" / "state"
    arrays = arrays_of(params["t5_1_1"])
    whole = {"target": tree.nested(arrays), "state": {"step": np.asarray(20), "param_states": {"v": np.ones(3)}}}
    if form == "placeholders":
        os.makedirs(state)
        for name, value in arrays.items():
            write_array(f"{state}/target.{name.replace('/', '.')}", value)
        placed = {name: f"PLACEHOLDER://target.{name.replace('/', '.')}" for name in arrays}
        content = {"target": tree.nested(placed), "state": {"step": packed(np.asarray(20)), "param_states": {}}}
        (state / "checkpoint").write_bytes(msgpack.packb(content, use_bin_type=True))
    else:
        handler = ocp.PyTreeCheckpointHandler(use_ocdbt=form == "store")
        with ocp.Checkpointer(handler) as checkpointer:
            checkpointer.save(state, whole)
    write_legacy(tmp_path / "checkpoint_9", {"other": np.ones(3, np.float32)})
    for path in (tmp_path, tmp_path / "checkpoint_20", state):
        _, model, got = loaded(path)
        assert hf_config.resolved(model.config) == hf_config.resolved(T5_1_1)
        assert_equal(got, params["t5_1_1"])


def test_the_configuration_of_t5x_is_read(params, tmp_path):
    write_legacy(tmp_path / "checkpoint_7", arrays_of(params["t5_1_1"]))
    (tmp_path / "config.gin").write_text(GIN)
    network = t5x_names.network_of(GIN)
    assert (network["num_heads"], network["mlp_activations"]) == (4, ("silu", "linear"))
    assert t5x_names.vocabulary_of(GIN).startswith("gs://t5-data/vocabs/cc_all")
    foreign, model, got = loaded(tmp_path)
    assert model.config.activation == "swiglu" and foreign.guessed == frozenset()
    assert_equal(got, params["t5_1_1"])
    (tmp_path / "config.gin").write_text(GIN.replace("emb_dim = 16", "emb_dim = 32"))
    with pytest.raises(UserError, match=r"shared.weight has the shape \[96, 16\], must be \[96, 32\]"):
        loaded(tmp_path)
    (tmp_path / "config.gin").write_text(GIN.replace("'silu', 'linear'", "'tanh',"))
    with pytest.raises(UserError, match=r"mlp_activations = \('tanh',\), must be one of"):
        open_model.open_model(str(tmp_path))


def test_a_run_begins_from_one(params, tmp_path):
    """The run sets what the file leaves open; what the arrays define must equal the run's."""
    path = write_legacy(tmp_path / "checkpoint_7", arrays_of(params["t5_1_1"]))
    here = SingleDeviceSharding(jax.devices()[0])
    for activation in ("swiglu", "geglu"):
        model = api.build(dataclasses.replace(T5_1_1, activation=activation))
        target = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=here), model.abstract_params)
        assert_equal(open_model.loader(path, model)(target), params["t5_1_1"])
    with pytest.raises(UserError, match="num_heads is 2, .* was trained with 4"):
        open_model.loader(path, api.build(dataclasses.replace(T5_1_1, num_heads=2)))


def test_relative_positions_of_each_layer(tmp_path):
    """Scalable T5: read, written as it was and stacked along the second dimension, and read again; and as a umT5."""
    config = dataclasses.replace(T5_1_1, relative_tables="each_layer", num_encoder_layers=2)
    model = api.build(config)
    params = drawn(model)
    values, shapes = hf_config.to_hf(config), open_model.hf_shapes(model, "umt5")
    assert values["model_type"] == "umt5" and len(shapes) == 2 * (10 + 15) + 4
    tensors = open_model.hf_tensors(params, model, "umt5")
    t5x_write.save_t5x(str(tmp_path / "out"), values, shapes, tensors, {}, dtype="float32")
    names = sorted(path.name for path in (tmp_path / "out" / "checkpoint_0").glob("target.*"))
    about = json.loads(
        (tmp_path / "out/checkpoint_0/target.decoder.decoder.relpos_bias.rel_embedding/.zarray").read_text()
    )
    assert about["shape"] == [N, 2, 32] and not any("layers_" in name for name in names)
    out = tmp_path / "out/checkpoint_0/target.encoder.encoder.attention.out.kernel/.zarray"
    assert json.loads(out.read_text())["shape"] == [N, 2, H, D]
    assert "t5x.examples.scalable_t5 import network" in (tmp_path / "out" / "config.gin").read_text()
    _, read, got = loaded(tmp_path / "out")
    assert read.config.relative_tables == "each_layer"
    assert_equal(got, params)


def test_dtype_and_dropout_are_kept(params, tmp_path, capsys):
    """Converted to a run folder, and back to T5X's form."""
    write_legacy(tmp_path / "in" / "checkpoint_7", arrays_of(params["t5_1_1"]))
    said = GIN.replace("dtype = 'bfloat16'", "dtype = 'float32'").replace("%DROPOUT_RATE", "0.125")
    (tmp_path / "in" / "config.gin").write_text(said)
    assert run(f"--from={tmp_path}/in", f"--to={tmp_path}/ours", "--format=capibara") == 0
    config.reset()
    kept = load_run(f"{tmp_path}/ours").model.config
    assert (kept.dtype, kept.dropout_rate) == ("float32", 0.125)
    for source in ("in", "ours"):
        assert run(f"--from={tmp_path}/{source}", f"--to={tmp_path}/{source}2", "--format=t5x") == 0
        network = t5x_names.network_of((tmp_path / f"{source}2" / "config.gin").read_text())
        assert (network["dtype"], network["dropout_rate"]) == ("float32", 0.125)
    capsys.readouterr()
    for wrong, told in (("dtype = 'int8'", "dtype = 'int8', must be"), ("dtype = ['a']", "T5Config.dtype = ['a']")):
        (tmp_path / "in" / "config.gin").write_text(said.replace("dtype = 'float32'", wrong))
        assert run(f"--from={tmp_path}/in", f"--to={tmp_path}/no", "--format=hf") == 2
        assert told in capsys.readouterr().err
    (tmp_path / "in" / "config.gin").write_text(said.replace("0.125", "1.5"))
    assert run(f"--from={tmp_path}/in", f"--to={tmp_path}/no", "--format=hf") == 2
    assert "T5Config.dropout_rate = 1.5, must be from 0 to below 1" in capsys.readouterr().err


def run(*argv):
    config.reset()
    return exits.run_verb(convert.main, [str(arg) for arg in argv])


def test_out_and_in_again_to_the_bit_and_as_tensorstore_reads_it(params, tmp_path, capsys):
    write_legacy(tmp_path / "in" / "checkpoint_7", arrays_of(params["t5_1_1"]))
    (tmp_path / "in" / "config.gin").write_text(GIN)
    (tmp_path / "in" / "sentencepiece.model").write_bytes(b"a model")
    assert run(f"--from={tmp_path}/in", f"--to={tmp_path}/ours", "--format=capibara") == 0
    config.reset()
    again = load_run(f"{tmp_path}/ours")
    assert_equal(again.params, params["t5_1_1"])
    assert again.model.config.activation == "swiglu"
    (tmp_path / "ours" / "spiece.model").unlink()  # no real one
    assert run("seal", f"{tmp_path}/ours") == 0
    gin = ["--gin.Dataset.vocabulary=@ByteVocabulary()"]
    assert run(f"--from={tmp_path}/ours", f"--to={tmp_path}/out", "--format=t5x", "--dtype=f32", *gin) == 0
    assert run(f"--from={tmp_path}/in", f"--to={tmp_path}/out2", "--format=t5x") == 0
    assert "t5, " in capsys.readouterr().out
    for out in ("out", "out2"):
        folder = tmp_path / out / "checkpoint_0"
        content = msgpack.unpackb((folder / "checkpoint").read_bytes(), strict_map_key=False)
        assert content["version"] == 3 and list(content["optimizer"]) == ["target", "state"]
        step = content["optimizer"]["state"]["step"]
        assert step.code == 1 and msgpack.unpackb(step.data) == [[], "int32", bytes(4)]
        for name, value in arrays_of(params["t5_1_1"]).items():
            spec = content["optimizer"]["target"]
            for part in name.split("/"):
                spec = spec[part]
            assert spec["kvstore"]["path"].rstrip("/") == f"target.{name.replace('/', '.')}"
            assert (spec["driver"], spec["dtype"]) == ("zarr", "float32")
            spec["kvstore"]["path"] = os.path.join(folder, spec["kvstore"]["path"], "")
            got = tensorstore.open(spec, open=True).result().read().result()
            np.testing.assert_array_equal(got, value, err_msg=name)
            about = json.loads((folder / f"target.{name.replace('/', '.')}" / ".zarray").read_text())
            assert about["compressor"]["id"] == "gzip" and about["dtype"] == "<f4"
        _, model, got = loaded(tmp_path / out)
        assert model.config.activation == "swiglu"
        assert_equal(got, params["t5_1_1"])
    assert (tmp_path / "out2" / "spiece.model").read_bytes() == b"a model"


def test_gin_says_what_a_checkpoint_does_not(params, tmp_path, capsys, caplog):
    path = write_legacy(tmp_path / "checkpoint_7", arrays_of(params["t5_1_1"]))
    assert run(f"--from={path}", f"--to={tmp_path}/told") == 0
    assert (
        "activation = geglu is taken, as in T5 and T5 1.1; or set --gin.EncoderDecoderConfig.activation" in caplog.text
    )
    caplog.clear()
    gin = "--gin.EncoderDecoderConfig.activation=swiglu"
    assert run(f"--from={path}", f"--to={tmp_path}/hf", gin, "--dtype=f32") == 0
    values = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (values["feed_forward_proj"], values["num_heads"], values["d_kv"]) == ("gated-silu", 4, 8)
    assert not caplog.records
    capsys.readouterr()
    assert run(f"--from={path}", f"--to={tmp_path}/no", "--gin.EncoderDecoderConfig.num_heads=8") == 2
    assert "has the shape [32, 16], must be [64, 16]" in capsys.readouterr().err
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (dict(relative_buckets=16, relative_distance=64), "relative_attention_num_buckets = 32, and this model 16"),
        (dict(norm_eps=1e-5), "layer_norm_epsilon = 1e-06, and this model 1e-05"),
        (dict(activation="gelu_exact"), "T5X has no feed_forward_proj = 'gelu', must be one of"),
    ],
)
def test_what_t5x_does_not_compute_is_not_written(changes, told, tmp_path):
    model = api.build(dataclasses.replace(T5_1_1, **changes))
    values = hf_config.to_hf(model.config)
    shapes, tensors = open_model.hf_shapes(model, "t5"), open_model.hf_tensors(drawn(model), model, "t5")
    with pytest.raises(UserError, match=told):
        t5x_write.save_t5x(str(tmp_path / "out"), values, shapes, tensors, {}, dtype="float32")
    assert not os.listdir(tmp_path)


def test_a_folder_of_hugging_face_with_tensorflows_index_is_none_of_t5x(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    tensorflow_made_it(tmp_path)
    assert not t5x_read.is_t5x(str(tmp_path))


def chunks_are_lost(folder):
    os.unlink(f"{folder}/target.token_embedder.embedding/1.0")


def index_is_cut(folder):
    os.truncate(f"{folder}/checkpoint", os.path.getsize(f"{folder}/checkpoint") - 40)


def array_is_gone(folder):
    shutil.rmtree(f"{folder}/target.decoder.layers_1.mlp.wi_0.kernel")


def array_is_elsewhere(folder):
    shutil.move(path := f"{folder}/target.token_embedder.embedding", f"{folder}/../moved")
    os.symlink("../moved", path)


def chunk_is_corrupted(folder):
    path = f"{folder}/target.encoder.layers_0.mlp.wi_0.kernel/0.0"
    os.truncate(path, os.path.getsize(path) - 20)


def tensorflow_made_it(folder):
    with open(f"{folder}/checkpoint", "wb") as file:
        file.write(b'model_checkpoint_path: "model.ckpt-1000"\n')


def it_is_nothing_of_the_kind(folder):
    with open(f"{folder}/checkpoint", "wb") as file:
        file.write(msgpack.packb({"version": 3, "optimizer": [1, 2]}))


def index_with(change):
    """Changes the embedding's specification in the index."""

    def damage(folder):
        with open(f"{folder}/checkpoint", "rb") as file:
            content = msgpack.unpackb(file.read(), strict_map_key=False)
        change(content["optimizer"]["target"]["token_embedder"])
        with open(f"{folder}/checkpoint", "wb") as file:
            file.write(msgpack.packb(content))

    return damage


def about_with(**values):
    """Changes the embedding's .zarray."""

    def damage(folder):
        path = f"{folder}/target.token_embedder.embedding/.zarray"
        with open(path) as file:
            about = json.load(file)
        with open(path, "w") as file:
            json.dump(about | values if values else [], file)

    return damage


def gin_says(content):
    def damage(folder):
        with open(f"{folder}/config.gin", "wb") as file:
            file.write(content)

    return damage


INTEGERS = packed(np.ones((96, 16), np.int32))
ARRAY = "token_embedder/embedding is missing or corrupted"


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (chunks_are_lost, r"token_embedder/embedding is missing or corrupted \(its chunk 1.0 is missing\)"),
        (index_is_cut, "is no T5X checkpoint, cut short or corrupted"),
        (array_is_gone, "decoder/layers_1/mlp/wi_0/kernel is missing or corrupted"),
        (array_is_elsewhere, "target.token_embedder.embedding', a link out of its folder to .*/moved: put a copy"),
        (chunk_is_corrupted, "encoder/layers_0/mlp/wi_0/kernel is missing or corrupted"),
        (tensorflow_made_it, "is TensorFlow's"),
        (it_is_nothing_of_the_kind, "is no T5X checkpoint, cut short or corrupted"),
        (index_with(lambda of: of["embedding"]["kvstore"].pop("path")), "token_embedder/embedding has the path None"),
        (index_with(lambda of: of["embedding"]["kvstore"].update(path=5)), "token_embedder/embedding has the path 5"),
        (index_with(lambda of: of.update(embedding=INTEGERS)), "embedding is stored as int32, must be one of float32"),
        (about_with(), ARRAY),
        (about_with(chunks=[0, 0]), ARRAY),
        (about_with(shape=None), ARRAY),
        (gin_says(b"network.T5Config.mlp_activations = 5"), r"mlp_activations = \(5,\), must be one of"),
        (gin_says(b"network.T5Config.mlp_activations = ([1], 2)"), "mlp_activations = .*, must be one of"),
        (gin_says(b"network.T5Config.param_scan_axis = 'x'"), "param_scan_axis = 'x', must be an axis"),
        (gin_says(b"A = %B\nB = %A\nnetwork.T5Config.num_heads = %A\n"), "is a macro of itself"),
        (gin_says(b"\xff\xfe"), "config.gin is no text in UTF-8"),
    ],
)
def test_a_corrupted_checkpoint_is_reported_in_one_line(damage, told, params, tmp_path):
    path = write_legacy(tmp_path / "checkpoint_7", arrays_of(params["t5_1_1"]))
    damage(path)
    with pytest.raises(UserError, match=told) as error:
        loaded(path)
    assert "\n" not in str(error.value)


def test_models_that_are_no_t5_are_refused(params, tmp_path):
    arrays = arrays_of(params["t5_1_1"])
    decoder = {name: value for name, value in arrays.items() if name.startswith("decoder")}
    with pytest.raises(UserError, match="has no encoder and no decoder/token_embedder: T5X's networks t5"):
        loaded(write_legacy(tmp_path / "checkpoint_1", decoder))
    own = scanned(arrays)
    name = "encoder/encoder/relpos_bias/rel_embedding"
    own[name] = own[name] + np.arange(3, dtype=np.float32)[:, None]
    del own["encoder/encoder/mlp/wo/kernel"]
    with pytest.raises(UserError, match="are missing in the checkpoint"):
        loaded(write_legacy(tmp_path / "checkpoint_2", own))
    more = arrays | {"encoder/layers_0/mlp/gate/kernel": np.ones((2, 2), np.float32)}
    with pytest.raises(UserError, match="encoder/layers_0/mlp/gate/kernel is in the checkpoint, not in the model"):
        loaded(write_legacy(tmp_path / "checkpoint_3", more))
    less = {name: value for name, value in arrays.items() if "layers_1/mlp/wo" not in name}
    with pytest.raises(UserError, match="are missing in the checkpoint"):
        loaded(write_legacy(tmp_path / "checkpoint_4", less))
    assert not t5x_read.is_t5x(str(tmp_path / "nothing")) and t5x_read.is_t5x(str(tmp_path))
