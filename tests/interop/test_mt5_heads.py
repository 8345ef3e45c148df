"""mT5's head, as transformers 5.24 reads it: its own where one is stored that differs from the embedding, never scaled."""

import numpy as np
import pytest

from capibara.interop.hf import config as hf_config
from capibara.interop.hf import tables, tied

CONFIG = {
    "architectures": ["MT5ForConditionalGeneration"], "model_type": "mt5", "vocab_size": 8, "d_model": 4, "d_kv": 2,
    "d_ff": 8, "num_layers": 2, "num_heads": 2, "feed_forward_proj": "gated-gelu",
}  # fmt: skip
EMBEDDING = np.arange(32, dtype=np.float32).reshape(8, 4)
ABSENT = object()


@pytest.mark.parametrize("scales", [True, False, ABSENT])
@pytest.mark.parametrize("ties", [True, False, ABSENT])
@pytest.mark.parametrize("head", ["own", "same", "none"])
def test_the_stored_head_decides_whatever_the_keys_say(ties, scales, head):
    keys = {"tie_word_embeddings": ties, "scale_decoder_outputs": scales}
    values = CONFIG | {key: value for key, value in keys.items() if value is not ABSENT}
    tensors = {"shared.weight": EMBEDDING}
    if head != "none":
        tensors["lm_head.weight"] = EMBEDDING + (head == "own")
    config = hf_config.from_hf(tied.with_stored_head(values, tensors, tensors.__getitem__))
    assert config.head == ("separate" if head == "own" else "tied")
    assert config.head != "tied" or config.head_scale == "none"


@pytest.mark.parametrize("head, scale", [("separate", "inverse_sqrt_dim"), ("tied", "none")])
def test_it_is_written_as_itself(head, scale):
    config = hf_config.from_hf(CONFIG | {"tie_word_embeddings": head == "tied"})
    written = hf_config.to_hf(config, CONFIG)
    assert written["model_type"] == "mt5" and written["tie_word_embeddings"] == (head == "tied")
    assert hf_config.from_hf(written) == config and (head != "tied" or config.head_scale == scale)


@pytest.mark.parametrize("side", ["encoder", "decoder"])
def test_the_embedding_is_read_by_each_of_its_names(side):
    assert tables.fixed_aliases("mt5")[f"{side}.embed_tokens.weight"] == "shared.weight"


def test_a_scaled_head_is_no_mt5():
    t5 = hf_config.from_hf(CONFIG | {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]})
    assert t5.head_scale == "inverse_sqrt_dim"
    assert hf_config.to_hf(t5, CONFIG)["model_type"] == "t5"
