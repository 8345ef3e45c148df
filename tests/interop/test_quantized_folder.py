"""Folders of GPTQ, AWQ and bitsandbytes are dequantized exactly; other formats are refused by name."""

from __future__ import annotations

import base64
import hashlib
import json
import pathlib
import sys

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

HERE = pathlib.Path(__file__).resolve().parent
sys.path.append(str(HERE))
import gguf_cases as cases  # noqa: E402
from test_quantization import Source, asked, made_of, text  # noqa: E402, F401

from capibara.core.types import UserError  # noqa: E402
from capibara.interop import conversion, open_model
from capibara.interop.hf import config as hf_config
from capibara.interop.quantize import folder as quantized_folder  # noqa: E402
from capibara.models import api  # noqa: E402

GOLDEN = json.loads((HERE / "bitsandbytes.json").read_text())["cases"]
BASE = "model.layers.0.self_attn.q_proj"


class Parts:
    """A folder of a few tensors of any dtype."""

    kinds = {"int32": "I32", "uint8": "U8", "int8": "I8", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}

    def __init__(self, about, tensors, config=None):
        self.config = {"model_type": "llama", "quantization_config": about, **(config or {})}
        self.tokenizer, self.about, self._tensors = {}, {}, tensors

    def shapes(self):
        return {name: value.shape for name, value in self._tensors.items()}

    def kind(self, name):
        return self.kinds.get(self._tensors[name].dtype.name, "I64")

    def dtype(self, name):
        found = self._tensors[name].dtype.name
        return found if found in ("float32", "float16", "bfloat16") else ""

    def stored(self, name):
        return self._tensors[name]

    read = stored


def words(codes, bits):
    """Packs codes along the last axis into int32, the first one lowest."""
    codes = codes.astype(np.uint32).reshape(*codes.shape[:-1], -1, 32 // bits)
    return sum(codes[..., i] << np.uint32(bits * i) for i in range(32 // bits)).astype(np.uint32).view(np.int32)


def in_gptq(bits=4, form="gptq_v2", groups=4, inputs=64, outputs=32):
    """A folder's tensors, with the inputs' groups in random order; and the weight."""
    rng, top = np.random.default_rng(0), 2**bits
    codes, zeros = rng.integers(0, top, (inputs, outputs)), rng.integers(1, top, (groups, outputs))
    scales = rng.uniform(0.01, 0.1, (groups, outputs)).astype(np.float16)
    group = rng.permutation(np.arange(inputs) % groups).astype(np.int32)
    weight = scales[group].astype(np.float32) * (codes - zeros[group])
    tensors = {
        f"{BASE}.qweight": np.ascontiguousarray(words(codes.T, bits).T),
        f"{BASE}.qzeros": words(zeros - (form == "gptq"), bits),
        f"{BASE}.scales": scales,
        f"{BASE}.g_idx": group,
    }
    return tensors, weight.astype(np.float16).T


@pytest.mark.parametrize("form", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_gptq_is_read_with_groups_in_any_order(bits, form):
    tensors, weight = in_gptq(bits, form)
    rest = {"model.norm.weight": np.ones(4, ml_dtypes.bfloat16)}
    about = {"quant_method": "gptq", "bits": bits, "checkpoint_format": form}
    folder = quantized_folder.QuantizedFolder(Parts(about, tensors | rest))
    assert folder.shapes() == {f"{BASE}.weight": (32, 64), "model.norm.weight": (4,)}
    assert (folder.dtype(f"{BASE}.weight"), folder.dtype("model.norm.weight")) == ("float16", "bfloat16")
    np.testing.assert_array_equal(folder.read(f"{BASE}.weight"), weight)
    assert folder.read("model.norm.weight").dtype == ml_dtypes.bfloat16
    assert folder.config == {"model_type": "llama"}


def test_zeros_less_one_carry_as_whole_words():
    """A zero point of 0 is stored as 15 and borrows 1 from the next code; reading restores both."""
    tensors, _ = in_gptq(groups=1)
    zeros = np.zeros((1, 32), np.uint32)
    zeros[0, 1::2] = 9
    stored = (words(zeros, 4).view(np.uint32) - np.uint32(0x11111111)).view(np.int32)
    tensors |= {f"{BASE}.qzeros": stored}
    read = lambda tensors, form: quantized_folder.QuantizedFolder(  # noqa: E731
        Parts({"quant_method": "gptq", "bits": 4, "checkpoint_format": form}, tensors)
    ).read(f"{BASE}.weight")
    np.testing.assert_array_equal(read(tensors, "gptq"), read(tensors | {f"{BASE}.qzeros": words(zeros, 4)}, "gptq_v2"))


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("llama", "awq"),
        ("gpt2", "gptq"),
        *(
            pytest.param(*one, marks=pytest.mark.heavy)
            for one in (("llama", "gptq"), ("gpt_neox", "awq"), ("phi3", "awq"))
        ),
    ],
)
def test_what_we_write_is_read_back(name, method, text, tmp_path):  # noqa: F811
    """Through the reader that every verb uses, and with GPT-2's transposed weights."""
    source, how = Source(name), asked(method, text)
    conversion.write(source, str(tmp_path / "hf"), "hf", None, lambda *given: None, how)
    found = open_model.open_model(str(tmp_path / "hf"))
    model = api.build(hf_config.from_hf(found.config, dtype="float32"))
    here = jax.tree.map(lambda _: jax.sharding.SingleDeviceSharding(jax.devices()[0]), model.abstract_params)
    params = open_model.load_params(found, model, here)
    made = made_of(source, how, q4_0=False)
    want = jax.tree.map(lambda x: np.asarray(x, np.float16).astype(np.float32), made.float_params())
    jax.tree.map(np.testing.assert_array_equal, params, want)
    assert open_model.stored_dtype(found) == "float16" and "quantization_config" not in found.config


def of_golden(name):
    """A weight that bitsandbytes stored, as a folder's tensors."""
    kinds = {"bfloat16": ml_dtypes.bfloat16}
    return {
        f"{BASE}.{part}" if part == "SCB" else f"{BASE}.weight{part}": np.frombuffer(
            base64.b64decode(one["data"]), kinds.get(one["dtype"], one["dtype"])
        ).reshape(one["shape"])
        for part, one in GOLDEN[name]["parts"].items()
    }


@pytest.mark.parametrize("name", GOLDEN)
def test_bitsandbytes_is_read_bit_by_bit(name):
    golden, about = GOLDEN[name], {"quant_method": "bitsandbytes"}
    for said in (about, {"load_in_8bit": True} if name == "int8" else {"load_in_4bit": True}):
        folder = quantized_folder.QuantizedFolder(Parts(said, of_golden(name), {"dtype": "float16"}))
        value = folder.read(f"{BASE}.weight")
        assert (value.dtype.name, value.shape) == (golden["dtype"], tuple(golden["shape"]))
        assert folder.dtype(f"{BASE}.weight") == golden["dtype"]
        assert folder.shapes() == {f"{BASE}.weight": tuple(golden["shape"])}
        assert hashlib.sha256(value.tobytes()).hexdigest() == golden["values"]


def test_codes_in_another_dtype_are_the_same():
    """As bitsandbytes stores them for FSDP: two bytes to a bfloat16."""
    tensors = of_golden("nf4")
    packed = tensors[f"{BASE}.weight"]
    wide = np.frombuffer(packed.tobytes(), ml_dtypes.bfloat16).reshape(-1, 1)
    about = {"quant_method": "bitsandbytes"}
    value = quantized_folder.QuantizedFolder(Parts(about, tensors | {f"{BASE}.weight": wide})).read(f"{BASE}.weight")
    assert hashlib.sha256(value.tobytes()).hexdigest() == GOLDEN["nf4"]["values"]


GPTQ, AWQ, BNB = (
    {"quant_method": "gptq", "bits": 4},
    {"quant_method": "awq", "bits": 4},
    {"quant_method": "bitsandbytes"},
)
MARK = f"{BASE}.weight.quant_state.bitsandbytes__nf4"


def state(**changes):
    said = json.loads(of_golden("nf4")[MARK].tobytes()) | changes
    return {MARK: np.frombuffer(json.dumps(said).encode(), np.uint8)}


@pytest.mark.parametrize(
    ("about", "changes", "message"),
    [
        ({"quant_method": "quanto"}, {}, "quant_method = 'quanto'"),
        ([], {}, "quant_method = None"),
        (GPTQ | {"bits": 9}, {}, f"quantization_config.bits is 9 for {BASE}, must be 2 or 3"),
        (GPTQ | {"checkpoint_format": "marlin"}, {}, "checkpoint_format is 'marlin'"),
        (GPTQ, {f"{BASE}.scales": np.ones((4, 31), np.float16)}, "scales has the shape"),
        (GPTQ, {f"{BASE}.scales": np.ones((4, 32), np.int8)}, "scales is stored as I8"),
        (GPTQ, {f"{BASE}.scales": np.ones(4, np.float16)}, "scales must be a matrix"),
        (GPTQ, {f"{BASE}.qzeros": None}, "qzeros is missing"),
        (GPTQ, {f"{BASE}.qweight": np.ones((8, 32), np.float32)}, "qweight is stored as F32"),
        (GPTQ, {f"{BASE}.g_idx": np.full(64, 4, np.int32)}, "g_idx must be from 0 to 3"),
        (GPTQ, {f"{BASE}.g_idx": np.full(64, -1, np.int32)}, "g_idx must be from 0 to 3"),
        (GPTQ, {f"{BASE}.g_idx": None, f"{BASE}.scales": np.ones((0, 32), np.float16)}, "scales has the shape"),
        (AWQ | {"version": "gemv"}, {}, "version = 'gemv'"),
        (AWQ | {"bits": 8}, {}, "bits = 8"),
        (AWQ, {"a.act.scales": np.full(4, 2, np.float16)}, "a.act.scales is not 1"),
        (BNB, {f"{BASE}.weight": np.ones((8, 4), np.uint8)}, "weight has 32 bytes of codes, must have 256"),
        (BNB, {f"{BASE}.weight": None}, "weight has 0 bytes of codes"),
        (BNB, {f"{BASE}.weight.absmax": np.ones(7, np.float32)}, "absmax has the shape"),
        (BNB, {f"{BASE}.weight.quant_map": None}, "quant_map is missing"),
        (BNB, state(shape=[2**31, 2**31]), "bytes of codes"),
        (BNB, state(shape=[-1, 64]), "does not say the shape"),
        (BNB, state(shape="x"), "does not say the shape"),
        (BNB, state(dtype="float8"), "does not say the shape"),
        (BNB, state(blocksize=0), "does not say the shape"),
        (BNB, state(nested_offset="x"), "does not say the shape"),
        (BNB, {MARK: np.frombuffer(b"[" * 5000, np.uint8)}, "cannot be read"),
        (BNB, {MARK: np.zeros(10**5, np.uint8)}, "at most 65,536 bytes"),
    ],
)
def test_false_metadata_and_unsupported_formats_are_one_line(about, changes, message):
    good = of_golden("nf4") if about is BNB else in_gptq()[0]
    if about.get("quant_method") == "awq" if isinstance(about, dict) else False:
        good = {}
    tensors = {name: value for name, value in (good | changes).items() if value is not None}
    with pytest.raises(UserError) as error:
        quantized_folder.QuantizedFolder(Parts(about, tensors)).read(f"{BASE}.weight")
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_folder_on_the_disk(tmp_path):
    """A folder with its config.json, and its codes in safetensors."""
    config = dict(cases.CASES["llama"]) | {"quantization_config": GPTQ | {"checkpoint_format": "gptq_v2"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors, weight = in_gptq()
    save_file(tensors, tmp_path / "model.safetensors")
    np.testing.assert_array_equal(open_model.open_model(str(tmp_path)).read(f"{BASE}.weight"), weight)
