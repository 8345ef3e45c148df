"""A Hugging Face family: folders whose config.json and tensors have other names than capibara knows.

cd examples/extend && python -m capibara.convert --gin_file=my_family.gin --from=FOLDER --to=runs/mine --format=capibara
"""

from capibara.interop.hf import families
from capibara.interop.hf.layout.family import Family
from capibara.interop.hf.layout.rows import Names, rows

_LAYER, _ATTENTION, _MLP = "blocks.{l}.", "layers/attention/", "layers/mlp/"

families.add(
    Family(
        model_type="my_decoder",
        architectures=("MyDecoderForCausalLM",),
        # Fields of capibara's DecoderConfig, and what config.json calls them.
        keys={
            "vocab_size": "vocab_size",
            "embed_dim": "width",
            "num_layers": "depth",
            "num_heads": "heads",
            "mlp_dim": "mlp_width",
            "norm_eps": "epsilon",
        },
        defaults={"hidden_act": "silu", "rope_theta": 10_000.0, "epsilon": 1e-5},
        fixed={"qk_norm": "none"},
    ),
    Names(
        # A tensor, its dimensions (v vocabulary, d embed, n heads, h head_dim, f MLP), and the parameters in it.
        rows(
            [
                ("embed.weight", "v d", "embedding"),
                (_LAYER + "norm_1.weight", "d", "layers/attention_norm/scale"),
                (
                    _LAYER + "qkv.weight",
                    "nh d",
                    f"{_ATTENTION}query {_ATTENTION}key {_ATTENTION}value",
                    "n",  # the three follow each other along the heads
                ),
                (_LAYER + "out.weight", "d nh", _ATTENTION + "out"),
                (_LAYER + "norm_2.weight", "d", "layers/mlp_norm/scale"),
                (_LAYER + "gate.weight", "f d", _MLP + "gate"),
                (_LAYER + "up.weight", "f d", _MLP + "up"),
                (_LAYER + "down.weight", "d f", _MLP + "down"),
                ("norm.weight", "d", "final_norm/scale"),
                ("head.weight", "v d", "output"),
            ]
        ),
        ignored=r"\.rotary_buffer$",
    ),
)
