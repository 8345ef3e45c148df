"""A GGUF family: models of my_family as files that llama.cpp computes, under an architecture of the same block.

cd examples/extend && python -m capibara.convert --gin_file=my_gguf_family.gin --from=FOLDER --to=mine.gguf
"""

import my_family  # noqa: F401  # its Hugging Face form
import numpy as np

from capibara.interop.gguf import names
from capibara.interop.gguf.layout.family import Family
from capibara.interop.gguf.layout.tensors import Take


def _separate(config):
    """The queries, keys and values that follow each other in qkv.weight are three tensors of a file."""
    sizes = [heads * config.head_size for heads in (config.num_heads, config.kv_heads, config.kv_heads)]
    rows = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    return {"qkv.weight": tuple(Take(f"attn_{part}.weight", of) for part, of in zip("qkv", rows, strict=True))}


names.add(
    Family(
        model_type="my_decoder",
        arch="exaone",
        when="my_decoder",  # files of the architecture without it are exaone's
        constants={"my_decoder": True},
        fixed={"activation": "swiglu"},
        biases=frozenset(),
        longest=2048,  # its config.json does not say
        takes=_separate,
        # What the gguf package calls the tensors.
        renamed={
            "blocks.": "blk.",
            "norm_1": "attn_norm",
            "norm_2": "ffn_norm",
            ".out.": ".attn_output.",
            ".gate.": ".ffn_gate.",
            ".up.": ".ffn_up.",
            ".down.": ".ffn_down.",
            "embed.weight": "token_embd.weight",
            "head.weight": "output.weight",
        },
    )
)
