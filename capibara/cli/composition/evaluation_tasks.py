"""The tasks of an evaluation, as Gin files bind them: what `capibara evaluate --task` names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from capibara import config
from capibara.cli.composition import models, retrieving
from capibara.core.fields import did_you_mean
from capibara.core.types import UserError
from capibara.evaluation import metrics, seqio_tasks, validation
from capibara.evaluation.evaluate import Ours, Seqio, Task, Validation
from capibara.evaluation.seqio_tasks import SeqioEvaluation
from capibara.evaluation.subject import Subject
from capibara.evaluation.tasks import EvalTask, PromptFormat

if TYPE_CHECKING:
    from capibara.evaluation.harness import Harness


def harness_options(subject: Subject) -> Harness:
    """How the harness's tasks are asked; a chat gets the template that Gin sets.

    Raises:
      UserError: a flag binds a value that nothing uses.
    """
    from capibara.evaluation.harness import Harness  # needs lm-eval

    options = config.build(Harness)
    if options.chat:
        subject.template = models.chat_template(subject.trainer.dataset)
    config.check_used()
    return options


def select(names: Sequence[str], limit: int | None, subject: Subject | None = None) -> list[Task]:
    """Reads and checks the tasks of these names.

    Args:
      names: names of tasks, each or several with commas between; empty: all tasks of the Gin files, or the validation split if there are none.
      limit: the largest number of examples of a task.
      subject: the model, which gets the template that Gin sets if a task is a chat.

    Raises:
      UserError: there is no such task, or it is invalid, or a flag binds a value that nothing uses.
    """
    names = [name for value in names for name in value.split(",") if name]
    bound = [scope for scope in dict.fromkeys(config.scopes("EvalTask")) if scope]
    result: list[Task] = []
    for name in dict.fromkeys(names or bound or [validation.NAME]):
        if name == validation.NAME:
            result.append(Validation())
        elif name.startswith(seqio_tasks.PREFIX):
            result.append(Seqio(name.removeprefix(seqio_tasks.PREFIX), config.build(SeqioEvaluation)))
        elif name in bound:
            with config.in_scope(name):
                task = config.build(EvalTask)
            items = retrieving.items(name, task, limit)
            for metric in task.scored_by:
                metrics.check_targets(metric, [item.target for item in items], name)
            result.append(Ours(name, task, items, models.reward_model(task.thinking)))
        else:
            raise UserError(
                f"--task={name} is not bound{did_you_mean(name, [*bound, validation.NAME])} (bind {name}/EvalTask.files in "
                f"a Gin file; for a SeqIO task write seqio:{name})"
            )
    if subject is not None and any(
        isinstance(entry, Ours) and (entry.task.format is PromptFormat.CHAT or entry.task.pairs) for entry in result
    ):
        subject.template = models.chat_template(subject.trainer.dataset)
    config.check_used([metric for entry in result if isinstance(entry, Ours) for metric in entry.task.scored_by])
    return result
