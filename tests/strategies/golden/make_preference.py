"""Writes preference.json: the losses of DPO, IPO and GRPO and their gradients, of whole logits, by torch in float64.

Run by a person who adds a case, in an environment with torch (2.13 made the committed file); commit the file that it writes:
  python tests/strategies/golden/make_preference.py
"""

from __future__ import annotations

import json
import pathlib

import torch
from preference_case import DPO, GRPO, NEW_TOKENS, case
from torch.nn import functional as F


def log_probabilities(hidden: torch.Tensor, head: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (hidden @ head.T).log_softmax(-1).gather(-1, targets[..., None]).squeeze(-1)


def dpo(log_p, reference, given, *, beta, kind="sigmoid", label_smoothing=0.0, sft_weight=0.0):
    def answers(values, number):
        return (values * given["weights"] * (given["segments"] == number)).sum(-1)

    ratios = [answers(log_p, number) - answers(reference, number) for number in (1, 2)]
    gain = ratios[0] - ratios[1]
    if kind == "ipo":
        losses = [(sign * gain - 1 / (2 * beta)) ** 2 for sign in (1, -1)]
    else:
        losses = [-F.logsigmoid(sign * beta * gain) for sign in (1, -1)]
    nll = -answers(log_p, 1) / answers(torch.ones_like(log_p), 1)
    return ((1 - label_smoothing) * losses[0] + label_smoothing * losses[1] + sft_weight * nll).mean()


def grpo(log_p, old, given, *, kl, token_weights="answer", low=0.2, high=0.2):
    ratio, gains, weights = torch.exp(log_p - old), given["gains"][:, None], given["weights"]
    loss = -torch.min(ratio * gains, torch.clamp(ratio, 1 - low, 1 + high) * gains)
    loss = loss + kl * (torch.exp(old - log_p) - (old - log_p) - 1)
    length = weights.sum(-1) if token_weights == "answer" else NEW_TOKENS
    return ((loss * weights).sum(-1) / length).mean()


def answer(loss, options: dict) -> dict:
    given = {name: torch.from_numpy(value) for name, value in case().items()}
    given = {name: value.double() if value.is_floating_point() else value.long() for name, value in given.items()}
    hidden, head = (given[name].requires_grad_() for name in ("hidden", "head"))
    other = log_probabilities(given["other_hidden"], head.detach(), given["targets"])
    value = loss(log_probabilities(hidden, head, given["targets"]), other, given, **options)
    value.backward()
    rounded = [[[round(x, 9) for x in row] for row in x.flatten(0, -2).tolist()] for x in (hidden.grad, head.grad)]
    return {"loss": value.item(), "hidden": rounded[0], "head": rounded[1]}


if __name__ == "__main__":
    lines = [f"{json.dumps(name)}: {json.dumps(answer(dpo, options))}" for name, options in DPO.items()]
    lines += [f"{json.dumps(name)}: {json.dumps(answer(grpo, options))}" for name, options in GRPO.items()]
    path = pathlib.Path(__file__).parent / "preference.json"
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
