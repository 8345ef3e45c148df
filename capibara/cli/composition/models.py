"""Opens models as Gin files and flags configure them: what infer, serve, evaluate, convert, merge and `capibara.load` share."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence

from capibara import config
from capibara.checkpoints.policy import Checkpointing
from capibara.cli.arguments.flags import Arguments
from capibara.config import written
from capibara.core.types import Params, PyTree, UserError
from capibara.data.chat.formats import Conversation
from capibara.data.chat.template import ChatTemplate
from capibara.data.dataset import Dataset
from capibara.data.tokenizers.vocabulary import SentencePieceVocabulary, TokenizerJsonVocabulary
from capibara.evaluation import subject
from capibara.inference.engine.engine import Engine, EngineConfig
from capibara.inference.engine.placement.serving_mesh import ServingMesh
from capibara.inference.engine.requests.adapters import AdapterSlots
from capibara.inference.interactive import chat
from capibara.inference.thinking.answering import Thinker
from capibara.inference.thinking.reward_model import RewardModel, check_head
from capibara.inference.thinking.strategy import Strategy
from capibara.interop.open_model import LoadedModel
from capibara.loading import adapters, opening
from capibara.loading.adapter_folders import AdapterFolders
from capibara.models.api import Head, Model, TransformerConfig
from capibara.sharding import Plan
from capibara.training import run_folder
from capibara.training.run_folder import Placed, TrainedRun, own_tokenizer
from capibara.training.trainer import Trainer

PARSING = threading.RLock()  # of what is parsed, which is the process's: held while a model is opened from Python
Gin = tuple[Sequence[str], Sequence[str], Sequence[str]]  # files, bindings, search paths


def load(
    path: str,
    gin_files: Sequence[str] = (),
    bindings: Sequence[str] = (),
    search_paths: Sequence[str] = (),
    *,
    step: int | None = None,
    weights: str | None = None,
    placed: Placed = run_folder.on_one_device,
    trust: bool = False,
) -> LoadedModel:
    """Loads a model: a run folder, a Hugging Face folder or a .gguf file: `capibara.load(path)`.

    Its own configuration is parsed first, then `gin_files` and `bindings`.

    Args:
      path: path of the model.
      gin_files, bindings, search_paths: as in config.parse.
      step: a checkpoint step of a run; None: the newest.
      weights: weights of a run, "ema" or "raw"; None: the averages if there are any.
      placed: shardings of the parameters.
      trust: whether to import the modules that a run's configuration names.

    Raises:
      UserError: it is not a model, is incomplete, has no tokenizer, or has no such step or weights.
    """
    gin = (gin_files, bindings, search_paths)
    return load_with_run(path, gin, step=step, weights=weights, placed=placed, trust=trust)[1]


def load_with_run(
    path: str,
    gin: Gin,
    *,
    base: str | None = None,
    step: int | None = None,
    weights: str | None = None,
    placed: Placed = run_folder.on_one_device,
    trust: bool = False,
    change: Callable[[Trainer], Trainer] = lambda trainer: trainer,
) -> tuple[Trainer, LoadedModel]:
    """Like `load`, and also returns the run, which evaluation needs; for a foreign model, a run that would train it.

    `base`: the path of an adapter's base; None: the one that it names. `change`: changes the run before its model is made.
    """
    gin_files, _, search_paths = gin
    config.load_modules(gin_files, search_paths)
    opened = opening.open_path(path, base=base, step=step, weights=weights, trust=trust)
    config.parse(*gin, opened.record)
    trainer = config.build(Trainer)
    if opened.foreign is None:
        trainer = own_tokenizer.of_run(trainer, opened.path)
    trainer = change(trainer)
    loaded = opened.load(trainer, step=step, weights=weights, placed=placed)
    return (trainer if opened.adapter is None else dataclasses.replace(trainer, model=loaded.model.config)), loaded


def recorded_run(folder: str, gin: Gin = ((), (), ()), *, trust: bool = False) -> Trainer:
    """The run that a run folder records, with what Gin files and bindings set, and with the folder's own tokenizer."""
    config.parse(*gin, run_folder.recorded(folder, trust=trust))
    return own_tokenizer.of_run(config.build(Trainer), folder)


def load_run(folder: str, gin: Gin = ((), (), ()), *, merge: bool = True, trust: bool = False) -> TrainedRun:
    """Loads the newest step of a run folder onto one device; arguments and errors as in `run_folder.load`."""
    return run_folder.load(folder, recorded_run(folder, gin, trust=trust), merge=merge)


def with_adapters(loaded: LoadedModel, flags: Sequence[str], base: str | None = None) -> LoadedModel:
    """Adds the adapters of Gin and of flags ("NAME=PATH") to a model; errors as in `adapters.attached`.

    Args:
      loaded: the base model.
      flags: of the command line.
      base: the name of the model itself in requests; None: it has none.
    """
    settings = config.build(adapters.Adapters)
    return adapters.attached(loaded, settings, _checkpointing(loaded, settings.paths or flags), flags, base)


def _checkpointing(loaded: LoadedModel, is_used: object) -> Checkpointing:
    """How adapters of runs are read; a model that is a run records it."""
    return config.build(Checkpointing) if is_used and loaded.training is None else Checkpointing()


def load_served(args: Arguments, base: str | None = None) -> LoadedModel:
    """Loads the model that the flags of infer and serve name, with its adapters, for `engine_of`.

    Args:
      args: of the command line.
      base: the name of the model itself in requests; None: it has none.

    Raises:
      UserError: as in `load` and `with_adapters`.
    """
    path = args.model_dir or args.model
    gin = (args.gin_file, args.gin_bindings, args.gin_search_paths)
    _, loaded = load_with_run(path, gin, placed=on_serving_mesh, trust=args.trust_config)
    return with_adapters(loaded, args.adapter, base)


def adapter_settings(flags: Sequence[str] = ()) -> adapters.Adapters:
    """The adapters that Gin configures, with the folders of --adapter_folder."""
    configured = config.build(adapters.Adapters)
    return dataclasses.replace(configured, folders=(*configured.folders, *flags))


def adapter_slots(settings: adapters.Adapters) -> AdapterSlots:
    """Room for the adapters that clients of a server load."""
    return AdapterSlots(settings.slots if settings.folders else 0, settings.rank, settings.targets)


def adapter_folders(loaded: LoadedModel, settings: adapters.Adapters) -> AdapterFolders | None:
    """What reads the adapters that clients of a server load; None: they load none."""
    return AdapterFolders(loaded, settings, _checkpointing(loaded, True)) if settings.folders else None


def engine_of(
    loaded: LoadedModel, batching: EngineConfig, length: int | None = None, slots: AdapterSlots = AdapterSlots()
) -> Engine:
    """An engine that takes over a model's parameters, with slots of `length` tokens; None: of Dataset.length."""
    return Engine(
        loaded.model,
        loaded.params,
        loaded.tokenizer,
        length or loaded.dataset.length,
        batching,
        loaded.dataset.encoder_length,
        donate=True,
        adapters=loaded.adapters,
        adapter_slots=slots,
    )


def on_serving_mesh(plan: Plan, model: Model) -> PyTree:
    """The parameters' shardings for `load`, from the parsed configuration: on all processes; a reward model's on one device."""
    import jax

    if model.config.head is Head.SCORE:
        return run_folder.on_one_device(plan, model)
    return config.build(ServingMesh).shardings(model, jax.devices())


def chat_template(dataset: Dataset) -> ChatTemplate | None:
    """The chat template that the parsed configuration sets for a tokenizer; None: training has one, or there is no such tokenizer."""
    vocabulary = dataset.vocabulary
    if getattr(dataset.source, "template", None) or not isinstance(vocabulary, TokenizerJsonVocabulary):
        return None
    options = {} if config.is_bound("ChatTemplate.tokenizer") else {"tokenizer": vocabulary.folder}
    return config.build(ChatTemplate, **options)


def chatting(dataset: Dataset) -> tuple[ChatTemplate | None, EngineConfig]:
    """What the parsed configuration says of generation: the chat template, None if there is none, and the engine."""
    try:
        template = chat_template(dataset)
    except UserError:  # a chat will tell
        template = None
    return template, config.build(EngineConfig)


def chat_of(dataset: Dataset) -> chat.Chat:
    """The tokenizer with the chat template of training, else that of the parsed configuration; errors as in `chat.of_run`."""
    return chat.of_run(dataset, template=chat_template(dataset))


def thinker(strategy: Strategy | None) -> Thinker | None:
    """A thinking strategy with its reward model; None: there is no strategy. Errors as in `reward_model`."""
    return None if strategy is None else Thinker(strategy, reward_model(strategy))


def scorer_of(loaded: LoadedModel, name: str, template: ChatTemplate | None) -> RewardModel:
    """The scores of a loaded reward model, whose chat template was tried.

    Args:
      loaded: the model.
      name: for errors.
      template: its chat template, if its training has none; None: that beside the tokenizer.

    Raises:
      UserError: it is no reward model, or has no chat template that can be used.
    """
    check_head(name, loaded.model)
    talk = chat.of_run(loaded.dataset, "a reward model", template=template)
    scorer = RewardModel(name, loaded.model, loaded.params, loaded.dataset, talk.template)
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    scorer.rendered(Conversation(turns), "an answer")
    return scorer


def reward_model(strategy: Strategy | None, name: str | None = None) -> RewardModel | None:
    """Loads the reward model that a thinking strategy names, beside what is parsed; None: it names none.

    Args:
      strategy: the strategy.
      name: of the reward model in errors of its answers; None: its path.

    Raises:
      UserError: it is no reward model, or as in `load`.
    """
    if strategy is None or (path := strategy.reward_folder) is None:
        return None
    import jax

    if (count := jax.process_count()) > 1:
        raise UserError(f"{type(strategy).__name__}.reward is for one process, and there are {count}: start one alone")
    with PARSING, config.isolated():
        loaded = load(path)
        check_head(path, loaded.model)  # before the template, which other models may lack
        return scorer_of(loaded, name or path, chat_template(loaded.dataset))


def open_subject(
    path: str,
    gin_files: Sequence[str] = (),
    bindings: Sequence[str] = (),
    search_paths: Sequence[str] = (),
    *,
    step: int | None = None,
    weights: str | None = None,
    trust: bool = False,
) -> subject.Subject:
    """Loads a model that is to be evaluated onto all devices; arguments and errors as in `load`."""
    layout = subject.Layout(is_set=any(binding.startswith("Plan.") for binding in bindings))
    gin = (gin_files, bindings, search_paths)
    run, loaded = load_with_run(path, gin, step=step, weights=weights, placed=layout.placed, trust=trust)
    return subject.of_model(
        loaded,
        run,
        layout,
        batching=config.build(EngineConfig),
        serving=config.build(ServingMesh),
    )


@dataclasses.dataclass(frozen=True)
class ModelReader:
    """Reads what a conversion or merge is given as Gin configures it (interop.conversion.ModelReader).

    Attributes:
      gin: Gin files, bindings and search paths; they override or complete a model's own configuration.
      trust: whether to import the modules that a run's configuration names.
    """

    gin: Gin = ((), (), ())
    trust: bool = False

    def load_modules(self) -> None:
        """Imports the modules that the Gin files import, so that their models are known."""
        gin_files, _, search_paths = self.gin
        config.load_modules(gin_files, search_paths)

    def is_run(self, folder: str) -> bool:
        """Whether a folder is a run folder."""
        return run_folder.is_run(folder)

    def run(self, folder: str) -> LoadedModel:
        """The newest step of a run folder, on one device, with adapters unmerged."""
        return opening.of_run(load_run(folder, self.gin, merge=False, trust=self.trust), folder)

    def described(self, folder: str) -> LoadedModel:
        """A run without adapters, with shapes (jax.ShapeDtypeStruct) for parameters: reads only its configuration."""
        result = run_folder.described(folder, recorded_run(folder, trust=self.trust))
        return opening.of_run(result, folder)

    @property
    def completes(self) -> bool:
        """Whether Gin sets anything of a foreign model's configuration."""
        gin_files, bindings, _ = self.gin
        return bool(gin_files or bindings)

    def completed(
        self, model: TransformerConfig, path: str
    ) -> tuple[TransformerConfig, SentencePieceVocabulary | None]:
        """The configuration of a foreign model, as Gin completes it, and the tokenizer that Gin names; None: its own.

        Args:
          model: its own configuration.
          path: of the model, for errors.
        """
        config.parse(*self.gin, config.Recorded("\n".join(written.bindings(model)) + "\n", path))
        has_tokenizer = config.is_bound("SentencePieceVocabulary.path")
        return config.build(type(model)), config.build(SentencePieceVocabulary) if has_tokenizer else None

    def optimizer(self, loaded: LoadedModel) -> tuple[int, PyTree] | None:
        """Like `run_folder.newest_optimizer`; None for a foreign model, too."""
        if loaded.training is None:
            return None
        model, training = loaded.model, loaded.training
        tx = training.optimizer.transformation(training.steps, model.trained(model.axes))
        return run_folder.newest_optimizer(loaded.path, model, tx, training.checkpointing)

    def save(self, folder: str, params: Params, gin: str) -> None:
        """Like `run_folder.save`."""
        run_folder.save(folder, params, gin)
