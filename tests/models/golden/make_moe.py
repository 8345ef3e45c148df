"""Writes moe.json: what the reference mixtures of experts answer with the weights that answers.draw gives.

Run as golden/make.py is, in the same environment:
    python tests/models/golden/make_moe.py
"""

from __future__ import annotations

import json
import pathlib

from answers import some
from make import SIZES, logits, rope, tokens

CASES = {
    "mixtral": dict(SIZES, model_type="mixtral", num_local_experts=8, num_experts_per_tok=2, rope_parameters=rope()),
    "qwen3_moe": dict(
        SIZES,
        model_type="qwen3_moe",
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=4,
        moe_intermediate_size=24,
        norm_topk_prob=True,
        rope_parameters=rope(theta=1e6),
    ),
    "gpt_oss": dict(
        SIZES,
        model_type="gpt_oss",
        head_dim=16,
        intermediate_size=64,  # blocks of 32, for MXFP4
        num_local_experts=8,
        num_experts_per_tok=3,
        sliding_window=8,
        swiglu_alpha=1.5,
        swiglu_limit=0.5,
        rope_parameters=rope(
            "yarn",
            500.0,
            factor=4.0,
            original_max_position_embeddings=64,
            beta_fast=2.0,
            beta_slow=0.25,
            truncate=False,
        ),
    ),
}


def main() -> None:
    lines = [f'"tokens": {json.dumps(tokens().tolist())}']
    for name, case in CASES.items():
        lines.append(f'"{name}": {json.dumps(some(logits(case)[-1]))}')
    pathlib.Path(__file__).with_name("moe.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
