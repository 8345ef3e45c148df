"""Generates answers to prompts with the current parameters; the processes split the work, or do it together."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import jax

from capibara.core.interrupt import Interrupted
from capibara.core.types import Params
from capibara.inference.calls.dialect import Dialect
from capibara.inference.engine.engine import Engine, EngineConfig
from capibara.inference.engine.placement import own_chips
from capibara.inference.engine.placement.own_chips import OwnChips, Where
from capibara.inference.engine.placement.serving_mesh import ServingMesh
from capibara.inference.engine.requests.stream import Completion, Stream
from capibara.inference.interactive import chat
from capibara.inference.memory_agent.reading import Reading
from capibara.inference.sampling.sampling import Sampling
from capibara.models.api import Model
from capibara.multihost import hosts
from capibara.objectives.batches import RunParts

# On devices apart: the engine's parameters, the next ones, and while these are replaced, or in an evaluation, a third set.
COPIES_APART = 3
ASK_EVERY_STEPS = 64  # engine steps between two exchanges of whether to stop and who has work left, with several hosts


class Generating(Protocol):
    """Options of generation: a `grpo.Grpo`."""

    @property
    def engine(self) -> EngineConfig: ...
    @property
    def where(self) -> Where: ...
    @property
    def mesh(self) -> ServingMesh: ...


class Prompt(NamedTuple):
    """A prompt of a batch: its row, its number in the split, and its tokens."""

    row: int
    number: int
    ids: list[int]


class Generator:
    """Answers prompts with the parameters that it was given last.

    If the parameters fit its own chips, each process has an engine and answers its part of the prompts; otherwise all
    processes generate together.

    Args:
      run: parts of a run.
      options: of the generation.
      model: the model that answers; None: the run's.
      devices: the engine's, of this process; empty: as `options.where` says.

    Attributes:
      chat: the tokenizer and the chat template.
    """

    def __init__(
        self, run: RunParts, options: Generating, model: Model | None = None, devices: Sequence[jax.Device] = ()
    ):
        self._run, self._options, self._devices = run, options, devices
        self._model = run.model if model is None else model
        self.chat = chat.of_run(run.dataset, type(options).__name__)
        self._engine: Engine | None = None

    def load(self, params: Params) -> None:
        """Loads parameters into the engine; all processes call it."""
        self.use(self.copied(params))

    def copied(self, params: Params) -> Params:
        """Parameters for `use`: in the compute dtype on the engine's chips, if it has its own; all processes call it."""
        jax.block_until_ready(params)
        return params if self._chips is None else self._chips(params)

    def use(self, copied: Params) -> None:
        """Loads parameters from `copied` into the engine."""
        if self._engine is not None:
            self._engine.update(copied)
            return
        options, dataset, rules = self._options, self._run.dataset, self._run.plan.rules
        vocabulary = dataset.get_vocabulary()
        if self._chips is None:
            self._engine = Engine(self._model, copied, vocabulary, dataset.length, options.engine, rules=rules)
        else:
            self._engine = Engine(self._model.plain, copied, vocabulary, dataset.length, options.engine)

    @functools.cached_property
    def _chips(self) -> OwnChips | None:
        """Copies to the engine's own chips; None: it uses those of all processes."""
        options, rules = self._options, self._run.plan.rules
        layout = own_chips.layout_of(
            self._model,
            options.mesh,
            Where.OWN if self._devices else options.where,
            options.engine,
            self._run.dataset.length,
            free=self._free_bytes(),
            devices=self._devices,
            copies=COPIES_APART if self._devices else 1,
        )
        return None if layout is None else OwnChips(self._model, layout, rules)

    @property
    def _loaded(self) -> Engine:
        assert self._engine is not None, "parameters are loaded before prompts are answered"
        return self._engine

    def _free_bytes(self) -> int | None:
        """Free memory of a device, on every process, beside the train step where that has the same devices."""
        reserved = 0 if self._devices else self._run.step_temp_bytes
        free = hosts.gathered(own_chips.free_bytes(reserved, self._devices))
        return None if None in free else min(free)

    def streams(
        self,
        prompts: Sequence[Prompt],
        samplings: Callable[[int], list[Sampling]],
        topic: str,
        dialect: Dialect = Dialect(),
    ) -> dict[int, list[Stream]]:
        """Finished answers to each prompt by its row; all processes call it.

        Args:
          prompts: those that this process answers, see `share`.
          samplings: row of a prompt -> sampling options of each of its answers.
          topic: their purpose, for the progress.
          dialect: how calls are written, whose special tokens are part of an answer's text.

        Raises:
          Interrupted: the run must stop.
        """
        ends, spelled = dialect.ends_of(self.chat), dialect.spelled
        streams: dict[int, list[Stream]] = {}
        for row, _, ids in prompts:
            streams[row] = [self._loaded.submit(ids, item, ends=ends, spelled=spelled) for item in samplings(row)]
        try:
            self._finish(topic, sum(map(len, streams.values())))
        except Interrupted:  # the engine may be used again
            for stream in itertools.chain.from_iterable(streams.values()):
                stream.cancel()
            raise
        return streams

    def share(self, prompts: Sequence[Prompt]) -> Sequence[Prompt]:
        """The prompts that this process answers: all where all processes generate together."""
        return prompts if self.is_together else hosts.share(prompts)

    @property
    def is_together(self) -> bool:
        """Whether all processes generate together, each from the same prompts."""
        return self._chips is None

    def read(self, readings: Sequence[Reading], topic: str) -> list[Completion]:
        """The answers about this process's documents, which it reads to their ends; all processes call it."""
        answers: dict[int, Completion] = {}
        left, number = [*range(len(readings))], 1
        while any(hosts.each(lambda: bool(left))):
            open_readings = [readings[i] for i in left]
            streams = [self._loaded.submit(item.prompt, item.sampling, ends=item.ends) for item in open_readings]
            self._finish(f"{topic}, conversation {number}", len(left))
            for i, reading, stream in zip(left, open_readings, streams):
                if (answer := reading.add(stream.result())) is not None:
                    answers[i] = answer
            left, number = [i for i in left if i not in answers], number + 1
        return [answers[i] for i in range(len(readings))]

    def _finish(self, topic: str, count: int) -> None:
        """Generates until the engines of all processes have finished; `count`: answers of this process's engine."""
        for turn in itertools.count():
            self._run.reporter.check(turn)
            result = hosts.each(lambda: (self._is_busy(), count - sum(self._loaded.load), count))
            if not any(busy for busy, _, _ in result):
                return
            parts = result[:1] if self.is_together else result
            done, total = (sum(item[column] for item in parts) for column in (1, 2))
            self._run.reporter.progress(f"{topic}: {done} of {total} answers")

    def _is_busy(self) -> bool:
        """Runs this process's engine; returns whether it had work."""
        steps = 1 if jax.process_count() == 1 else ASK_EVERY_STEPS
        return all(self._loaded.step() for _ in range(steps))


def tokens_of(completion: Completion) -> tuple[list[int], list[float]]:
    """The tokens of an answer with its end token, and the log-probabilities with which they were drawn."""
    tokens, drawn = [*completion.tokens], [*completion.drawn]
    if completion.end is None:
        return tokens, drawn
    return [*tokens, completion.end], [*drawn, completion.end_drawn]
