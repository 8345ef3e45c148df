"""A reward model that scores answers: each as a whole, or each of its steps."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from capibara.core.types import Batch, Params, UserError
from capibara.data.chat.conversations import TrainOn, render_example
from capibara.data.chat.formats import Conversation
from capibara.data.chat.steps import StepsJsonlSource
from capibara.data.chat.template import ChatTemplate
from capibara.data.dataset import Dataset
from capibara.inference.thinking.strategy import Scores
from capibara.models.api import Head, Model

_SMALLEST_ROW = 32


def check_head(path: str, model: Model) -> None:
    """Raises UserError if a model has logits, not scores."""
    if model.config.head is not Head.SCORE:
        raise UserError(
            f"{path} is no reward model (its head is {str(model.config.head)!r}): train one by --method=reward or process_reward"
        )


class RewardModel:
    """Scores answers as the model was trained to: an answer at its last token, a step at the end of its separator.

    Args:
      path: of the model, for errors.
      model: with a score in the place of logits.
      params: its parameters, on one device.
      dataset: of its training, whose source says whether it scores steps.
      template: of its chats.
    """

    def __init__(self, path: str, model: Model, params: Params, dataset: Dataset, template: ChatTemplate):
        self._path, self._params, self._length, self._template = path, params, dataset.length, template
        self._vocabulary, source = dataset.get_vocabulary(), dataset.source
        self._separator = source.separator if isinstance(source, StepsJsonlSource) else None

        def score(params: Params, batch: Batch) -> jax.Array:
            return model.logits(params, batch)[..., 0].astype(jnp.float32)

        self._score = jax.jit(score)

    def scores(self, prompt: Conversation, answers: Sequence[str]) -> list[Scores]:
        """The scores of each answer to a prompt: a number, or a list with one for each step.

        Raises:
          UserError: prompt and answer do not fit a row, or a score is not finite.
        """
        rendered = [self._rendered(prompt, answer) for answer in answers]
        longest = max(len(ids) for ids, _ in rendered)
        if longest > self._length:
            raise UserError(
                f"prompt and answer have {longest} tokens, must fit the {self._length} of {self._path}: shorten the answers "
                "(Sampling.max_new_tokens)"
            )
        size = min(max(_SMALLEST_ROW, 1 << (longest - 1).bit_length()), self._length)
        batch = {name: np.zeros((len(answers), size), np.int32) for name in ("tokens", "segment_ids")}
        for row, (ids, _) in enumerate(rendered):
            batch["tokens"][row, : len(ids)] = ids
            batch["segment_ids"][row, : len(ids)] = 1
        batch["positions"] = np.tile(np.arange(size, dtype=np.int32), (len(answers), 1))
        result = np.asarray(self._score(self._params, batch))
        scores = [result[row, ends] for row, (_, ends) in enumerate(rendered)]
        if not all(np.isfinite(values).all() for values in scores):
            raise UserError(
                f"{self._path} scores an answer as nan or infinity: name a reward model that has not diverged"
            )
        return [float(values[0]) if self._separator is None else values.tolist() for values in scores]

    def _rendered(self, prompt: Conversation, answer: str) -> tuple[np.ndarray, np.ndarray]:
        """The tokens of a prompt and an answer, and where scores are read."""
        if self._separator is None:
            message = {"role": "assistant", "content": answer}
            whole = prompt._replace(messages=[*prompt.messages, message])
            text = render_example(self._template, whole, TrainOn.LAST, "an answer").text
            ids, _ = self._vocabulary.encode_rendered(text)
            return ids, np.array([len(ids) - 1])
        text, ends = self._template.render(prompt, "the prompt", add_generation_prompt=True).text, []
        for step in answer.split(self._separator):
            if step.strip():
                text += step + self._separator
                ends.append(len(text))
        ids, offsets = self._vocabulary.encode_rendered(text)
        return ids, np.searchsorted(offsets[:, 0], ends).astype(int) - 1
