"""Every field of PEFT's LoraConfig: our logits are those of PEFT, or an error names the field.

peft_fields.json is written by peft_fields_peer.py (peft 0.21.2, transformers 5.24): PEFT saved each adapter, and loaded it
on a fresh base. The lists of fields are PEFT's own.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import sys
import types

import jax
import numpy as np
import pytest

from capibara import config
from capibara.checkpoints.policy import Checkpointing
from capibara.cli import convert, merge
from capibara.core import tree
from capibara.core.types import UserError
from capibara.interop import open_model
from capibara.interop import peft_runs as adapters
from capibara.interop.hf import config as hf_config
from capibara.interop.hf import folder as hf_folder
from capibara.interop.hf import tables
from capibara.interop.hf.layout import tensors
from capibara.interop.peft import fields
from capibara.interop.peft import folder as peft
from capibara.loading import adapters as beside
from capibara.models import api
from capibara.models.api import Lora
from capibara.multihost import exits

safetensors = pytest.importorskip("safetensors.numpy")
HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "models" / "golden"))
from answers import draw  # noqa: E402

RECORDED = json.loads((HERE / "peft_fields.json").read_text())
CASES = RECORDED["cases"]
TOLERANCE = dict(rtol=0, atol=5e-5)


@functools.cache
def base_of(name):
    """config.json, model and parameters of a base with drawn weights."""
    like = RECORDED["bases"][name] | {"transformers_version": "5.24.0"}
    model = api.build(dataclasses.replace(hf_config.from_hf(like), dtype="float32"))
    shapes = dict(
        zip(
            tree.path_names(model.abstract_params),
            (x.shape for x in jax.tree.leaves(model.abstract_params)),
            strict=True,
        )
    )
    table = tables.of(hf_config.to_hf(model.config, like)["model_type"], shapes, {}, fused_experts=name == "experts")
    values = tensors.read(table, shapes, draw)
    return like, model, tree.map_with_names(lambda path, _: values[path], model.abstract_params)


def folder_of(case, path, changes=()):
    """The folder that PEFT wrote."""
    shared = case.get("shared", {})
    values = {}
    for name, shape in case["tensors"].items():
        other, turned = shared.get(name, (name, False))
        value = draw(other, tuple(reversed(shape) if turned else shape))
        values[name] = np.ascontiguousarray(value.T if turned else value)
    path.mkdir(exist_ok=True)
    safetensors.save_file(values, path / peft.WEIGHTS)
    (path / peft.CONFIG).write_text(json.dumps(case["config"] | dict(changes)))
    return str(path)


@functools.cache
def compiled(config):
    return jax.jit(api.build(config).logits)


def logits(model, params):
    """Those of the last row, at the recorded positions and entries."""
    tokens = np.array(RECORDED["tokens"], np.int32)
    positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    batch = {"tokens": tokens, "positions": positions, "segment_ids": np.ones_like(tokens)}
    batch |= {f"encoder_{key}": value for key, value in batch.items()}
    got = np.asarray(compiled(model.config)(params, batch))[-1]
    return got[np.ix_(RECORDED["positions"], RECORDED["entries"])]


# Those of make test beside what is refused.
QUICK = (
    "init_lora_weights:pissa", "kasa_config", "use_bdlora", "layer_replication", "target_parameters:patterns",
    "modules_to_save:tied_embedding", "ensure_weight_tying:target_ends", "trainable_token_indices:ends",
    "target_modules:ends_dora",
)  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        name if name in QUICK or "refused" in case else pytest.param(name, marks=pytest.mark.heavy)
        for name, case in CASES.items()
    ],
)
def test_an_adapter_answers_as_in_peft_or_its_field_is_named(name, tmp_path):
    case = CASES[name]
    like, model, params = base_of(case["base"])
    folder = folder_of(case, tmp_path / "adapter")
    if "refused" in case:
        with pytest.raises(UserError, match=case["refused"]) as raised:
            adapters.merged(folder, model, params, like)
        assert "\n" not in str(raised.value)
        return
    found, merged = adapters.merged(folder, model, params, like)
    np.testing.assert_allclose(logits(found, merged), case["logits"], **TOLERANCE)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case["base"] == "tied" and "shared" in case])
def test_of_two_values_for_one_tensor_the_one_that_peft_loads_last_counts(name, tmp_path):
    """The recorded logits are of these files, in which a tied head has other values than its embedding."""
    case = {key: value for key, value in CASES[name].items() if key != "shared"}
    like, model, params = base_of("tied")
    found, merged = adapters.merged(folder_of(case, tmp_path / "adapter"), model, params, like)
    np.testing.assert_allclose(logits(found, merged), case["logits"], **TOLERANCE)


def test_no_field_of_peft_is_unknown():
    assert RECORDED["peft"].startswith("0.21.")
    assert {name: field.default for name, field in fields.FIELDS.items()} == RECORDED["fields"]
    names = {field.partition(":")[0] for field in CASES}
    assert names == fields.FIELDS.keys()
    of_fields = {CONFIGS[kind]: tuple(values) for kind, values in RECORDED["configs"].items() if CONFIGS[kind]}
    assert of_fields == fields.PARTS


# PEFT's configurations inside of LoraConfig, and the fields that they are of; "": its field is refused.
CONFIGS = {
    "ArrowConfig": "",
    "BdLoraConfig": "use_bdlora",
    "CordaConfig": "corda_config",
    "EvaConfig": "eva_config",
    "KasaConfig": "kasa_config",
    "LoftQConfig": "loftq_config",
    "LoraGAConfig": "lora_ga_config",
    "LoraRuntimeConfig": "runtime_config",
    "MontecloraConfig": "monteclora_config",
    "VeloraConfig": "velora_config",
}
GOOD = {"peft_type": "LORA", "target_modules": ["q_proj"]}
GARBAGE = [
    True,
    0,
    1,
    -3,
    0.5,
    2**40,
    1e30,
    "",
    "8",
    "(a+)+$",
    "(",
    [],
    [1],
    ["a"],
    [None],
    [[0, 1]],
    [[1]],
    {},
    {"a": 1},
]
GARBAGE += [{"a": "b"}, {"a": [1]}, {"a": [-1]}, {"(": 1}, {"a": True}, {"nblocks": "2"}, {"new": 1}, [{}], [True]]
JSON_TYPES = {
    "bool": bool,
    "int": int,
    "float": float,
    "str": str,
    "list": list,
    "dict": dict,
    "Literal": str,
    "Config": dict,
}


def read_with(tmp_path, changes):
    (tmp_path / peft.CONFIG).write_text(json.dumps(GOOD | changes))
    return fields.read(str(tmp_path))


@pytest.mark.parametrize("name", fields.FIELDS)
def test_values_of_other_types_are_refused_by_name(name, tmp_path):
    """A value that has none of the JSON types of PEFT's annotation is refused; so is any that fields.read does not expect."""
    annotation = RECORDED["types"][name]
    allowed = tuple(kind for word, kind in JSON_TYPES.items() if word in annotation)
    allowed += (str,) if "Type" in annotation else ()
    refused = 0
    for value in GARBAGE:
        fits = any(type(value) is kind for kind in allowed) or (type(value) is float and name == "lora_alpha")
        try:
            found = read_with(tmp_path, {name: value})
        except UserError as error:
            refused += 1
            assert name in str(error) and "\n" not in str(error), (value, str(error))
        else:
            assert fits or (name in ("lora_dropout",) and value == 0), (value, found[name])
    assert refused >= 10


def test_unknown_fields_are_refused_unless_they_have_no_effect(tmp_path):
    for value in (None, False, 0, "", [], {}):
        read_with(tmp_path, {"new": value, "eva_config": {"new": value}})
    for value in (True, 1, 0.5, "a", [0], {"a": None}):
        with pytest.raises(UserError, match="has new = .*, which PEFT 0.21's LoraConfig does not have"):
            read_with(tmp_path, {"new": value})
        with pytest.raises(UserError, match="has eva_config.new = "):
            read_with(tmp_path, {"eva_config": {"new": value}})
    read_with(tmp_path, {})
    for missing in GOOD:
        (tmp_path / peft.CONFIG).write_text(json.dumps({key: value for key, value in GOOD.items() if key != missing}))
        with pytest.raises(UserError, match=missing):
            fields.read(str(tmp_path))


@pytest.mark.parametrize(
    "changes",
    [{"match_strict": True}, {"match_strict": None}, {"target_modules_bd_b": ["down", "q_proj"]}],
    ids=str,
)
def test_a_module_without_blocks_or_with_two_is_refused_where_peft_refuses_it(changes, tmp_path):
    case = CASES["use_bdlora"]
    like, model, params = base_of(case["base"])
    blocks = {key: value for key, value in (case["config"]["use_bdlora"] | changes).items() if value is not None}
    folder = folder_of(case, tmp_path / "adapter", {"use_bdlora": blocks})
    module = "q_proj" if "target_modules_bd_b" in changes else "up_proj"
    with pytest.raises(UserError, match=f"has use_bdlora, which must name .*{module} for one of its two matrices"):
        adapters.merged(folder, model, params, like)


TOGETHER = {
    "lora_bias and use_dora": {"lora_bias": True, "use_dora": True},
    "lora_bias and use_bdlora": {"lora_bias": True, "use_bdlora": {"nblocks": 2}},
    "use_dora and use_bdlora": {"use_dora": True, "use_bdlora": {}},
    "use_dora and kasa_config": {"use_dora": True, "kasa_config": {}},
    "kasa_config and init_lora_weights": {"kasa_config": {}, "init_lora_weights": "pissa"},
    "monteclora_config and velora_config": {"monteclora_config": {}, "velora_config": {}},
    "use_dora and init_lora_weights": {"use_dora": True, "init_lora_weights": "mica"},
    "init_lora_weights = 'olora' and target_parameters": {"init_lora_weights": "olora", "target_parameters": ["a"]},
    "kasa_config = {} and layer_replication": {"kasa_config": {}, "layer_replication": [[0, 1]]},
}


@pytest.mark.parametrize("fields_named", TOGETHER)
def test_fields_that_exclude_each_other_are_refused_together_and_read_alone(fields_named, tmp_path):
    changes = TOGETHER[fields_named]
    with pytest.raises(UserError, match=f"has {fields_named}, which "):
        read_with(tmp_path, changes)
    for name, value in changes.items():
        read_with(tmp_path, {name: value})


def test_a_pattern_is_of_the_whole_end_of_a_name():
    """As peft.utils.get_pattern_key of PEFT 0.21.2 matches it: from a point, or the beginning, to the end."""
    name = "model.layers.1.self_attn.q_proj"
    config = {"r": 8, "lora_alpha": 8, "use_rslora": False, "target_parameters": None}
    for key, matches in {
        "q_proj": True, "self_attn.q_proj": True, r".*\.1\..*": True, name: True, r"q_\w+": True,
        "q": False, "proj": False, "self_attn": False, r"model\.layers\.1": False, "_proj": False, "attn.q_proj": False,
    }.items():  # fmt: skip
        patterns = {"rank_pattern": {key: 2}, "alpha_pattern": {key: 6}}
        assert fields.rank_of(name, config | patterns) == (2 if matches else 8), key
        assert fields.scale_of(name, config | patterns) == (3 if matches else 1), key


def test_the_documentation_has_every_field():
    text = (HERE.parents[1] / "docs" / "fine_tuning.md").read_text()
    lines = [f"| `{name}` | {field.use} | {field.about} |\n" for name, field in fields.FIELDS.items()]
    assert all(line in text for line in lines), [line for line in lines if line not in text]


def saved_base(name, path):
    """A Hugging Face folder of a base."""
    like, model, params = base_of(name)
    values = hf_config.to_hf(model.config, like, dtype="float32")
    shapes = open_model.hf_shapes(model, values["model_type"])
    tensors_of = open_model.hf_tensors(params, model, values["model_type"])
    hf_folder.save_hf(str(path), values, shapes, tensors_of, {}, dtype="float32")
    return str(path)


def converted(*argv):
    config.reset()
    return exits.run_verb(convert.main, list(argv))


def answers_of(path):
    foreign = open_model.open_model(str(path))
    model = api.build(dataclasses.replace(hf_config.from_hf(foreign.config), dtype="float32"))
    here = jax.tree.map(lambda _: jax.sharding.SingleDeviceSharding(jax.devices()[0]), model.abstract_params)
    return logits(model, open_model.load_params(foreign, model, here)), foreign.config


def test_convert_unties_what_an_adapter_makes_different(tmp_path, capsys):
    case = CASES["modules_to_save:tied_embedding"]
    base = saved_base("tied", tmp_path / "base")
    folder = folder_of(case, tmp_path / "adapter", {"base_model_name_or_path": base})
    assert converted(f"--from={folder}", f"--to={tmp_path}/merged") == 0
    got, written = answers_of(tmp_path / "merged")
    assert written["tie_word_embeddings"] is False
    np.testing.assert_allclose(got, case["logits"], **TOLERANCE)
    like, model, params = base_of("tied")
    loaded = types.SimpleNamespace(model=model, params=params, like=like, training=None)
    with pytest.raises(UserError, match="has modules_to_save = .*, which changes one of embedding and head"):
        beside._values(folder, loaded, Checkpointing())
    with pytest.raises(UserError, match="has modules_to_save = .*, which changes one of embedding and head"):
        adapters.loader(folder, model, merge=True)


@pytest.mark.parametrize("name", ["alora_invocation_tokens", "init_lora_weights:lora_ga", "use_qalora"])
def test_every_reader_refuses_what_a_field_means(name, tmp_path, capsys):
    base = saved_base("untied", tmp_path / "base")
    folder = folder_of(CASES[name], tmp_path / "adapter", {"base_model_name_or_path": base})
    field = CASES[name]["refused"]
    like, model, params = base_of("untied")
    for argv in ([], [f"--plus={folder}"], ["--format=gguf_lora"]):
        target = "new.gguf" if "--format=gguf_lora" in argv else "new"
        assert converted(f"--from={folder}", f"--to={tmp_path}/{target}", *argv) == 2
        assert f"has {field} = " in capsys.readouterr().err
    loaded = types.SimpleNamespace(model=model, params=params, like=like, training=None)
    for read in (
        lambda: beside._values(folder, loaded, Checkpointing()),
        lambda: adapters.loader(folder, model, merge=True),
    ):
        with pytest.raises(UserError, match=f"has {field} = "):
            read()


def test_a_part_of_the_base_is_in_the_adapter_wherever_it_is_read(tmp_path, capsys):
    """PiSSA beside a base, and as initial weights: the adapter has further ranks, and answers as in PEFT."""
    case = CASES["init_lora_weights:pissa"]
    like, model, params = base_of("untied")
    base = saved_base("untied", tmp_path / "base")
    folder = folder_of(case, tmp_path / "adapter", {"base_model_name_or_path": base})
    loaded = types.SimpleNamespace(model=model, params=params, like=like, training=None)
    lora, values = beside._values(folder, loaded, Checkpointing())
    assert set(lora.of_layers("layers/attention/query", range(3))[0]) == {8}
    adapted = api.build(dataclasses.replace(model.config, lora=lora))
    np.testing.assert_allclose(logits(adapted, tree.joined(values, params)), case["logits"], **TOLERANCE)
    loader = adapters.loader(folder, model, merge=True)
    jax.tree.map(np.testing.assert_array_equal, loader.values, values)
    assert converted(f"--from={folder}", f"--plus={folder}", f"--to={tmp_path}/sum", "--format=peft") == 2
    assert "has init_lora_weights = 'pissa', and only pairs" in capsys.readouterr().err


def written(name, path, **options):
    """An adapter with drawn values that we write, and its logits."""
    like, model, params = base_of(name)
    adapted = api.build(dataclasses.replace(model.config, lora=Lora(rank=2, alpha=4.0, **options)))
    new = jax.jit(adapted.adapt)(params, jax.random.key(0))
    drawn = tree.map_with_names(lambda path, x: draw(path, x.shape), adapted.trained(new))
    whole = tree.joined(drawn, new)
    model_type = hf_config.to_hf(model.config, like)["model_type"]
    peft.write_peft(str(path), whole, adapted, model_type, "base")
    return whole, adapted, model_type


def test_a_trained_embedding_is_written_for_all_modules_that_share_it(tmp_path):
    """As PEFT writes it with ensure_weight_tying, and for T5 with all three modules named."""
    for case, options in (
        ("ensure_weight_tying:ends", dict(modules_to_save=("embedding",))),
        ("modules_to_save:t5", dict(targets=("query",), modules_to_save=("embedding",))),
    ):
        path, name = tmp_path / case, CASES[case]["base"]
        whole, adapted, model_type = written(name, path, **options)
        values = json.loads((path / peft.CONFIG).read_text())
        wanted = {key for key in CASES[case]["tensors"] if ".lora_" not in key}
        stored = safetensors.load_file(path / peft.WEIGHTS)
        assert wanted == {key for key in stored if ".lora_" not in key}
        assert sorted(values["modules_to_save"]) == sorted({key.split(".")[-2] for key in wanted})
        assert values["ensure_weight_tying"] == (name == "tied")
        read = adapters.merged(str(path), base_of(name)[1], base_of(name)[2], base_of(name)[0])
        assert read[0].config == base_of(name)[1].config  # still tied
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), read[1], jax.jit(adapted.merge)(whole))


def test_names_that_peft_takes_for_others_are_not_written(tmp_path):
    """PEFT's modules_to_save "norm" is input_layernorm too."""
    written("untied", tmp_path / "adapter", modules_to_save=("final_norm/scale",))
    assert json.loads((tmp_path / "adapter" / peft.CONFIG).read_text())["modules_to_save"] == ["model.norm"]
    with pytest.raises(UserError, match=r"PEFT cannot name encoder.block.\{l\}.layer.0.layer_norm without others"):
        written("t5", tmp_path / "t5", targets=("query",), modules_to_save=("encoder/layers/attention_norm/scale",))


@pytest.mark.parametrize(
    ("name", "field"), [("modules_to_save:tied_embedding", "head"), ("layer_replication", "num_layers")]
)
def test_a_merge_does_not_take_another_model_for_the_base(name, field, tmp_path, capsys):
    case = CASES[name]
    base = saved_base(case["base"], tmp_path / "base")
    changes = {"base_model_name_or_path": base} | ({"layer_replication": [[0, 1]]} if field == "num_layers" else {})
    if field == "num_layers":
        case = case | {"tensors": {key: x for key, x in case["tensors"].items() if ".layers.0." in key}}
    folder = folder_of(case, tmp_path / "adapter", changes)
    config.reset()
    argv = [folder, base, "--method=linear", "--weights=0.5,0.5", f"--to={tmp_path}/new"]
    assert exits.run_verb(merge.main, argv) == 2
    assert f"adapter with which its base has another {field}" in capsys.readouterr().err
