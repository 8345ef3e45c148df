"""A batch provider: rows whose inputs are noisy, so that a model learns to read over mistakes.

cd examples/extend && python -m capibara.train --gin_file=my_batches.gin --emulate=2
"""

import dataclasses

import numpy as np

from capibara.config import configurable
from capibara.objectives.base import of_cross_entropy
from capibara.objectives.batches import LoaderBatches
from capibara.objectives.loss import Loss


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class NoisyInputs(Loss):
    """The cross entropy of clean targets from inputs of which some are random.

    Attributes:
      share: of the input tokens that are replaced.
    """

    share: float = 0.1

    def objective(self, model, dataset):
        return of_cross_entropy(model, z_loss=0.0)

    def batch_provider(self, run):
        return NoisyBatches(run, self.objective(run.model, run.dataset), self.share)


class NoisyBatches(LoaderBatches):
    """The loader's batches with noise; derive from BatchProvider to make batches without a loader."""

    def __init__(self, run, objective, share):
        super().__init__(run, objective)
        self.share = share

    def on_host(self, step, batch):
        # Drawn by seed and step alone, so a run that resumes has the same noise.
        random = np.random.default_rng((self.run.seed, step))
        tokens = batch["tokens"]
        noise = random.integers(0, self.run.model.config.vocab_size, tokens.shape, dtype=tokens.dtype)
        return {**batch, "tokens": np.where(random.random(tokens.shape) < self.share, noise, tokens)}
