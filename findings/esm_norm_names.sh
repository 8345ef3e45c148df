#!/bin/sh
# transformers 5.24.0: save_pretrained writes an ESM's norms as LayerNorm.gamma and LayerNorm.beta, names that no published file has.
#
# The renamings of old checkpoints (gamma -> weight, beta -> bias) are among ESM's own, and those of a model are turned around as it
# is saved.
#   expected: the names of the module, esm.encoder.layer.0.LayerNorm.weight, as in facebook/esm2_t6_8M_UR50D and as BERT is saved
#   seen:     esm.encoder.layer.0.LayerNorm.gamma and .beta: readers other than transformers do not find the norms; and the rotary
#             frequencies in a tensor with the pattern itself for a name, esm.encoder.layer.*.attention.self.rotary_embeddings.inv_freq
#
# Exits with 1 if transformers does otherwise. PEER_PYTHON: a python with these packages; else they are installed in a new folder.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
if [ -z "${PEER_PYTHON:-}" ]; then
    python3 -m venv "$folder/venv"
    "$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0
    PEER_PYTHON="$folder/venv/bin/python"
fi
HF_HUB_OFFLINE=1 "$PEER_PYTHON" - "$folder" <<'PYTHON'
import sys

import torch
from safetensors import safe_open
from transformers import BertConfig, BertForMaskedLM, EsmConfig, EsmForMaskedLM, logging

import transformers

logging.set_verbosity_error()
print("torch", torch.__version__, "transformers", transformers.__version__)
SIZES = dict(vocab_size=33, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)


def saved(model, name):
    model.save_pretrained(f"{sys.argv[1]}/{name}")
    with safe_open(f"{sys.argv[1]}/{name}/model.safetensors", "pt") as file:
        return sorted(key for key in file.keys() if (".layer.0." in key and "LayerNorm" in key) or "*" in key)


bert = saved(BertForMaskedLM(BertConfig(**SIZES)), "bert")
esm = saved(EsmForMaskedLM(EsmConfig(**SIZES, pad_token_id=1, position_embedding_type="rotary")), "esm")
print("saved of BERT", bert)
print("saved of ESM", esm)
loaded = EsmForMaskedLM.from_pretrained(f"{sys.argv[1]}/esm")
print("saved of ESM, loaded again", again := saved(loaded, "again"))
old = lambda names: all(name.endswith(("gamma", "beta", ".*.attention.self.rotary_embeddings.inv_freq")) for name in names)
sys.exit(0 if old(esm) and old(again) and not old(bert) else 1)
PYTHON
