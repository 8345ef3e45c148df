"""The PyTorch side of benchmarks/step_time.py: a Llama-like train step of transformers, eager or compiled.

Runs in a virtual environment of its own (torch, transformers) and imports nothing of capibara. Says `ready` in one JSON
line, then answers each line of standard input, {"op": "step", "count": N} or {"op": "sgemm"}, with one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM


def build_model(shape: dict[str, Any]) -> LlamaForCausalLM:
    """The model of the given shape in float32, with transformers' scaled-dot-product attention."""
    config = LlamaConfig(
        vocab_size=shape["vocab_size"],
        hidden_size=shape["embed_dim"],
        num_hidden_layers=shape["num_layers"],
        num_attention_heads=shape["num_heads"],
        num_key_value_heads=shape["num_heads"],
        head_dim=shape["embed_dim"] // shape["num_heads"],
        intermediate_size=shape["mlp_dim"],
        max_position_embeddings=shape["length"],
        tie_word_embeddings=shape["head"] == "tied",
        rms_norm_eps=1e-6,
        use_cache=False,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config).to(torch.float32).train()


def make_step(model: LlamaForCausalLM, spec: dict, mode: str) -> Callable[[], float]:
    """One update on the spec's batch; returns the loss."""
    optimizer_spec, shape = spec["optimizer"], spec["shape"]
    # As ours: norm scales do not decay.
    weights, scales = ([p for p in model.parameters() if (p.ndim > 1) == matrix] for matrix in (True, False))
    optimizer = torch.optim.AdamW(
        [{"params": weights}, {"params": scales, "weight_decay": 0.0}],
        lr=optimizer_spec["learning_rate"],
        betas=(optimizer_spec["b1"], optimizer_spec["b2"]),
        eps=optimizer_spec["eps"],
        weight_decay=optimizer_spec["weight_decay"],
        fused=True,  # PyTorch's fastest on a CPU
    )
    ids = np.random.default_rng(spec["seed"]).integers(0, shape["vocab_size"], (shape["batch"], shape["length"] + 1))
    tokens, targets = (torch.from_numpy(np.ascontiguousarray(x)) for x in (ids[:, :-1], ids[:, 1:]))

    def loss_of_batch() -> torch.Tensor:
        # shift_labels: the targets are shifted already, as ours are, so that every position counts.
        return model(input_ids=tokens, labels=targets, shift_labels=targets).loss

    if mode == "compile":
        loss_of_batch = torch.compile(loss_of_batch)

    def step() -> float:
        loss = loss_of_batch()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), optimizer_spec["clip_norm"])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


def sgemm_flops_per_s(size: int = 1024, repeats: int = 8) -> float:
    """The best rate of a square float32 matrix product."""
    a, seconds = torch.randn(size, size), []
    for _ in range(repeats):
        start = time.perf_counter()
        torch.mm(a, a)
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / min(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mode", choices=("eager", "compile"), required=True)
    parser.add_argument("--spec", required=True, help="JSON: shape, optimizer, seed")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--keep_freed_memory", action="store_true", help="glibc's malloc set as capibara sets it")
    args = parser.parse_args()
    if args.keep_freed_memory:
        sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))
        from capibara.core import allocator  # the standard library is all that it imports

        allocator.keep_freed_memory()
    spec = json.loads(args.spec)
    torch.set_num_threads(args.threads)
    torch.manual_seed(spec["seed"])
    model = build_model(spec["shape"])
    step = make_step(model, spec, args.mode)
    first_losses = [step() for _ in range(3)]
    ready = {
        "param_count": sum(p.numel() for p in model.parameters()),
        "first_losses": first_losses,
        "version": f"torch {torch.__version__}",
    }
    print(json.dumps({"ready": ready}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if request["op"] == "sgemm":
            print(json.dumps({"flops_per_s": sgemm_flops_per_s()}), flush=True)
            continue
        wall_s, cpu_s, loss = [], [], 0.0
        for _ in range(request["count"]):
            wall, cpu = time.perf_counter(), time.process_time()
            loss = step()
            wall_s.append(time.perf_counter() - wall)
            cpu_s.append(time.process_time() - cpu)
        print(json.dumps({"wall_s": wall_s, "cpu_s": cpu_s, "loss": loss}), flush=True)


if __name__ == "__main__":
    main()
