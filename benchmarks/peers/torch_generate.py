"""The PyTorch side of benchmarks/generate.py: transformers' `generate` with its cache, greedy.

Runs in a virtual environment of its own (torch, transformers) and imports nothing of capibara. Speaks as
benchmarks/peers/capibara_generate.py does; "mixed" takes the requests in batches, each until its longest text is done.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

import numpy as np
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM


def build_model(shape: dict[str, Any], weights: str) -> LlamaForCausalLM:
    """The model of the given shape in float32, with transformers' scaled-dot-product attention, and these weights."""
    config = LlamaConfig(
        vocab_size=shape["vocab_size"],
        hidden_size=shape["embed_dim"],
        num_hidden_layers=shape["num_layers"],
        num_attention_heads=shape["num_heads"],
        num_key_value_heads=shape["num_kv_heads"],
        intermediate_size=shape["mlp_dim"],
        max_position_embeddings=shape["length"],
        rope_parameters={"rope_type": "default", "rope_theta": shape["rope_theta"]},
        tie_word_embeddings=True,
        rms_norm_eps=shape["norm_eps"],
        attn_implementation="sdpa",
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config).to(torch.float32).eval()
    with np.load(weights) as tensors:
        state = {f"model.{name}": torch.from_numpy(np.ascontiguousarray(tensors[name])) for name in tensors.files}
    left = model.load_state_dict(state, strict=False)
    if left.unexpected_keys or set(left.missing_keys) - {"lm_head.weight"}:
        raise RuntimeError(f"the weights do not fit: {left}")
    model.tie_weights()
    return model


def prompts_of(shape: dict[str, Any], lengths: list[int]) -> list[list[int]]:
    random = np.random.default_rng(0)
    return [random.integers(0, shape["vocab_size"], length).tolist() for length in lengths]


class Runner:
    def __init__(self, shape: dict[str, Any], weights: str):
        self._shape, self._model = shape, build_model(shape, weights)

    def decode(
        self, batch: int, new: int, positions: int
    ) -> list[list[int]]:  # `positions` sizes our cache; torch's grows
        return self._generate(prompts_of(self._shape, [self._shape["prompt"]] * batch), new)

    def mixed(self, requests: list[list[int]], continuous: bool, batch: int) -> list[list[int]]:
        if continuous:
            raise ValueError("generate has no continuous batching on a CPU")
        prompts, texts = prompts_of(self._shape, [length for length, _ in requests]), []
        for first in range(0, len(requests), batch):
            wanted = [new for _, new in requests[first : first + batch]]
            got = self._generate(prompts[first : first + batch], max(wanted))
            texts += [tokens[:new] for tokens, new in zip(got, wanted)]
        return texts

    def _generate(self, prompts: list[list[int]], new: int) -> list[list[int]]:
        length = max(map(len, prompts))
        ids = torch.tensor([[0] * (length - len(prompt)) + prompt for prompt in prompts])
        seen = torch.tensor([[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        with torch.inference_mode():
            out = self._model.generate(ids, attention_mask=seen, max_new_tokens=new, do_sample=False, use_cache=True)
        return out[:, length:].tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", required=True, help="JSON")
    parser.add_argument("--weights", required=True, help="file to read the weights from")
    parser.add_argument("--threads", type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    runner = Runner(json.loads(args.shape), args.weights)
    version = f"torch {torch.__version__}, transformers {transformers.__version__}"
    print(json.dumps({"ready": {"version": version}}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        call = getattr(runner, request.pop("op"))
        wall, cpu = time.perf_counter(), time.process_time()
        tokens = call(**request)
        answer = {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu, "tokens": tokens}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
