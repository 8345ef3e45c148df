"""Re-mixes experts at test time: a prompt's last token is routed as those of similar prompts that were answered rightly.

The kernel regression of C3PO (Li et al. 2025, arXiv:2504.07964): neighbours are found by the mean of the prompt's final hidden states,
weighted by a Gaussian kernel whose width is their mean distance, and mixed into the router's scores of the last layers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from capibara.config import configurable
from capibara.core.fields import FilePath
from capibara.core.types import UserError
from capibara.models.api import DecoderConfig, TransformerConfig


class Routing(NamedTuple):
    """Scores of experts that are mixed into those of a context's last token (models.parts.transformer.Pathways).

    Attributes:
      scores: [L, E] float32, L layers of the model.
      weights: [L] float32; all 0: nothing is mixed in, and the pathway is recorded.
    """

    scores: np.ndarray
    weights: np.ndarray


class Pathway(NamedTuple):
    """How a context's last token was routed before anything was mixed in.

    Attributes:
      scores: [L', E], of the layers that have experts.
      embedding: [D], the mean of the context's final hidden states, of length 1.
    """

    scores: np.ndarray
    embedding: np.ndarray


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class RemixExperts:
    """How the choices of a task are scored with re-mixed experts.

    Attributes:
      references: paths or globs of .jsonl files with lines as the task's, their right answers included; those that the model
        answers rightly are the neighbours. They must not be the task's own.
      neighbours: number of neighbours of a prompt.
      strength: weight of the neighbours' scores, from 0 to 1; the rest is that of the token's own.
      layers: number of the last layers with experts that are re-mixed.
    """

    references: tuple[FilePath, ...]
    neighbours: int = 3
    strength: float = 0.5
    layers: int = 5

    def __post_init__(self) -> None:
        if not self.references:
            raise UserError("RemixExperts.references is empty, must name .jsonl files with lines as the task's")
        for name in ("neighbours", "layers"):
            if getattr(self, name) < 1:
                raise UserError(f"RemixExperts.{name} is {getattr(self, name)}, must be at least 1")
        if not 0 < self.strength <= 1:
            raise UserError(f"RemixExperts.strength is {self.strength}, must be above 0 and at most 1: try 0.5")

    def check(self, config: TransformerConfig, *, context: int, stage: int) -> None:
        """Raises UserError if a model's experts cannot be re-mixed, or not with such sizes of the context and stage axes."""
        moe = config.moe
        if moe is None or type(config) is not DecoderConfig:
            raise UserError("EvalTask.remix is for decoders with experts, and this model has none: leave it out")
        unsupported = {
            f"Moe.routing is {str(moe.routing)!r}": moe.routing != "token_choice",
            f"Moe.gates is {str(moe.gates)!r}": moe.gates == "close",
            f"Plan.context is {context}": context > 1,
            f"Plan.stage is {stage}": stage > 1,
        }
        for option, is_set in unsupported.items():
            if is_set:
                raise UserError(f"EvalTask.remix is not for models where {option}: leave it out")

    def routing(self, references: Sequence[Pathway], prompt: Pathway, config: TransformerConfig) -> Routing:
        """The scores that are mixed into those of a prompt's last token.

        Args:
          references: of the prompts that were answered rightly.
          prompt: of the prompt.
          config: of the model.
        """
        embeddings = np.stack([item.embedding for item in references])
        distances = np.linalg.norm(embeddings - prompt.embedding, axis=-1)
        nearest = np.argsort(distances, kind="stable")[: self.neighbours]
        width = max(float(distances[nearest].mean()), 1e-6)
        kernel = np.exp(-0.5 * np.square(distances[nearest] / width))
        mixed = np.tensordot(kernel / kernel.sum(), np.stack([references[i].scores for i in nearest]), 1)
        result, numbers = unmixed(config), _layers(config)
        result.scores[numbers] = mixed
        result.weights[numbers[-self.layers :]] = self.strength
        return result


def unmixed(config: TransformerConfig) -> Routing:
    """A routing that changes nothing and lets the pathway be recorded."""
    assert config.moe is not None
    scores = np.zeros((config.num_layers, config.moe.num_experts), np.float32)
    return Routing(scores, np.zeros(config.num_layers, np.float32))


def _layers(config: TransformerConfig) -> list[int]:
    return list(config.module_layers.get("mlp", range(config.num_layers)))
