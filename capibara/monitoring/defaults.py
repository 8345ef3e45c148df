"""Which callbacks a run has."""

from __future__ import annotations

import dataclasses

from capibara.config import configurable
from capibara.training.callbacks import Callback, Callbacks


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Monitoring:
    """The callbacks of a run.

    Attributes:
      callbacks: None: the usual ones (metrics file, TensorBoard, progress line, loss curve).
      more: called after them.
    """

    callbacks: tuple[Callback, ...] | None = None
    more: tuple[Callback, ...] = ()

    def build(self) -> Callbacks:
        """One callback that calls them all."""
        return Callbacks([*(usual() if self.callbacks is None else self.callbacks), *self.more])


def usual() -> list[Callback]:
    """What a run has when its Gin file says nothing."""
    return [_Print()]


class _Print(Callback):
    def on_step(self, step, metrics):
        print("step", step, dict(metrics))

    def on_evaluate(self, step, metrics):
        print("eval", step, dict(metrics))

    def on_sample(self, step, prompt, text):
        print(repr(prompt + text))
