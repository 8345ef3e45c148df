"""A layer of experts in plain numpy, and weights for it."""

from __future__ import annotations

import numpy as np

from capibara.interop.experts.operation import Place
from capibara.interop.experts.statistics import Use

D, F = 6, 8


def weights(moe, seed=0, width=F):
    """Random weights of a layer's experts; the router is [E, D]."""
    rng, E = np.random.default_rng(seed), moe.num_experts
    shapes = {"router": (E, D), "up": (E, D, width), "gate": (E, D, width), "down": (E, width, D)}
    if moe.bias == "all":
        shapes |= {"router_bias": (E,), "up_bias": (E, width), "gate_bias": (E, width), "down_bias": (E, D)}
    if moe.correction == "expert":
        shapes["correction"] = (E,)
    found = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    if "correction" in found:
        found["correction"] *= 0.05
    return found


def tokens(count=64, seed=1):
    return np.random.default_rng(seed).standard_normal((count, D))


def mlp(layer, x):
    """An MLP, or one expert, for tokens [N, D]."""
    up, gate = x @ layer["up"], x @ layer["gate"]
    up, gate = up + layer.get("up_bias", 0), gate + layer.get("gate_bias", 0)
    return (gate / (1 + np.exp(-gate)) * up) @ layer["down"] + layer.get("down_bias", 0)


def chosen(layer, moe, x):
    """The experts of each token [N, k], and their gates."""
    logits = x @ layer["router"].T.astype(np.float64) + layer.get("router_bias", 0)
    scores = 1 / (1 + np.exp(-logits))
    if moe.score == "softmax":
        scores = np.exp(logits - logits.max(-1, keepdims=True))
        scores /= scores.sum(-1, keepdims=True)
    ranks = scores + layer.get("correction", 0)
    if moe.groups > 1:
        groups = ranks.reshape(len(x), moe.groups, -1)
        best = np.sort(groups, -1)[..., -2:].sum(-1) if moe.group_score == "pair" else groups.max(-1)
        inside = np.argsort(np.argsort(-best, kind="stable", axis=-1), axis=-1) < moe.top_groups
        ranks = np.where(inside[..., None], groups, -np.inf).reshape(ranks.shape)
    experts = np.argsort(-ranks, kind="stable", axis=-1)[:, : moe.top_k]
    gates = np.take_along_axis(scores, experts, -1)
    if moe.gates == "normalized":
        gates = gates / gates.sum(-1, keepdims=True)
    return experts, gates * moe.scale


def output(layer, moe, x):
    """What the layer's experts give together, [N, D]."""
    y = np.zeros_like(x)
    for number, (experts, gates) in enumerate(zip(*chosen(layer, moe, x))):
        for expert, gate in zip(experts, gates):
            own = {name: value[expert] for name, value in layer.items()}
            at, x_1D = slice(number, number + 1), x[number : number + 1]
            y[at] += mlp(own, gate * x_1D) if moe.weighted == "inputs" else gate * mlp(own, x_1D)
    return y


def place(moe, routed=None, seed=0, **arrays):
    """The layer's place, with so many tokens of each expert."""
    E = 0 if moe is None else moe.num_experts
    routed = np.ones(E) if routed is None else np.asarray(routed, np.float64)
    found = {"routed": routed} | {name: np.ones(E) for name in ("gate", "norm", "activation")}
    found |= {"outputs": np.zeros((E, 2)), "pairs": np.zeros((E, E))} | arrays
    return Place(moe, Use(**found), np.random.default_rng(seed))
