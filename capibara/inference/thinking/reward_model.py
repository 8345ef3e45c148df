"""A reward model that scores answers: each as a whole, or each of its steps."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from capibara import sharding
from capibara.core.types import Batch, HostBatch, Params, UserError
from capibara.data.chat.conversations import TrainOn, render_example
from capibara.data.chat.formats import Conversation
from capibara.data.chat.steps import StepsJsonlSource
from capibara.data.chat.template import ChatTemplate
from capibara.data.dataset import Dataset
from capibara.inference.thinking.strategy import Scores
from capibara.models.api import Head, Model
from capibara.sharding import Plan

_SMALLEST_ROW = 32
BATCH_TOKENS = 8192  # that are read at once


def check_head(path: str, model: Model) -> None:
    """Raises UserError if a model has logits, not scores."""
    if model.config.head is not Head.SCORE:
        raise UserError(
            f"{path} is no reward model (its head is {str(model.config.head)!r}): train one by --method=reward or process_reward"
        )


def make_answer_scores(model: Model, plan: Plan | None, mesh: Mesh | None) -> Callable[[Params, HostBatch], jax.Array]:
    """A jitted function (params, batch) -> the score after each token, float32 [B, T], on all devices of the mesh."""

    def scores(params: Params, batch: Batch) -> jax.Array:
        if plan is None or mesh is None:
            return model.logits(params, batch)[..., 0].astype(jnp.float32)
        with sharding.activate(mesh, plan.rules, plan.pipeline(mesh)):
            return model.logits(params, batch)[..., 0].astype(jnp.float32)

    placed: dict[str, Any] = {}
    if plan is not None and mesh is not None:
        everywhere = NamedSharding(mesh, PartitionSpec())
        placed = {"in_shardings": (None, sharding.batch_sharding(mesh, plan.rules)), "out_shardings": everywhere}
    return jax.jit(scores, **placed)


class RenderedAnswer(NamedTuple):
    """The tokens of a prompt and an answer, and where scores are read."""

    ids: np.ndarray
    ends: np.ndarray


class RewardModel:
    """Scores answers as the model was trained to: an answer at its last token, a step at the end of its separator.

    Thread-safe, one batch at a time.

    Args:
      path: of the model, for errors.
      model: with a score in the place of logits.
      params: its parameters, on one device or as `plan` shards them over `mesh`.
      dataset: of its training, whose source says whether it scores steps.
      template: of its chats.
      plan: the plan of parameters that are sharded, without a context axis; None: they are on one device.
      mesh: the mesh of the parameters; None: they are on one device.

    Attributes:
      template: of its chats.
      rows: of its embedding: token ids are below it.
    """

    def __init__(
        self, path: str, model: Model, params: Params, dataset: Dataset, template: ChatTemplate,
        plan: Plan | None = None, mesh: Mesh | None = None,
    ):  # fmt: skip
        self._path, self._params, self._length, self.template = path, params, dataset.length, template
        self.rows, self._scoring = model.config.vocab_size, threading.Lock()
        self._vocabulary, source = dataset.get_vocabulary(), dataset.source
        self._separator = source.separator if isinstance(source, StepsJsonlSource) else None
        self._unit = 1
        if plan is not None and mesh is not None:
            pipeline = plan.pipeline(mesh)
            shards = math.prod(mesh.shape[axis] for axis in sharding.batch_axes(mesh.shape, plan.rules))
            self._unit = shards * (pipeline.microbatches if pipeline else 1)
        self._score = make_answer_scores(model, plan, mesh)

    @property
    def scores_steps(self) -> bool:
        """Whether an answer has a score for each of its steps."""
        return self._separator is not None

    def scores(self, prompt: Conversation, answers: Sequence[str]) -> list[Scores]:
        """The scores of each answer to a prompt: a number, or a list with one for each step.

        Raises:
          UserError: prompt and answer do not fit a row, or a score is not finite.
        """
        messages = [{"role": "assistant", "content": answer} for answer in answers]
        rendered = [
            self.rendered(prompt._replace(messages=[*prompt.messages, message]), "an answer") for message in messages
        ]
        longest = max(len(answer.ids) for answer in rendered)
        if longest > self._length:
            raise UserError(
                f"prompt and answer have {longest} tokens, must fit the {self._length} of {self._path}: shorten the answers "
                "(Sampling.max_new_tokens)"
            )
        return self.scores_of(rendered)

    def scores_of(self, answers: Sequence[RenderedAnswer]) -> list[Scores]:
        """The scores of rendered answers, which fit a row, as in `scores`.

        Raises:
          UserError: a score is not finite.
        """
        scores: list[Scores] = [0.0] * len(answers)
        sizes = [self._size(len(answer.ids)) for answer in answers]
        order = sorted(range(len(answers)), key=sizes.__getitem__)
        for size, numbers in itertools.groupby(order, sizes.__getitem__):
            of_size, most = list(numbers), max(1, BATCH_TOKENS // size)
            for group in (of_size[i : i + most] for i in range(0, len(of_size), most)):
                for number, values in zip(group, self._read([answers[i] for i in group], size)):
                    scores[number] = values.tolist() if self.scores_steps else float(values[0])
        return scores

    def _size(self, tokens: int) -> int:
        return min(max(_SMALLEST_ROW, 1 << (tokens - 1).bit_length()), self._length)

    def _read(self, answers: Sequence[RenderedAnswer], size: int) -> list[np.ndarray]:
        """The scores at the ends of each, in rows of `size` tokens; few numbers of rows, so that few programs are compiled."""
        rows = -(-(1 << (len(answers) - 1).bit_length()) // self._unit) * self._unit
        batch = {name: np.zeros((rows, size), np.int32) for name in ("tokens", "segment_ids")}
        for row, answer in enumerate(answers):
            batch["tokens"][row, : len(answer.ids)] = answer.ids
            batch["segment_ids"][row, : len(answer.ids)] = 1
        batch["positions"] = np.tile(np.arange(size, dtype=np.int32), (rows, 1))
        with self._scoring:
            result = np.asarray(self._score(self._params, batch))
        scores = [result[row, answer.ends] for row, answer in enumerate(answers)]
        if not all(np.isfinite(values).all() for values in scores):
            raise UserError(
                f"{self._path} scores an answer as nan or infinity: name a reward model that has not diverged"
            )
        return scores

    def rendered(self, conversation: Conversation, where: str) -> RenderedAnswer:
        """The tokens of a conversation that ends with an answer; errors, which name `where`, as in the template."""
        if self._separator is None:
            text = render_example(self.template, conversation, TrainOn.LAST, where).text
            ids, _ = self._vocabulary.encode_rendered(text)
            return RenderedAnswer(ids, np.array([len(ids) - 1]))
        *before, answer = conversation.messages
        prompt = conversation._replace(messages=before)
        text, ends = self.template.render(prompt, "the prompt", add_generation_prompt=True).text, []
        for step in answer["content"].split(self._separator):
            if step.strip():
                text += step + self._separator
                ends.append(len(text))
        ids, offsets = self._vocabulary.encode_rendered(text)
        return RenderedAnswer(ids, np.searchsorted(offsets[:, 0], ends).astype(int) - 1)
