#!/usr/bin/env bash
# Three keys of a config.json that transformers 5.24.0 (torch 2.13.0, CPU) takes otherwise than their names say, in silence.
#
# 1. "rope_scaling" beside "rope_parameters": the old object replaces the new one as a whole, so that a rope_theta that only
#    rope_parameters has is lost. Expected: 500000 (or an error). Seen: 10000, the default.
# 2. "attn_logit_softcapping" of a Gemma 3: a key of Gemma3TextConfig that no layer computes with. Expected: other logits
#    with a cap of 0.5. Seen: the same bits. (Gemma 2 computes it.)
# 3. "head_dim" of a GPT-NeoX: no key of GPTNeoXConfig, and no tensor has its size, but rotary positions take their share of
#    it. Expected: ignored, as unknown keys are. Seen: other logits.
#
# Ends with 0 if all three are as seen, 1 if one has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 transformers==5.24.0 2> "$folder/pip.log" || {
  cat "$folder/pip.log" >&2; exit 2; }
HF_HUB_OFFLINE=1 "$folder/env/bin/python" - "$folder" 2> "$folder/errors" << 'PYTHON' || { cat "$folder/errors" >&2; exit 1; }
import json, pathlib, sys
import torch, transformers
from transformers import AutoConfig, AutoModelForCausalLM

folder = pathlib.Path(sys.argv[1]) / "model"
folder.mkdir()
SIZES = dict(vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, pad_token_id=None)


def config_of(**values):
    (folder / "config.json").write_text(json.dumps(values))
    return AutoConfig.from_pretrained(folder)


def logits(**values):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(**values), attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.5)
        return model(torch.arange(24)[None]).logits


both = config_of(
    model_type="llama", **SIZES, rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    rope_scaling={"rope_type": "linear", "factor": 2.0},
)
theta = both.rope_parameters["rope_theta"]
gemma = dict(SIZES, model_type="gemma3_text", num_key_value_heads=1, head_dim=16, query_pre_attn_scalar=16)
cap = torch.equal(logits(**gemma), logits(**gemma, attn_logit_softcapping=0.5))
neox = dict(SIZES, model_type="gpt_neox", rotary_pct=0.5)
size = torch.equal(logits(**neox), logits(**neox, head_dim=32))
print(f"transformers {transformers.__version__}, torch {torch.__version__}")
print(f"1. rope_theta 500000 in rope_parameters, beside rope_scaling: {theta}")
print(f"2. Gemma 3 with attn_logit_softcapping 0.5 has the same logits: {cap}")
print(f"3. GPT-NeoX with head_dim 32 (its heads have 16) has the same logits: {size}")
sys.exit((theta, cap, size) != (10000.0, True, False))
PYTHON
