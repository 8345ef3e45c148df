"""Which training method a run has, by the fields of Trainer."""

from __future__ import annotations

from capibara.consensus.privacy import Privacy
from capibara.core.types import UserError
from capibara.training.base.group import Group
from capibara.training.base.strategy import Strategy
from capibara.training.methods.grouped import Grouped
from capibara.training.methods.method import Method
from capibara.training.methods.nodes import Nodes
from capibara.training.methods.plain import Plain
from capibara.training.methods.private import Private


def select(*, strategy: Strategy | None, group: Group | None, privacy: Privacy | None, method: Method | None) -> Method:
    """The training method of the one field that is set; none: the plain one.

    Raises:
      UserError: two of them are set.
    """
    chosen: list[Method] = [] if strategy is None else [Nodes(strategy)]
    chosen += [] if group is None else [Grouped(group)]
    chosen += [] if privacy is None else [Private(privacy)]
    chosen += [] if method is None else [method]
    if len(chosen) > 1:
        raise UserError(f"Trainer.{chosen[0].field} is not supported with {chosen[1].name}: leave it out")
    return chosen[0] if chosen else Plain()
