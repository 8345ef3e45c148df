"""Quantized weights of other libraries are read bit by bit as they read them; the rest is refused."""

from __future__ import annotations

import base64
import copy
import functools
import hashlib
import json
import os
import pathlib
import subprocess

import ml_dtypes
import numpy as np
import pytest

from capibara.cli import convert
from capibara.core.types import UserError
from capibara.interop import open_model
from capibara.interop.quantize import folder as quantized_folder
from capibara.interop.quantize.formats import mxfp4
from capibara.interop.quantize.grid import Packed
from capibara.multihost import exits

HERE = pathlib.Path(__file__).resolve().parent
GOLDEN = json.loads((HERE / "stored_quants.json").read_text())
CASES = {f"{library}: {name}": case for library, of in GOLDEN.items() for name, case in of["cases"].items()}
BASE = "model.layers.0.self_attn.q_proj"
DTYPES = {
    "F8_E4M3": np.uint8, "F8_E8M0": np.uint8, "U8": np.uint8, "I8": np.int8, "I32": np.int32, "I64": np.int64, "U32": np.uint32,
    "F16": np.float16, "BF16": ml_dtypes.bfloat16, "F32": np.float32,
}  # fmt: skip
PYTHON = os.environ.get("QUANT_PYTHON")


class Parts:
    """A folder of a few tensors, each a pair of its dtype in safetensors and its values."""

    def __init__(self, config, tensors, metadata=None):
        self.config, self._tensors, self._metadata = config, tensors, metadata or {}
        self.tokenizer, self.about = {}, {}

    def shapes(self):
        return {name: value.shape for name, (_, value) in self._tensors.items()}

    def kind(self, name):
        return self._tensors[name][0]

    def dtype(self, name):
        return {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}.get(self.kind(name), "")

    def stored(self, name):
        return self._tensors[name][1]

    def metadata(self):
        return self._metadata

    read = stored


def tensors(case):
    return {
        name: (part["kind"], np.frombuffer(base64.b64decode(part["data"]), DTYPES[part["kind"]]).reshape(part["shape"]))
        for name, part in case["parts"].items()
    }


def opened(case, changes=(), config=None):
    """The folder of a case; `changes` replaces tensors, None removes one."""
    stored = {name: value for name, value in (tensors(case) | dict(changes)).items() if value is not None}
    about = case["config"] if config is None else config
    return quantized_folder.QuantizedFolder(
        Parts(
            {"model_type": "llama", "dtype": case["dtype"], "quantization_config": about}, stored, case.get("metadata")
        )
    )


def check(case):
    folder = opened(case)
    value = folder.read(f"{BASE}.weight")
    assert folder.shapes() == {f"{BASE}.weight": value.shape}
    assert (value.dtype.name, folder.dtype(f"{BASE}.weight")) == (case["values"]["dtype"],) * 2
    assert hashlib.sha256(value.tobytes()).hexdigest() == case["values"]["hash"]


@pytest.mark.parametrize("name", CASES)
def test_stored_weights_are_read_bit_by_bit(name):
    check(CASES[name])


@pytest.mark.heavy
@pytest.mark.skipif(not PYTHON, reason="QUANT_PYTHON names no python with compressed-tensors")
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_new_weights_of_the_installed_libraries_are_read_bit_by_bit(seed, tmp_path):
    path = tmp_path / "made.json"
    subprocess.run([PYTHON, HERE / "stored_quants_peer.py", path, str(seed)], check=True)
    made = json.loads(path.read_text())
    assert made
    for library in made.values():
        for case in library["cases"].values():
            check(case)


def leaves(values, path=()):
    """The paths of all values of a JSON object, those of objects included."""
    for key, value in values.items():
        yield (*path, key)
        if isinstance(value, dict):
            yield from leaves(value, (*path, key))


def with_value(config, path, *value):
    """A configuration with another value at a path; without one, the key is removed."""
    config = copy.deepcopy(config)
    inner = config
    for key in path[:-1]:
        inner = inner[key]
    if value:
        inner[path[-1]] = value[0]
    else:
        del inner[path[-1]]
    return config


def malformed(case):
    """Changes of a case, as the arguments of `opened`."""
    for name, (kind, value) in tensors(case).items():
        yield {name: None}, None
        yield {name: (kind, value[None])}, None
        yield {name: (kind, value.reshape(-1, 1, 1))}, None
        yield {name: ("F64", np.zeros(value.shape))}, None
        yield {name: ("I16", np.zeros(value.shape, np.int16))}, None
        for axis in range(value.ndim):
            yield {name: (kind, np.repeat(value, 2, axis))}, None
            yield {name: (kind, np.delete(value, 0, axis))}, None
            yield {name: (kind, np.delete(value, slice(None), axis))}, None
    config = case["config"]
    yield {}, config | {"surprise": 1}
    for path in leaves(config):
        yield {}, with_value(config, path)
        for value in (
            "x",
            -1,
            0,
            3,
            6,
            4.0,
            32.0,
            32.5,
            True,
            False,
            None,
            ["q"],
            {"surprise": 1},
            "re:(a+)+$",
            ["re:("],
        ):
            yield {}, with_value(config, path, value)
        if isinstance(inner := functools.reduce(lambda part, key: part[key], path, config), dict):
            yield {}, with_value(config, path, inner | {"surprise": 1})


def of_words(method):
    """A case of GPTQ or AWQ."""
    draw = np.random.default_rng(0)
    codes, zeros = draw.integers(0, 16, (24, 96), np.uint8), draw.integers(1, 16, (24, 3), np.uint8)
    packed = Packed(codes, draw.uniform(0.01, 0.1, (24, 3)).astype(np.float16), zeros)
    config = {"quant_method": method, "bits": 4, "group_size": 32}
    config |= (
        {"checkpoint_format": "gptq", "sym": False} if method == "gptq" else {"version": "gemm", "zero_point": True}
    )
    parts = packed.gptq(zero_offset=1) if method == "gptq" else packed.awq()
    return as_case(
        config, {f"{BASE}.{part}": value for part, value in parts.items()}, packed.values().astype(np.float16)
    )


def of_experts():
    """A case of gpt-oss's MXFP4."""
    draw = np.random.default_rng(0)
    parts = {
        "_blocks": draw.integers(0, 256, (2, 24, 3, 16), np.uint8),
        "_scales": draw.integers(120, 130, (2, 24, 3), np.uint8),
    }
    values = mxfp4.values(*parts.values()).transpose(0, 2, 1).astype(ml_dtypes.bfloat16)
    config = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    return as_case(config, {f"{BASE}.weight{part}": value for part, value in parts.items()}, values)


def of_bitsandbytes(name):
    recorded = json.loads((HERE / "bitsandbytes.json").read_text())["cases"][name]
    kinds = {"uint8": "U8", "int8": "I8", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
    parts = {
        f"{BASE}.{part}" if part == "SCB" else f"{BASE}.weight{part}": value | {"kind": kinds[value["dtype"]]}
        for part, value in recorded["parts"].items()
    }
    config = {"quant_method": "bitsandbytes", "load_in_8bit": name == "int8", "llm_int8_threshold": 6.0}
    values = {"dtype": recorded["dtype"], "hash": recorded["values"]}
    return {"config": config, "dtype": "float16", "parts": parts, "values": values}


def as_case(config, parts, value):
    kinds = {np.dtype(kind): name for name, kind in DTYPES.items() if not name.startswith("F8")}
    described = {
        name: {
            "kind": kinds[part.dtype],
            "shape": part.shape,
            "data": base64.b64encode(np.ascontiguousarray(part).tobytes()).decode(),
        }
        for name, part in parts.items()
    }
    hashed = hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()
    return {
        "config": config,
        "dtype": "bfloat16",
        "parts": described,
        "values": {"dtype": value.dtype.name, "hash": hashed},
    }


OLDER = {
    "gptq": of_words("gptq"),
    "awq": of_words("awq"),
    "mxfp4": of_experts(),
    "nf4": of_bitsandbytes("nf4"),
    "bitsandbytes int8": of_bitsandbytes("int8"),
}
SWEPT = {name: case for name, case in CASES.items() if name.endswith("bfloat16")} | OLDER


@pytest.mark.parametrize("name", SWEPT)
def test_malformed_folders_are_refused_in_one_line_or_read_the_same(name):
    case, refused = SWEPT[name], 0
    check(case)
    shape = opened(case).shapes()[f"{BASE}.weight"]
    for changes, config in malformed(case):
        try:
            folder = opened(case, changes, config)
            if folder.shapes().get(f"{BASE}.weight") != shape:  # no model has such a weight
                refused += 1
                continue
            value = folder.read(f"{BASE}.weight")
        except UserError as error:
            assert "\n" not in str(error) and len(str(error)) < 500, (changes, config)
            refused += 1
        else:
            assert hashlib.sha256(value.tobytes()).hexdigest() == case["values"]["hash"], (changes, config)
    assert refused >= 30


def case_of(name, library="compressed-tensors"):
    return CASES[f"{library}: {name}, bfloat16"]


def renamed(case, module):
    return {name.replace(BASE, module): value for name, value in tensors(case).items()}


def group(case, *targets, **changes):
    return case["config"]["config_groups"]["group_0"] | {"targets": list(targets)} | changes


def test_each_module_has_the_scheme_of_the_first_target_that_names_it():
    """Names come before patterns, and patterns before classes, whatever the order of the groups."""
    packed, floats, bytes_ = case_of("int4 in groups"), case_of("FP8 of channels"), case_of("W8A8")
    config = {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision",
        "ignore": ["re:.*lm_head", "model.layers.0.mlp.gate"],
        "config_groups": {
            "linear": group(packed, "Linear", format="pack-quantized"),
            "pattern": group(floats, r"re:.*self_attn\.(q|k)_proj$", format="float-quantized"),
            "name": group(bytes_, "model.layers.0.self_attn.k_proj", format="int-quantized"),
        },
    }
    modules = {"mlp.experts.3.up_proj": packed, "self_attn.q_proj": floats, "self_attn.k_proj": bytes_}
    stored = {"lm_head.weight": ("BF16", np.ones((2, 2), ml_dtypes.bfloat16))}
    for module, case in modules.items():
        stored |= renamed(case, f"model.layers.0.{module}")
    folder = quantized_folder.QuantizedFolder(Parts({"quantization_config": config}, stored))
    assert folder.shapes().keys() == {f"model.layers.0.{module}.weight" for module in modules} | {"lm_head.weight"}
    for module, case in modules.items():
        value = folder.read(f"model.layers.0.{module}.weight")
        assert hashlib.sha256(value.tobytes()).hexdigest() == case["values"]["hash"], module
    for name, message in (
        ("model.layers.0.mlp.gate", "ignore names it"),
        ("lm_head", "ignore names it"),
    ):
        with pytest.raises(UserError, match=message):
            quantized_folder.QuantizedFolder(Parts({"quantization_config": config}, renamed(packed, name)))
    del config["config_groups"]["linear"]
    with pytest.raises(UserError, match="no target of quantization_config.config_groups names it"):
        quantized_folder.QuantizedFolder(Parts({"quantization_config": config}, stored))


@pytest.mark.parametrize("kind", ["I32", "I64"])
def test_inputs_in_the_order_of_activations(kind):
    case = case_of("int4 in groups, zeros")
    order = np.random.default_rng(0).permutation(np.arange(96) // 32).astype(DTYPES[kind])
    name = f"{BASE}.weight_g_idx"
    value = opened(case, {name: (kind, order)}).read(f"{BASE}.weight")
    stored = {part.rpartition(".")[2]: array for part, (_, array) in tensors(case).items()}
    codes = nibbles(stored["weight_packed"])[:, :96] - 8
    zeros = nibbles(stored["weight_zero_point"].T)[:, :24].T - 8
    want = (codes - zeros[:, order]).astype(np.float32) * stored["weight_scale"][:, order].astype(np.float32)
    np.testing.assert_array_equal(value, want.astype(ml_dtypes.bfloat16))
    check_unordered = opened(case, {name: (kind, np.full_like(order, -1))}).read(f"{BASE}.weight")
    assert hashlib.sha256(check_unordered.tobytes()).hexdigest() == case["values"]["hash"]
    for wrong in (np.zeros_like(order), order + 1, order[:-1]):
        with pytest.raises(UserError, match="weight_g_idx"):
            opened(case, {name: (kind, wrong)})


def nibbles(words):
    """The 4-bit codes of int32 words, one by one."""
    words = np.ascontiguousarray(words).view(np.uint32)
    return (
        np.stack([words >> np.uint32(4 * at) & np.uint32(15) for at in range(8)], -1)
        .reshape(len(words), -1)
        .astype(int)
    )


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("sparsity_config", {"format": "sparse-24-bitmask"}, "sparse weights are not supported"),
        ("transform_config", {"config_groups": {"R1": {"type": "hadamard"}}}, "transformed weights and activations"),
        ("quantization_status", "frozen", "must be compressed"),
        ("format", "marlin-24", "stored as 'marlin-24', must be one of"),
        ("moe_sparsity_config", {"method": "prune"}, "moe_sparsity_config"),
        ("config_groups", {}, "config_groups is {}"),
    ],
)
def test_what_changes_the_weights_is_refused_by_name(key, value, message):
    case = case_of("int4 in groups")
    with pytest.raises(UserError) as error:
        opened(case, config=case["config"] | {key: value})
    assert message in str(error.value) and "\n" not in str(error.value)


def test_neutral_keys_and_quantized_activations_are_told(caplog):
    case = case_of("FP8 of channels")
    config = case["config"] | {
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.9",
        "kv_cache_scheme": {"num_bits": 8},
    }
    config["config_groups"] = {"group_0": group(case, "Linear", input_activations={"num_bits": 8, "dynamic": False})}
    extra = {
        f"{BASE}.input_scale": ("F32", np.ones(1, np.float32)),
        "model.layers.0.self_attn.k_scale": ("F32", np.ones(())),
    }
    folder = opened(case, extra, config)
    assert folder.shapes().keys() == {f"{BASE}.weight"}
    assert "input_activations: not computed" in caplog.text and "key/value cache in quantized numbers" in caplog.text


def blocks_by_hand(codes, scales, size):
    """Values of FP8 codes, one block after the other."""
    values = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            at = slice(row * size[0], (row + 1) * size[0]), slice(column * size[1], (column + 1) * size[1])
            values[at] = values[at] * scales[row, column]
    return values.astype(ml_dtypes.bfloat16)


@pytest.mark.parametrize("experts", [(), (3,)])
def test_blocks_that_do_not_divide_a_weight_keep_their_size(experts):
    """Of the module's experts, too; transformers 5.24 makes the blocks smaller."""
    draw = np.random.default_rng(0)
    codes = draw.integers(0, 120, (*experts, 24, 90), np.uint8)
    scales = draw.random((*experts, 2, 3)).astype(np.float32)
    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 32], "fmt": "e4m3"}
    name = "model.layers.0.mlp.experts.gate_up_proj" if experts else f"{BASE}.weight"
    stored = {name: ("F8_E4M3", codes), f"{name}_scale_inv": ("F32", scales)}
    value = quantized_folder.QuantizedFolder(Parts({"quantization_config": config}, stored)).read(name)
    for expert in np.ndindex(experts):
        np.testing.assert_array_equal(value[expert], blocks_by_hand(codes[expert], scales[expert], (16, 32)))
    with pytest.raises(UserError, match="does not convert"):
        config["modules_to_not_convert"] = [name.removesuffix(".weight")]
        quantized_folder.QuantizedFolder(Parts({"quantization_config": config}, stored))


def save(path, stored, metadata=None):
    """A safetensors file; numpy has no 8-bit floats."""
    header, content = {"__metadata__": metadata} if metadata else {}, b""
    for name, (kind, value) in stored.items():
        data = np.ascontiguousarray(value).tobytes()
        header[name] = {"dtype": kind, "shape": value.shape, "data_offsets": [len(content), len(content) + len(data)]}
        content += data
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content)


LLAMA = dict(
    model_type="llama", hidden_size=96, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
    vocab_size=64, head_dim=12, rms_norm_eps=1e-5, tie_word_embeddings=True, dtype="bfloat16", max_position_embeddings=64,
)  # fmt: skip


def saved(folder, case, beside=False):
    """A folder with a model's config.json and the tensors of a case; its quantization in the config, or beside it."""
    config = LLAMA | ({} if beside else {"quantization_config": case["config"]})
    (folder / "config.json").write_text(json.dumps(config))
    if beside:
        inner = {name: value for name, value in case["config"].items() if name not in ("quant_method", "ignore")}
        (folder / "hf_quant_config.json").write_text(
            json.dumps({"producer": {"name": "modelopt"}, "quantization": inner | {"exclude_modules": ["lm_head"]}})
        )
    save(folder / "model.safetensors", tensors(case), case.get("metadata"))


@pytest.mark.parametrize(
    ("library", "name", "beside"),
    [
        ("transformers", "FP8 in blocks", False),
        ("compressed-tensors", "NVFP4", False),
        ("vllm", "NVFP4", False),
        ("vllm", "NVFP4", True),
        ("transformers: gemma", "4 bits", False),
        ("torchao", "MXFP8", False),
    ],
)
def test_a_folder_on_the_disk(library, name, beside, tmp_path):
    case = case_of(name, library)
    saved(tmp_path, case, beside)
    value = open_model.open_model(str(tmp_path)).read(f"{BASE}.weight")
    assert hashlib.sha256(value.tobytes()).hexdigest() == case["values"]["hash"]


def test_a_malformed_folder_ends_a_verb_with_one_line(tmp_path, capsys):
    case = case_of("int4 in groups")
    saved(tmp_path, {**case, "config": case["config"] | {"surprise": 1}})
    assert exits.run_verb(convert.main, [f"--from={tmp_path}", f"--to={tmp_path / 'out'}"]) == 2
    assert "quantization_config has 'surprise' = 1, which capibara does not know" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_the_older_name_of_the_configuration(key):
    case = case_of("FP8 of channels")
    folder = quantized_folder.opened(Parts({"model_type": "llama", key: case["config"]}, tensors(case)), "nowhere")
    assert folder.config == {"model_type": "llama"} and folder.shapes() == {f"{BASE}.weight": (24, 96)}


@pytest.mark.parametrize(
    ("algorithm", "size", "shape"),
    [
        ("FP8", (160, 130), ()),
        ("FP8", (160, 130), (1,)),
        ("FP8_PER_CHANNEL_PER_TOKEN", (1, 130), (160,)),
        ("fp8_per_channel_per_token", (1, 130), (160, 1)),
        ("FP8_PB_WO", (128, 128), (2, 2)),
        ("fp8_pb_wo", (128, 128), (2, 1, 2, 1)),
    ],
)
def test_fp8_of_modelopt(algorithm, size, shape):
    """A scale for the weight, each output or each block; of a mixture by module."""
    draw = np.random.default_rng(0)
    codes, scales = draw.integers(0, 120, (160, 130), np.uint8), draw.random(shape).astype(np.float32)
    grid = np.asarray(scales).reshape(-(-160 // size[0]), -(-130 // size[1]))
    stored = {f"{BASE}.weight": ("F8_E4M3", codes), f"{BASE}.weight_scale": ("F32", np.asarray(scales))}
    mixed = {"quant_algo": "MIXED_PRECISION", "quantized_layers": {BASE: {"quant_algo": algorithm}}}
    for about in ({"quant_algo": algorithm}, mixed):
        config = {"dtype": "bfloat16", "quantization_config": {"quant_method": "modelopt", **about}}
        value = quantized_folder.QuantizedFolder(Parts(config, stored)).read(f"{BASE}.weight")
        np.testing.assert_array_equal(value, blocks_by_hand(codes, grid, size))
    for more, message in (
        ({"quant_algo": "W4A8_AWQ"}, "quant_algo is 'W4A8_AWQ'"),
        ({"quant_algo": "NVFP4", "group_size": 32}, "group_size is 32, must be 16"),
        ({"quant_algo": algorithm, "ignore": [BASE]}, "ignores"),
        ({"quant_algo": "MIXED_PRECISION"}, "quant_algo is None"),
    ):
        config = {"quantization_config": {"quant_method": "modelopt", **more}}
        with pytest.raises(UserError, match=message):
            quantized_folder.QuantizedFolder(Parts(config, stored))
    scaled = stored | {f"{BASE}.pre_quant_scale": ("F32", np.ones(130, np.float32))}
    with pytest.raises(UserError, match="pre_quant_scale scales activations"):
        config = {"quantization_config": {"quant_method": "modelopt", "quant_algo": algorithm}}
        quantized_folder.QuantizedFolder(Parts(config, scaled))


@pytest.mark.parametrize(
    ("library", "name", "more", "changes", "message"),
    [
        ("transformers", "FP8 in blocks", {}, {"weight_scale": ("F32", np.ones((3, 3)))}, "must have one of them"),
        ("vllm", "NVFP4", {"ignore": ["lm_head", "*.q_proj"]}, {}, "a module that quantization_config ignores"),
        ("vllm", "NVFP4", {"exclude_modules": ["model.layers.0*"]}, {}, "a module that quantization_config ignores"),
        ("vllm", "NVFP4", {"quantization": "NVFP4"}, {}, "quantization is 'NVFP4'"),
        ("vllm", "NVFP4", {"quantized_layers": {BASE: {"quant_algo": "FP8"}}}, {}, "quantized_layers has 'FP8'"),
        ("vllm", "NVFP4", {"quantized_layers": {BASE: {"group_size": 32}}}, {}, "group_size is 32, must be 16"),
        ("vllm", "NVFP4", {"has_zero_point": True}, {}, "'has_zero_point' = True"),
    ],
)
def test_what_contradicts_itself_is_refused(library, name, more, changes, message):
    case = case_of(name, library)
    with pytest.raises(UserError) as error:
        opened(case, {f"{BASE}.{part}": value for part, value in changes.items()}, case["config"] | more)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_two_configurations_must_be_equal():
    case = case_of("FP8 of channels")
    both = {"quantization_config": case["config"], "compression_config": case["config"]}
    assert quantized_folder.QuantizedFolder(Parts(both, tensors(case))).shapes() == {f"{BASE}.weight": (24, 96)}
    both["compression_config"] = case["config"] | {"ignore": [BASE]}
    with pytest.raises(UserError, match="quantization_config and compression_config, which differ"):
        quantized_folder.QuantizedFolder(Parts(both, tensors(case)))


def test_scales_of_a_cache_are_told_without_a_scheme(caplog):
    opened(case_of("FP8 of channels"), {"model.layers.0.self_attn.k_scale": ("F32", np.ones(()))})
    assert "a key/value cache with scales: not computed" in caplog.text


def test_a_dtype_that_is_none_stands_for_float16_in_int8():
    case = OLDER["bitsandbytes int8"]
    for dtype in (["bfloat16"], "float8", None):
        assert opened({**case, "dtype": dtype}).dtype(f"{BASE}.weight") == "float16"


@pytest.mark.parametrize(
    ("name", "activations"), [("int4 in groups", None), ("W8A8", {"num_bits": 8, "dynamic": True})]
)
def test_the_format_of_a_group_that_states_none(name, activations):
    """Integers are packed where activations are floats, else bytes."""
    case = case_of(name)
    config = with_value(case["config"], ("format",))
    config["config_groups"] = {"group_0": group(case, "Linear", input_activations=activations)}
    value = opened(case, config=config).read(f"{BASE}.weight")
    assert hashlib.sha256(value.tobytes()).hexdigest() == case["values"]["hash"]


def test_of_two_patterns_the_first_by_name_counts():
    packed, bytes_ = case_of("int4 in groups"), case_of("W8A8")
    groups = {"later": group(bytes_, "re:.*q_proj"), "first": group(packed, "re:.*attn.*")}
    value = opened(packed, config=packed["config"] | {"config_groups": groups}).read(f"{BASE}.weight")
    assert hashlib.sha256(value.tobytes()).hexdigest() == packed["values"]["hash"]


MLX = "affine of 4 bits in groups of 32"


def test_modules_of_mlx_have_their_own_schemes():
    case = case_of(MLX, "mlx")
    config = case["config"] | {"bits": 8, BASE: {"group_size": 32, "bits": 4}, "model.norm": False}
    value = opened(case, (), config).read(f"{BASE}.weight")
    assert hashlib.sha256(value.tobytes()).hexdigest() == case["values"]["hash"]
    for change, message in (
        ({BASE: False}, f"{BASE}.scales scales a module that quantization says is not quantized"),
        ({"other": {"bits": 4}}, "other.scales is missing, and quantization says how it is stored"),
    ):
        with pytest.raises(UserError, match=message):
            opened(case, (), case["config"] | change)
    scale = ("F32", np.zeros((), np.float32))
    with pytest.raises(UserError, match="q_proj.global_scale is not supported"):
        opened(case, {f"{BASE}.global_scale": scale})


@pytest.mark.parametrize(
    "module, names",
    [
        ("mlp.switch_mlp.up_proj", ["mlp.experts.0.up_proj", "mlp.experts.1.up_proj"]),
        ("block_sparse_moe.switch_mlp.gate_proj", [f"block_sparse_moe.experts.{i}.w1" for i in (0, 1)]),
        ("block_sparse_moe.switch_mlp.up_proj", [f"block_sparse_moe.experts.{i}.w3" for i in (0, 1)]),
        ("block_sparse_moe.switch_mlp.down_proj", [f"block_sparse_moe.experts.{i}.w2" for i in (0, 1)]),
        ("mlp.experts_of_another.up_proj", None),
    ],
)
def test_experts_joined_by_mlx_are_read_apart(module, names):
    """The second expert is the first one with its outputs in reverse."""
    case = case_of(MLX, "mlx")
    stacked = {
        name.replace(BASE, f"model.layers.0.{module}"): (kind, np.stack([value, value[::-1]]))
        for name, (kind, value) in tensors(case).items()
    }
    changes = dict.fromkeys(tensors(case)) | stacked
    if names is None:
        with pytest.raises(
            UserError, match="has 2 matrices, as mlx-lm stores the experts of Mixtral, Qwen and DeepSeek"
        ):
            opened(case, changes)
        return
    folder = opened(case, changes)
    assert [*folder.shapes()] == [f"model.layers.0.{name}.weight" for name in names]
    first, second = (folder.read(name) for name in folder.shapes())
    assert hashlib.sha256(first.tobytes()).hexdigest() == case["values"]["hash"]
    np.testing.assert_array_equal(second, first[::-1])


def test_joined_experts_are_read_from_the_file_once(monkeypatch):
    case, reads = case_of(MLX, "mlx"), []
    stacked = {
        name.replace(BASE, "model.layers.0.mlp.switch_mlp.up_proj"): (kind, np.stack([value] * 5))
        for name, (kind, value) in tensors(case).items()
    }
    stored = Parts.stored
    monkeypatch.setattr(Parts, "stored", lambda self, name: reads.append(name) or stored(self, name))
    folder = opened(case, dict.fromkeys(tensors(case)) | stacked)
    for name in folder.shapes():
        folder.read(name)
    assert len(folder.shapes()) == 5 and sorted(reads) == sorted(stacked)
