#!/bin/sh
# PEFT 0.21.2 with transformers 5.24.0: two adapters that are not what was trained, without an error.
#
# 1. LoRA-GA changes the base when it begins, as PiSSA and OLoRA do. PEFT takes that change from the base again when it
#    loads a PiSSA or OLoRA adapter, but not when it loads a LoRA-GA adapter.
#    expected: all four adapters answer after save_pretrained and from_pretrained as before
#    seen:     lora_ga differs, the others do not
# 2. modules_to_save=["shared"] of T5 trains and saves the embedding, but encoder and decoder look tokens up elsewhere.
#    expected: another `shared` gives other logits
#    seen:     the same logits
#
# Exits with 1 if PEFT does otherwise. PEER_PYTHON: a python with these packages; else they are installed in a new folder.
set -eu
if [ -z "${PEER_PYTHON:-}" ]; then
    folder=$(mktemp -d)
    trap 'rm -rf "$folder"' EXIT
    python3 -m venv "$folder/venv"
    "$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 peft==0.21.2
    PEER_PYTHON="$folder/venv/bin/python"
fi
HF_HUB_OFFLINE=1 "$PEER_PYTHON" - <<'PYTHON'
import sys
import tempfile
import warnings

import peft
import torch
import transformers
from peft.tuners.lora import preprocess_loraga

warnings.simplefilter("ignore")
transformers.logging.set_verbosity_error()
print("peft", peft.__version__, "transformers", transformers.__version__)
SIZES = dict(vocab_size=24, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)
IDS = torch.arange(1, 13)[None]


def base():
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, num_key_value_heads=2)).eval()


def difference(init):
    """The largest one of the logits before and after the adapter is saved and loaded."""
    more = dict(lora_ga_config=peft.LoraGAConfig()) if init == "lora_ga" else {}
    config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], init_lora_weights=init, **more)
    model = base()
    if init == "lora_ga":
        preprocess_loraga(model, config, lambda: model(input_ids=IDS, labels=IDS).loss.backward())
    trained = peft.get_peft_model(model, config).eval()
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        for name, value in trained.named_parameters():
            if "lora_B" in name:
                value.add_(0.05)  # as if it was trained
        want = trained(IDS).logits
        trained.save_pretrained(folder)
        return (peft.PeftModel.from_pretrained(base(), folder).eval()(IDS).logits - want).abs().max().item()


found = {init: difference(init) for init in (True, "pissa", "olora", "lora_ga")}
for init, value in found.items():
    print(f"init_lora_weights={init}: logits differ by {value:.1e} after loading")

config = transformers.T5Config(vocab_size=24, d_model=16, d_ff=24, d_kv=8, num_layers=2, num_heads=2)
t5 = transformers.T5ForConditionalGeneration(config)
t5 = peft.get_peft_model(t5, peft.LoraConfig(task_type="SEQ_2_SEQ_LM", target_modules=["q"], modules_to_save=["shared"])).eval()
with torch.no_grad():
    before = t5(input_ids=IDS, decoder_input_ids=IDS).logits
    t5.base_model.model.shared.modules_to_save["default"].weight.normal_()
    moved = (t5(input_ids=IDS, decoder_input_ids=IDS).logits - before).abs().max().item()
print(f"T5 with another `shared` in modules_to_save: logits differ by {moved:.1e}")
as_seen = found["lora_ga"] > 1e-3 and max(found[True], found["pissa"], found["olora"]) < 1e-5 and moved == 0
sys.exit(0 if as_seen else 1)
PYTHON
