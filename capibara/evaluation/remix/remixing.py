"""Re-mixes experts at test time: a prompt's last token is routed as those of similar prompts that were answered rightly.

Two methods of C3PO (Li et al. 2025, arXiv:2504.07964). Neighbours are found by the mean of the prompt's final hidden states and
weighted by a Gaussian kernel whose width is their mean distance. Kernel regression mixes their scores into the router's scores of the
last layers; neighbourhood gradient descent mixes in scores with which the neighbours' right answers have the least loss (`descent`).
"""

from __future__ import annotations

import dataclasses
import enum
import math
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


class RemixMethod(enum.StrEnum):
    """How scores come from neighbours: their mean, or descent on the loss of their right answers."""

    KERNEL_REGRESSION = "kernel_regression"
    NEIGHBORHOOD_GRADIENT = "neighborhood_gradient"


class Neighbours(NamedTuple):
    """The references that are nearest to a prompt, and their weights, which sum to 1."""

    numbers: np.ndarray
    weights: np.ndarray


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class RemixExperts:
    """How the choices of a task are scored with re-mixed experts.

    Attributes:
      references: paths or globs of .jsonl files with lines as the task's, their right answers included; those that the model
        answers rightly are the neighbours. They must not be the task's own.
      neighbours: number of neighbours of a prompt.
      strength: weight of the mixed scores, from 0 to 1; the rest is that of the token's own. The paper's descent has 1.
      layers: number of the last layers with experts that are re-mixed.
      method: how scores come from neighbours.
      steps: of the descent, which begins at the prompt's own scores.
      learning_rate: of the descent on the scores' logarithms, falling to 0 along a cosine.
    """

    references: tuple[FilePath, ...]
    neighbours: int = 3
    strength: float = 0.5
    layers: int = 5
    method: RemixMethod = RemixMethod.KERNEL_REGRESSION
    steps: int = 10
    learning_rate: float = 1.0

    def __post_init__(self) -> None:
        if not self.references:
            raise UserError("RemixExperts.references is empty, must name .jsonl files with lines as the task's")
        for name in ("neighbours", "layers", "steps"):
            if getattr(self, name) < 1:
                raise UserError(f"RemixExperts.{name} is {getattr(self, name)}, must be at least 1")
        if not 0 < self.strength <= 1:
            raise UserError(f"RemixExperts.strength is {self.strength}, must be above 0 and at most 1: try 0.5")
        if not 0 < self.learning_rate < math.inf:
            raise UserError(f"RemixExperts.learning_rate is {self.learning_rate}, must be finite and above 0: try 1.0")
        for field in dataclasses.fields(self):
            if self.method is RemixMethod.KERNEL_REGRESSION and field.name in ("steps", "learning_rate"):
                if (value := getattr(self, field.name)) != field.default:
                    raise UserError(
                        f"RemixExperts.{field.name} is {value}, and RemixExperts.method 'kernel_regression' has no descent: set it "
                        "to 'neighborhood_gradient', or leave it out"
                    )

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

    def nearest(self, references: Sequence[Pathway], prompt: Pathway) -> Neighbours:
        """The references that are nearest to a prompt.

        Args:
          references: of the prompts that were answered rightly.
          prompt: of the prompt.
        """
        embeddings = np.stack([item.embedding for item in references])
        distances = np.linalg.norm(embeddings - prompt.embedding, axis=-1)
        nearest = np.argsort(distances, kind="stable")[: self.neighbours]
        width = max(float(distances[nearest].mean()), 1e-6)
        kernel = np.exp(-0.5 * np.square(distances[nearest] / width))
        return Neighbours(nearest, kernel / kernel.sum())

    def routing(self, references: Sequence[Pathway], prompt: Pathway, config: TransformerConfig) -> Routing:
        """The mean scores of a prompt's neighbours, as they are mixed into those of its last token.

        Args:
          references, prompt: as in `nearest`.
          config: of the model.
        """
        numbers, weights = self.nearest(references, prompt)
        return self.mixed(np.tensordot(weights, np.stack([references[i].scores for i in numbers]), 1), config)

    def mixed(self, scores: np.ndarray, config: TransformerConfig) -> Routing:
        """Scores [L', E] of the layers with experts, as they are mixed into those of a prompt's last token."""
        result, numbers = unmixed(config), layers(config)
        result.scores[numbers] = scores
        result.weights[numbers[-self.layers :]] = self.strength
        return result


def unmixed(config: TransformerConfig) -> Routing:
    """A routing that changes nothing and lets the pathway be recorded."""
    assert config.moe is not None
    scores = np.zeros((config.num_layers, config.moe.num_experts), np.float32)
    return Routing(scores, np.zeros(config.num_layers, np.float32))


def layers(config: TransformerConfig) -> list[int]:
    """The numbers of the layers with experts."""
    return list(config.module_layers.get("mlp", range(config.num_layers)))
