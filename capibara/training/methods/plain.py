"""The plain training method: one model, the mean gradient over the batch, to the last step."""

from __future__ import annotations

from capibara.training.methods.method import Method


class Plain(Method):
    """What every other method differs from: all of it is `Method`'s defaults."""

    @property
    def program(self) -> dict[str, str]:
        return {}
