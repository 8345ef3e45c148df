"""Writes encoders.json: what transformers' T5 and BERT answer with the weights that answers.draw gives.

Run by a person, in an environment with torch and transformers (5.23 made the committed file), from the root of the
checkout; commit the file that it writes:
    python tests/models/golden/make_encoders.py

The models are tiny. Rows are longer than the farthest distance that T5 tells apart, and the last one has padding.
"""

from __future__ import annotations

import answers
import numpy as np
import torch
from answers import LENGTH, ROWS, VOCAB, some, write
from transformers import AutoConfig, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

ENCODER_LENGTH, PADDING = 32, 7

T5 = dict(
    model_type="t5",
    vocab_size=VOCAB,
    d_model=32,
    d_kv=16,
    d_ff=48,
    num_layers=3,
    num_decoder_layers=2,
    num_heads=4,
    relative_attention_num_buckets=8,
    relative_attention_max_distance=20,
    feed_forward_proj="relu",
    tie_word_embeddings=True,
)
BERT = dict(
    model_type="bert",
    vocab_size=VOCAB,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=48,
    max_position_embeddings=40,
)
T5_1_1 = T5 | dict(feed_forward_proj="gated-gelu", tie_word_embeddings=False)
CASES = {"t5": T5, "t5_1_1": T5_1_1, "t5_1_1_tied": dict(T5_1_1), "bert": BERT}
TIED = CASES["t5_1_1_tied"]  # its file has no head, so that transformers 5 uses the embedding, unscaled


def draw(rows: int, length: int, seed: int, entries: int = VOCAB) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, entries, (rows, length))


def batch() -> dict[str, np.ndarray]:
    """The tensors by our names."""
    return {
        "tokens": draw(ROWS, LENGTH, 0),
        "token_types": draw(ROWS, LENGTH, 1, 2),
        "encoder_tokens": draw(ROWS, ENCODER_LENGTH, 2),
    }


def model_of(case: dict) -> torch.nn.Module:
    """The reference, in float32."""
    config = AutoConfig.for_model(**case)
    kind = AutoModelForMaskedLM if case["model_type"] == "bert" else AutoModelForSeq2SeqLM
    model = kind.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    if case.get("tie_word_embeddings") is False and case is not TIED:
        # transformers 5 ties them whatever the configuration says; the checkpoints of T5 1.1 have two tables.
        model.lm_head.weight = torch.nn.Parameter(torch.empty(VOCAB, case["d_model"]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(answers.draw(name, tuple(parameter.shape))))
    return model


def logits(case: dict, model: torch.nn.Module | None = None) -> np.ndarray:
    """[ROWS, LENGTH, VOCAB] of the reference, or of another model."""
    model = model_of(case) if model is None else model
    arrays = {name: torch.from_numpy(value) for name, value in batch().items()}
    mask = torch.ones(ROWS, LENGTH if case is BERT else ENCODER_LENGTH, dtype=torch.long)
    mask[-1, -PADDING:] = 0
    if case is BERT:
        inputs = dict(input_ids=arrays["tokens"], token_type_ids=arrays["token_types"])
    else:
        inputs = dict(input_ids=arrays["encoder_tokens"], decoder_input_ids=arrays["tokens"], use_cache=False)
    with torch.no_grad():
        return model(attention_mask=mask, **inputs).logits.numpy()


def main() -> None:
    found = {}
    for name, case in CASES.items():
        got = logits(case)
        found[name] = {
            "mean_square": round(float(np.square(got[:, :-PADDING]).mean()), 6),
            "logits": [some(rows) for rows in got],
        }
        print(f"{name}: mean square {found[name]['mean_square']}")
    head = {name: value.tolist() for name, value in batch().items()}
    write("encoders.json", head | {"padding": PADDING}, found)


if __name__ == "__main__":
    main()
