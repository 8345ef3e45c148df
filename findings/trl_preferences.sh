#!/bin/sh
# TRL 1.16.0 with transformers 5.24.0: two losses that are not what their documentation says, without an error.
#
# 1. CPOConfig.alpha (AlphaPO) is documented for all loss types. It takes powers of exp(log-probability), and of loss types
#    other than "simpo" and "ipo" that is the sum over an answer, whose exponential is 0 in float32 below -104.
#    expected: a finite loss for two answers of log-probabilities -110 and -120, such as of 40 tokens each
#    seen:     nan
# 2. RewardTrainer appends the end token to answers and pads with it if the tokenizer has no pad token; transformers scores
#    the last token that is not the pad token.
#    expected: the score depends on the end token of an answer
#    seen:     the score is that of the answer without it
#
# Exits with 1 if TRL does otherwise. PEER_PYTHON: a python with these packages; else they are installed in a new folder.
set -eu
if [ -z "${PEER_PYTHON:-}" ]; then
    folder=$(mktemp -d)
    trap 'rm -rf "$folder"' EXIT
    python3 -m venv "$folder/venv"
    "$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 trl==1.16.0
    PEER_PYTHON="$folder/venv/bin/python"
fi
HF_HUB_OFFLINE=1 "$PEER_PYTHON" - <<'PYTHON'
import math
import sys
import tempfile
import types
import warnings

warnings.simplefilter("ignore")
import datasets
import tokenizers
import torch
import transformers
import trl
from trl.experimental.cpo import CPOTrainer

transformers.logging.set_verbosity_error()
print("trl", trl.__version__, "transformers", transformers.__version__)


def cpo_loss(chosen, rejected):
    options = dict(alpha=0.1, beta=0.1, loss_type="sigmoid", label_smoothing=0.0)
    trainer = types.SimpleNamespace(**options, accelerator=types.SimpleNamespace(device="cpu"))
    return CPOTrainer.cpo_loss(trainer, torch.tensor([chosen]), torch.tensor([rejected]))[0].item()


def scores():
    """The scores of an answer with and without its end token, by a model that RewardTrainer has set up."""
    words = {word: i for i, word in enumerate(("<end>", "<unk>", "a", "good", "bad"))}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<end>", unk_token="<unk>")
    torch.manual_seed(0)
    sizes = dict(vocab_size=8, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=2, num_labels=1)
    model = transformers.LlamaForSequenceClassification(config).eval()
    data = datasets.Dataset.from_list([{"prompt": "a", "chosen": " good", "rejected": " bad"}] * 2)
    with tempfile.TemporaryDirectory() as folder:
        options = trl.RewardConfig(output_dir=folder, use_cpu=True, bf16=False, report_to="none")
        trainer = trl.RewardTrainer(model=model, args=options, train_dataset=data, processing_class=tokenizer)
        ids = trainer.train_dataset[0]["chosen_ids"]
    assert ids[-1] == words["<end>"], ids
    with torch.no_grad():
        return [model(input_ids=torch.tensor([text])).logits.item() for text in (ids, ids[:-1])]


seen = cpo_loss(-110.0, -120.0), scores()
print("CPO loss:", seen[0], " scores with and without the end token:", seen[1])
sys.exit(0 if math.isnan(seen[0]) and seen[1][0] == seen[1][1] else 1)
PYTHON
