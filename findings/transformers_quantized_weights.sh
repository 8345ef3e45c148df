#!/bin/sh
# transformers 5.24.0 with compressed-tensors 0.20.1: two folders of quantized weights that load as others, without an error.
#
# 1. FP8 with weight_block_size [128, 128] and a weight of 192 outputs, as DeepSeek's and vLLM's own code write it: 2 scales, of
#    the first 128 outputs and of the last 64. transformers divides the weight into as many equal blocks as it has scales.
#    expected: outputs 96 to 127 have the first scale
#    seen:     they have the second one
# 2. NVFP4 of compressed-tensors in a mixture of experts, loaded with dequantize=True.
#    expected: an expert's weight is what compressed-tensors decompresses
#    seen:     it lacks weight_global_scale, by which all of its values are too large; attention's weights are right
#
# Exits with 1 if they do otherwise. PEER_PYTHON: a python with these packages; else they are installed in a new folder.
set -eu
if [ -z "${PEER_PYTHON:-}" ]; then
    folder=$(mktemp -d)
    trap 'rm -rf "$folder"' EXIT
    python3 -m venv "$folder/venv"
    "$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 compressed-tensors==0.20.1 accelerate==1.15.0
    PEER_PYTHON="$folder/venv/bin/python"
fi
CUDA_VISIBLE_DEVICES='' HF_HUB_OFFLINE=1 "$PEER_PYTHON" - <<'PYTHON'
import pathlib
import sys
import tempfile
import warnings

import compressed_tensors
import torch
import transformers
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from safetensors.torch import save_file

warnings.simplefilter("ignore")
transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
print("transformers", transformers.__version__, "compressed-tensors", compressed_tensors.__version__)
SIZES = dict(
    vocab_size=32, hidden_size=128, intermediate_size=192, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
    tie_word_embeddings=True,
)
LAYER = "model.layers.0."


def loaded(config, stored, about):
    """The weights of a folder as transformers has them, in bfloat16."""
    torch.manual_seed(0)
    plain = transformers.AutoModelForCausalLM.from_config(config)
    bases = {name.rpartition(".weight")[0] for name in stored}
    state = {name: value.bfloat16() for name, value in plain.state_dict().items() if name != "lm_head.weight"}
    fused = ("experts.gate_up_proj", "experts.down_proj")
    state = {name: value for name, value in state.items() if name.removesuffix(".weight") not in bases and not name.endswith(fused)}
    with tempfile.TemporaryDirectory() as folder:
        config.quantization_config = about
        config.architectures = [type(plain).__name__]
        config.save_pretrained(folder)
        save_file(state | stored, pathlib.Path(folder) / "model.safetensors", metadata={"format": "pt"})
        config = transformers.AutoConfig.from_pretrained(folder)
        config.quantization_config = dict(config.quantization_config) | {"dequantize": True}
        return transformers.AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.bfloat16).state_dict()


def compressed(name, weight, scheme, **parameters):
    """The tensors of a weight, and what compressed-tensors makes of them."""
    arguments = QuantizationScheme(targets=["Linear"], **scheme)
    compressor = BaseCompressor.get_value_from_registry(scheme["format"])
    parts = compressor.compress({"weight": weight, **parameters}, arguments)
    return {f"{name}.{part}": value for part, value in parts.items()}, compressor.decompress(parts, arguments)["weight"]


draw = torch.Generator().manual_seed(0)
# 1
name = LAYER + "mlp.gate_proj.weight"
codes = torch.randn(192, 128, generator=draw).to(torch.float8_e4m3fn)
scales = torch.tensor([[1.0], [4.0]])
about = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
about["modules_to_not_convert"] = ["lm_head", "q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
value = loaded(transformers.LlamaConfig(**SIZES), {name: codes, f"{name}_scale_inv": scales}, about)[name].float()
one = {"first scale": 1.0, "second scale": 4.0}
seen = {label: torch.equal(value[96:128], codes[96:128].float() * scale) for label, scale in one.items()}
print("1. outputs 96 to 127 of blocks of 128:", seen)
blocks = seen == {"first scale": False, "second scale": True}
# 2
scheme = {"format": "nvfp4-pack-quantized", "weights": dict(type="float", num_bits=4, strategy="tensor_group", group_size=16)}
config = transformers.Qwen3MoeConfig(**SIZES, head_dim=64, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=64)
stored, want = {}, {}
experts = [f"{LAYER}mlp.experts.{e}.{part}_proj" for e in range(2) for part in ("gate", "up", "down")]
for base in [*(f"{LAYER}self_attn.{part}_proj" for part in "qkvo"), *experts]:
    shape = (128, 64) if base.endswith("down_proj") else (64, 128) if "experts" in base else (128, 128)
    given = dict(weight_scale=torch.full((shape[0], shape[1] // 16), 64.0), weight_global_scale=torch.tensor([256.0]))
    parts, want[base] = compressed(base, torch.randn(shape, generator=draw), scheme, **given)
    stored |= parts
about = {"quant_method": "compressed-tensors", "format": scheme["format"], "quantization_status": "compressed"}
about |= {"ignore": ["lm_head", LAYER + "mlp.gate"], "config_groups": {"all": {"targets": ["Linear"], "weights": scheme["weights"]}}}
state = loaded(config, stored, about)
down = state[LAYER + "mlp.experts.down_proj"][0].float() / want[LAYER + "mlp.experts.0.down_proj"].float()
attention = torch.equal(state[LAYER + "self_attn.q_proj.weight"], want[LAYER + "self_attn.q_proj"])
factor = down[down.isfinite()].unique().tolist()
print("2. an expert's weight over that of compressed-tensors:", factor, "attention's equal:", attention)
sys.exit(0 if blocks and factor == [256.0] and attention else 1)
PYTHON
