"""Schemes of modules in a quantization_config: AutoRound's, GPTQModel's and Gemma's patterns, and classes of torchao."""

from __future__ import annotations

import hashlib
import json
import time

import numpy as np
import pytest
from safetensors.numpy import save_file

from capibara.core.types import UserError
from capibara.interop.hf.folder import HfFolder
from capibara.interop.quantize import folder as quantized_folder
from capibara.interop.quantize.folder import QuantizedFolder
from capibara.interop.quantize.formats import torchao
from capibara.interop.quantize.values import patterns
from tests.interop.test_stored_quants import BASE, CASES, OLDER, Parts, case_of, opened, tensors

ROUND = CASES["auto-round: 4 bits of auto_round:auto_gptq"]
FP8 = case_of("FP8 of channels")
WHOLE = "auto_round:llm_compressor"


def reads(case, config, changes=()):
    value = opened(case, changes, config).read(f"{BASE}.weight")
    assert hashlib.sha256(value.tobytes()).hexdigest() == case["values"]["hash"]


@pytest.mark.parametrize("stated", [BASE, "q_proj", r"layers\.\d+\.self_attn\.[qkv]_proj$"])
def test_auto_round_has_schemes_by_name_and_by_pattern(stated):
    """A name that no module has is searched in names; one of a module counts before patterns."""
    config = ROUND["config"] | {"bits": 8, "extra_config": {stated: {"bits": 4}, "lm_head": {"bits": 16}}}
    reads(ROUND, config)
    reads(ROUND, config | {"extra_config": {"attn": {}, "self_attn": {"bits": 8}, BASE: {"bits": 4}}})
    reads(ROUND, config | {"extra_config": {"attn": {}, "q_proj": {"bits": 4}}})
    with pytest.raises(UserError, match=r"qzeros has the shape \[3, 4\], must be \[3, 8\]"):
        reads(ROUND, config | {"extra_config": {"k_proj": {"bits": 4}}})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"packing_format": []}, r"packing_format is \[\], must be one of"),
        ({"packing_format": "auto_round:exllama"}, "packing_format is 'auto_round:exllama', must be one of"),
        ({"rotation_configs": [{"kind": "hadamard"}]}, "'rotation_configs' = .*which capibara does not know"),
        ({"data_type": "mx_int"}, f"data_type is 'mx_int' for {BASE}, must be int"),
        ({"extra_config": {"a+": {"bits": 4, "turn": 1}}}, "has 'turn' = 1"),
        ({"extra_config": {"(a+)+$": {"bits": 4}}}, "which cannot be used"),
        ({"extra_config": ["q_proj"]}, "must be modules and their schemes"),
        ({"extra_config": {f"a{at}": {"bits": 4} for at in range(257)}}, "257 patterns, must have at most 256"),
        ({"bits": 9}, f"bits is 9 for {BASE}, must be 2 or 3"),
        ({"group_size": [8, 8]}, f"group_size is .* for {BASE}, must be a number"),
    ],
)
def test_what_auto_round_says_otherwise_is_refused(changes, message):
    with pytest.raises(UserError, match=message):
        opened(ROUND, config=ROUND["config"] | changes)


def test_zeros_are_as_the_packing_says():
    """The same words, with zeros minus 1 or as they are: the name of the packing alone tells them apart.

    Without one, auto-round and transformers 5.24 take zeros minus 1.
    """
    values = [
        opened(ROUND, config=ROUND["config"] | {"packing_format": packing}).read(f"{BASE}.weight").astype(np.float32)
        for packing in ("auto_round:auto_gptq", "auto_round", "auto_round:gptqmodel", "auto_round:gptq")
    ]
    assert (values[0] != values[1]).all()
    np.testing.assert_array_equal(values[1], values[2])
    np.testing.assert_array_equal(values[0], values[3])
    reads(ROUND, {key: value for key, value in ROUND["config"].items() if key != "packing_format"})


@pytest.mark.parametrize(
    ("name", "stated"),
    [
        ("MXFP4", {"data_type": "mx_fp", "bits": 4, "group_size": 32}),
        ("MXFP8", {"data_type": "mx_fp", "bits": 8, "group_size": 32}),
        ("NVFP4", {"data_type": "nv_fp", "bits": 4, "group_size": 16}),
    ],
)
def test_small_floats_of_auto_round_are_those_of_compressed_tensors(name, stated):
    case, about = case_of(name), {"quant_method": "auto-round", "packing_format": WHOLE, **stated}
    reads(case, about | {"extra_config": {"mlp": {"bits": 16}}, "act_bits": 4, "act_dynamic": True})
    for wrong in ({"bits": 3}, {"data_type": "mx_int"}, {"bits": [4]}):
        with pytest.raises(UserError, match=f"for {BASE}, must be mx_fp and 4 or"):
            reads(case, about | wrong)


def test_fp8_has_a_scale_for_each_output():
    """As AutoRound's fp8_static, with scales [O], and fbgemm_fp8's, [O, 1]."""
    stored = tensors(FP8)
    kind, scales = stored[f"{BASE}.weight_scale"]
    flat = {f"{BASE}.weight_scale": (kind, scales.reshape(-1)), f"{BASE}.input_scale": ("F32", np.ones(1, np.float32))}
    static = {"quant_method": "auto-round", "packing_format": "auto_round:fp8_static", "activation_scheme": "static"}
    reads(FP8, static | {"fmt": "e4m3", "bits": 8, "group_size": -1, "data_type": "fp"}, flat)
    reads(FP8, {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]})
    for change in ({"activation_scale_ub": "much"}, {"surprise": 1}, {"modules_to_not_convert": [BASE]}):
        with pytest.raises(UserError):
            reads(FP8, {"quant_method": "fbgemm_fp8", **change})
    kind, codes = stored[f"{BASE}.weight"]
    with pytest.raises(UserError, match=r"has the shape \[24, 1\], must be \[2, 1, 1\]"):
        opened(FP8, {f"{BASE}.weight": (kind, np.stack([codes, codes]))}, {"quant_method": "fp8"})


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_folders_that_auto_round_writes_for_others(method):
    """With all keys of auto-round 0.16.1; they say nothing of the codes."""
    more = {
        "autoround_version": "0.16.1", "data_type": "int", "enable_quanted_input": False, "provider": "auto-round",
        "to_quant_block_names": "model.layers",
    }  # fmt: skip
    reads(OLDER[method], OLDER[method]["config"] | more)


def test_gptq_has_schemes_by_patterns_from_the_start_of_a_name():
    case = OLDER["gptq"]
    eight = case["config"] | {"bits": 8, "format": "gptq", "method": "gptq"}
    reads(case, eight | {"dynamic": {r"+:.*\.q_proj": {"bits": 4}, r".*": {"bits": 8}, "-:.*": {}}})
    reads(case, case["config"] | {"dynamic": {"-:lm_head": {}, "-:q_proj": {}, "+:self_attn": {"bits": 2}}})
    for dynamic, message in (
        ({r"-:.*\.q_proj": {}}, "dynamic leaves it out"),
        ({r".*\.q_proj": {"bits": 4, "turn": 1}}, "has 'turn' = 1"),
        ({"(a*)*": {}}, "which cannot be used"),
        ({r".*\.q_proj": {"bits": 5}}, "which 5-bit codes do not fill|scales has 3 groups|has the shape"),
        ([BASE], "must be patterns and what differs there"),
    ):
        with pytest.raises(UserError, match=message):
            reads(case, case["config"] | {"dynamic": dynamic})
    with pytest.raises(UserError, match="format = 'gptq_v2' and checkpoint_format = 'gptq', must be equal"):
        reads(case, case["config"] | {"format": "gptq_v2"})
    with pytest.raises(UserError, match="method is 'qqq', must be gptq"):
        reads(case, case["config"] | {"method": "qqq"})


def test_gemma_has_bits_by_patterns():
    case = CASES["transformers: gemma: 2 bits, bfloat16"]
    reads(case, {"quant_method": "gemma", "num_bits": 2})
    reads(case, {"quant_method": "gemma", "module_quant_configs": {"self_attn": {"num_bits": 2}, "q_proj": {}}})
    with pytest.raises(UserError, match="num_bits is 3, must be 2, 4 or 8"):
        reads(case, {"quant_method": "gemma", "num_bits": 3})
    with pytest.raises(UserError, match=r"q_proj\.weight is stored as U8, must be I8"):
        reads(case, {"quant_method": "gemma", "num_bits": 8})


def test_blocks_of_gemma_divide_the_inputs():
    case = CASES["transformers: gemma: 4 bits, bfloat16"]
    kind, scales = tensors(case)[f"{BASE}.weight_scale"]
    with pytest.raises(UserError, match="weight_scale has 5 blocks, must divide 96 inputs"):
        opened(case, {f"{BASE}.weight_scale": (kind, np.repeat(scales[:, :1], 5, axis=1))})


@pytest.mark.parametrize(
    ("name", "part", "message"),
    [
        ("transformers: gemma: 4 bits", "k_cache_scale", "activations and key/value caches of fixed scales"),
        ("amd-quark: int8 of channels", "input_scale", "activations and caches as Quark has them"),
    ],
)
def test_fixed_scales_of_activations_are_told(name, part, message, caplog):
    folder = opened(CASES[f"{name}, bfloat16"], {f"{BASE}.{part}": ("F32", np.ones(()))})
    assert list(folder.shapes()) == [f"{BASE}.weight"]
    assert f"{message}: not computed" in caplog.text


@pytest.mark.parametrize("name", ["Int4Tensor", "Int4TilePackedTo4dTensor", None])
def test_classes_of_torchao_are_named(name):
    case = CASES["torchao: int8 in groups, bfloat16"]
    text = case["metadata"][f"{BASE}.weight"]
    metadata = {f"{BASE}.weight": text.replace("Int8Tensor", name)} if name else {}
    with pytest.raises(UserError, match=f"of torchao's '{name}', must be one of" if name else "no class of torchao"):
        opened({**case, "metadata": metadata})


def test_what_the_metadata_of_torchao_say_is_checked():
    """Scales have shapes that other blocks would have, too: the metadata decide."""
    case = CASES["torchao: MXFP8, bfloat16"]
    text = case["metadata"][f"{BASE}.weight"]
    for old, new, message in (
        ('"is_swizzled_scales": true', '"is_swizzled_scales": false', r"has the shape .*, must be \[32, 3\]"),
        ('"block_size": 32', '"block_size": 64', "block_size 64"),
        ("float8_e4m3fn", "float8_e5m2", "must be E4M3 or E2M1"),
        ('"scale"]', '"scale", "act_pre_scale"]', "scales activations"),
        ('"qdata", "scale"', '"qdata"', "is not listed in the metadata"),
        ('"bfloat16"', '"float64"', "has the dtype"),
        ('"block_size": 32', '"block_size": 32, "turn": 1', "in the metadata has 'turn' = 1"),
    ):
        assert old in text
        with pytest.raises(UserError, match=message):
            opened({**case, "metadata": {f"{BASE}.weight": text.replace(old, new)}})


def test_blocks_of_torchao_divide_the_weight():
    """With scales of the shape that cut blocks would have; swizzled ones of 5 and 6 groups are equal."""
    case = CASES["torchao: int8 in groups, bfloat16"]
    text = case["metadata"][f"{BASE}.weight"]
    parts = {name: tensors(case)[name] for name in (f"{BASE}._weight_scale", f"{BASE}._weight_zero_point")}
    changes = {name: (kind, value[:, :2]) for name, (kind, value) in parts.items()}
    metadata = {f"{BASE}.weight": text.replace('"block_size": [1, 32]', '"block_size": [1, 40]')}
    with pytest.raises(UserError, match=r"has blocks of \[1, 40\], must divide its shape \[32, 96\]"):
        opened({**case, "metadata": metadata}, changes)
    case = CASES["torchao: NVFP4, bfloat16"]
    kind, codes = tensors(case)[f"{BASE}._weight_qdata"]
    with pytest.raises(UserError, match="has the block_size 16 and 88 inputs, must be 16 that divides them"):
        opened(case, {f"{BASE}._weight_qdata": (kind, codes[:, :44])})


def test_swizzled_scales_are_where_tensor_cores_read_them():
    """Rows of 130 and 5 columns, in two by two tiles of 128 and 4: row r lies in r % 32, columns at 4 * (r // 32)."""
    scales = np.arange(130 * 5).reshape(130, 5)
    stored = np.zeros((2 * 2, 32, 16), int)
    for row, column in np.ndindex(scales.shape):
        tile = 2 * (row // 128) + column // 4
        stored[tile, row % 32, 4 * (row % 128 // 32) + column % 4] = scales[row, column]
    np.testing.assert_array_equal(torchao.deswizzled(stored.reshape(64, 32), (130, 5)), scales)


def test_files_of_a_folder_that_say_otherwise_are_refused(tmp_path):
    """Of each file, its library and its list of tensors may differ."""
    model = {"model_type": "llama", "quantization_config": {"quant_method": "torchao"}}
    (tmp_path / "config.json").write_text(json.dumps(model))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "1.st", "b": "2.st"}}))

    def write(name, file, **metadata):
        save_file({name: np.ones(2, np.float32)}, tmp_path / file, metadata=metadata)

    write("a", "1.st", format="pt", tensor_names="[1]", weight="x")
    write("b", "2.st", format="np", tensor_names="[2]")
    assert HfFolder(str(tmp_path)).metadata()["weight"] == "x"
    write("b", "2.st", weight="y")
    with pytest.raises(UserError, match="2.st has another 'weight' in its metadata than other files"):
        HfFolder(str(tmp_path)).metadata()


def test_names_and_globs_match_in_their_order():
    globs = patterns.Globs(["b.0", "a.*", "a.1", "b.?", "c.[12]", "a.1"], "exclude")
    firsts = {"a.1": "a.*", "a.2": "a.*", "b.0": "b.0", "b.1": "b.?", "c.2": "c.[12]", "c.3": None, "xa.1": None}
    assert {module: globs.first(module) for module in firsts} == firsts
    assert patterns.Globs(map(str, range(5000)), "exclude").first("4999") == "4999"


@pytest.mark.parametrize("reader", ["auto-round", "compressed-tensors"])
def test_thousands_of_modules_by_name_take_linear_time(reader):
    """As of experts."""
    case, count = case_of("MXFP4"), 16_000
    stored = {
        f"model.layers.0.mlp.experts.{at}.{name.removeprefix(f'{BASE}.')}": value
        for at in range(count)
        for name, value in tensors(case).items()
    }
    about = {"quant_method": reader, "packing_format": WHOLE, "data_type": "mx_fp", "bits": 4, "group_size": 32}
    if reader == "compressed-tensors":
        about = case["config"] | {"ignore": [f"visual.{at}" for at in range(count)]}
    started = time.process_time()
    folder = QuantizedFolder(Parts({"model_type": "llama", "quantization_config": about}, stored))
    assert len(folder.shapes()) == count
    assert time.process_time() - started < 5


QUARK = CASES["amd-quark: uint4 in groups, bfloat16"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"exclude": ["*q_proj"]}, "scales a module that quantization_config excludes"),
        ({"algo_config": [{"name": "rotation"}]}, "algo_config has .*rotation.*must be one of awq"),
        ({"layer_type_quant_config": {"Linear": {}}}, "no layer_type_quant_config"),
        ({"global_quant_config": None}, "does not say how its weight is stored"),
        ({"export": {"pack_method": "other"}}, "pack_method is 'other', must be reorder or order"),
        ({"export": "order"}, "export is 'order', must be an object"),
        ({"exclude": ["[" * 100_000]}, "exclude has the pattern .*, must have at most 256 characters"),
        ({"layer_quant_config": {f"{at}*": {} for at in range(1025)}}, "1,025 patterns, must have at most 1,024"),
    ],
)
def test_what_quark_says_otherwise_is_refused(changes, message):
    with pytest.raises(UserError, match=message):
        opened(QUARK, config=QUARK["config"] | changes)


def test_layers_of_quark_have_schemes_by_name():
    right = QUARK["config"]["global_quant_config"]
    wrong = right | {"weight": right["weight"] | {"dtype": "mx6"}}
    reads(QUARK, QUARK["config"] | {"global_quant_config": wrong, "layer_quant_config": {"*.q_proj": right}})
    reads(QUARK, QUARK["config"] | {"algo_config": [{"name": "awq"}], "layer_quant_config": {"*.k_proj": wrong}})
    for key in ("is_scale_quant", "turn"):
        scaled = right | {"weight": right["weight"] | {key: True}}
        with pytest.raises(UserError, match=f"{BASE} has '{key}' = True"):
            reads(QUARK, QUARK["config"] | {"global_quant_config": scaled})
    with pytest.raises(UserError, match="has the dtype 'mx6'"):
        reads(QUARK, QUARK["config"] | {"layer_quant_config": {"*q_proj": wrong}})


def test_scales_of_quark_are_of_outputs():
    case = CASES["amd-quark: int8 of channels, bfloat16"]
    scheme = case["config"]["global_quant_config"]
    wrong = scheme | {"weight": scheme["weight"] | {"ch_axis": 1}}
    with pytest.raises(UserError, match="ch_axis = 1 for .*, must be per_tensor, or per_channel and 0"):
        opened(case, config=case["config"] | {"global_quant_config": wrong})


def test_codes_of_quark_lie_as_the_packing_says():
    plain = opened(QUARK, config=QUARK["config"] | {"export": {"pack_method": "order"}}).read(f"{BASE}.weight")
    packed = opened(QUARK).read(f"{BASE}.weight")
    assert (plain != packed).any()
    np.testing.assert_array_equal(plain[0::8], packed[0::8])  # of each eight, the first and the last stay
    np.testing.assert_array_equal(plain[7::8], packed[7::8])


def test_weights_of_quanto_are_refused_by_name(tmp_path):
    """Its config.json says nothing: without the map, tensors would seem to be missing."""
    (tmp_path / "quanto_qmap.json").write_text("{}")
    with pytest.raises(UserError, match="optimum-quanto's weights are not read"):
        quantized_folder.opened(Parts({"model_type": "llama"}, {}), str(tmp_path))
