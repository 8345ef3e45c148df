"""A mistake in the user's own code at each door: one line that names the class, and exit code 2, before a step is made."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import pathlib
import sys
import types

import numpy as np
import pytest

from capibara.core import devices, user_modules
from capibara.core.types import UserError
from capibara.multihost import exits

FOLDER = pathlib.Path(__file__).resolve().parents[2] / "examples" / "extend"
HEAD = """
import dataclasses
import jax, jax.numpy as jnp, optax
from flax import nnx
from capibara.config import configurable
from capibara.data.sources.sources import Documents, Example, Source
from capibara.data.tokenizers.vocabulary import Vocabulary
from capibara.models.api import TransformerConfig, model_of
from capibara.models.layers import layers
from capibara.objectives.base import Objective, Totals, of_cross_entropy
from capibara.objectives.batches import LoaderBatches
from capibara.objectives.loss import Loss
from capibara.optim import OptimizerConfig, ScheduleConfig, StandardOptimizer

config = lambda cls: configurable(dataclasses.dataclass(frozen=True, kw_only=True)(cls))
"""
OPTIMIZER, SCHEDULE = "Trainer.optimizer = @{0}()", "Optimizer.schedule = @{0}()"
LOSS, SOURCE, VOCABULARY = "Trainer.loss = @{0}()", "Dataset.source = @{0}()", "Dataset.vocabulary = @{0}()"
# What follows `class NAME`, the binding, and what the line says. NAME is new for each case: Gin knows a class for good.
CASES = {
    "no rule": ("(StandardOptimizer):\n def rule(self, axes): return None", OPTIMIZER, "NAME.rule returned None"),
    "abstract rule": ("(StandardOptimizer):\n decay: float = 1.0", OPTIMIZER, "NAME: TypeError: Can't instantiate"),
    "raising rule": ("(StandardOptimizer):\n def rule(self, axes): return 1 / 0", OPTIMIZER, "NAME.rule: ZeroDiv"),
    "no schedule": (
        "(OptimizerConfig):\n def build(self, total_steps, axes): return optax.sgd(1.0)",
        OPTIMIZER,
        "NAME has no schedule",
    ),
    "other updates": (
        "(StandardOptimizer):\n"
        " def rule(self, axes): return optax.stateless(lambda u, p: jax.tree.map(lambda x: x[None], u))",
        OPTIMIZER,
        "the updates of NAME have (1, 384, 16) for embedding",
    ),
    "a rate": ("(ScheduleConfig):\n def build(self, total_steps): return 0.1", SCHEDULE, "NAME.build returned 0.1"),
    "rates": (
        "(ScheduleConfig):\n def build(self, total_steps): return lambda step: jnp.ones(3)",
        SCHEDULE,
        "NAME.build is the shape (3,)",
    ),
    "no objective": (
        "(Loss):\n def objective(self, model, dataset): return None",
        LOSS,
        "NAME.objective returned None",
    ),
    "another signature": ("(Loss):\n def objective(self, model): return None", LOSS, "NAME.objective: TypeError"),
    "no such metric": (
        "(Loss):\n means = ('nosuch',)\n def objective(self, model, dataset): return of_cross_entropy(model, 0.0)",
        LOSS,
        "NAME.means has 'nosuch'",
    ),
    "one sum": (
        "(Loss):\n def objective(self, model, dataset): return Objective(lambda *_: jnp.float32(1), None)",
        LOSS,
        "the objective's sums are ()",
    ),
    "no ids": (
        "(Vocabulary):\n size_multiple: int = 128\n extra_ids: int = 0\n pad_id = bos_id = 0\n eos_id = 500\n pieces = [b'']"
        "\n def encode(self, text): return []",
        VOCABULARY,
        "NAME.eos_id is 500, must be from 0 to 127",
    ),
}


@pytest.fixture
def train(tmp_path, monkeypatch, capfd):
    """(module, its code, a binding) -> exit code and stderr of a training that would make one step."""
    monkeypatch.setattr(user_modules, "_roots", {})
    monkeypatch.setattr(devices, "emulate", lambda count: None)  # of this process, as they are
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(FOLDER)

    def train(module, code, binding):
        (tmp_path / f"{module}.py").write_text(HEAD + code)
        (tmp_path / "bad.gin").write_text(
            f'import {module}\ninclude "tiny.gin"\nMODEL_DIR = "{tmp_path / "run"}"\nTRAIN_STEPS = 1\n{binding}\n'
        )
        capfd.readouterr()
        main = importlib.import_module("capibara.train").main
        done = exits.run_verb(main, [f"--gin_file={tmp_path / 'bad.gin'}", "--emulate=8"])
        sys.modules.pop(module, None)
        return done, capfd.readouterr().err

    return train


@pytest.mark.parametrize("case", CASES)
def test_a_mistake_is_one_line(train, case):
    body, binding, said = CASES[case]
    name = f"Bad{[*CASES].index(case)}"
    code, error = train(f"{name.lower()}_door", f"@config\nclass {name}{body}\n", binding.format(name))
    lines = [line for line in error.splitlines() if line.startswith("error: ")]
    assert code == 2 and len(lines) == 1 and "Traceback" not in error, error
    assert said.replace("NAME", name) in lines[0], lines[0]


@pytest.fixture
def all_is_users(monkeypatch):
    """Every class but those of capibara counts as the user's."""
    own = lambda x: (x if isinstance(x, type) else type(x)).__qualname__.rpartition(".")[2]  # noqa: E731
    monkeypatch.setattr(user_modules, "own_class", own)


def test_a_model_says_what_it_lacks(all_is_users):
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from capibara.models.api import TransformerConfig, build, model_of
    from capibara.models.architectures.decoder import Decoder

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Config(TransformerConfig):
        num_heads: int = 1
        wrong: str = ""

    with pytest.raises(UserError, match=r"@model_of\(int\) must name a configuration"):
        model_of(int)
    with pytest.raises(UserError, match="must decorate a class of nnx.Module"):
        model_of(Config)(dict)
    with pytest.raises(UserError, match="Headless has no `__call__`"):
        model_of(Config)(type("Headless", (nnx.Module,), {}))
    with pytest.raises(UserError, match="Odd.block is 3, must be a class"):
        type("Odd", (Decoder,), {"block": 3})

    @model_of(Config)
    class Mine(nnx.Module):
        def __init__(self, config, rngs):
            self.config = config
            options = {} if config.wrong == "axes" else {"axes": ("vocab", "embed")}
            self.table = nnx.Param(jnp.zeros((config.vocab_size, config.embed_dim)), **options)

        def __call__(self, batch, remat, step):
            x = self.table[...][batch["tokens"]]
            return x if self.config.wrong == "stats" else (x, {})

        def head(self):
            return self.table[...].T if self.config.wrong == "head" else self.table[...]

    sizes = {"vocab_size": 8, "embed_dim": 4, "num_layers": 1, "mlp_dim": 4}
    tokens = {"tokens": jax.ShapeDtypeStruct((1, 3), jnp.int32)}
    with pytest.raises(UserError, match="Mine has a parameter of the shape .8, 4. without axes"):
        build(Config(wrong="axes", **sizes))
    for wrong, said in (
        ("stats", r"Mine.__call__ returned \(1, 3, 4\)"),
        ("head", r"Mine.head returned the shape \(4, 8\)"),
    ):
        model = build(Config(wrong=wrong, **sizes))
        with pytest.raises(UserError, match=said):
            jax.eval_shape(lambda p, b, m=model: (m.hidden(p, b), m.head(p)), model.abstract_params, tokens)


def test_ids_that_a_vocabulary_does_not_have_are_refused(all_is_users):
    """An embedding takes any id; what it gives for one that is too large is no error of its own."""
    from capibara.data.tokenizers.vocabulary import Vocabulary

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Words(Vocabulary):
        ids: object
        size_multiple: int = 4
        extra_ids: int = 0
        pieces = [b"", b"a"]

        def encode(self, text):
            return self.ids

    np.testing.assert_array_equal(Words(ids=[0, 3]).encode_batch(["a"])[0], [0, 3])
    for ids, said in (
        ([1, 4], "the id 4, must"),
        ([-1], "the id -1, must"),
        (None, "None, must"),
        (["a"], "must return a"),
    ):
        with pytest.raises(UserError, match=f"Words.encode returned .*{said}"):
            Words(ids=ids).encode_batch(["a"])


def test_a_source_returns_documents(all_is_users):
    from capibara.data.dataset import Dataset
    from capibara.data.sources.sources import Documents, Example, Source
    from capibara.data.tokenizers.vocabulary import ByteVocabulary

    class Texts(Documents):
        count, found, digest = 2, Example("a"), "x"

        def __len__(self):
            return self.count

        def example(self, i):
            return self.found

        def fingerprint(self):
            return {"digest": self.digest}

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Mine(Source):
        opened: object

        def open(self, split):
            return self.opened

    def documents(**changes):
        texts = Texts()
        vars(texts).update(changes)
        return Dataset(source=Mine(opened=texts), vocabulary=ByteVocabulary(), length=8)

    assert len(documents().documents("train")) == 2
    for wrong, said in (
        (Dataset(source=Mine(opened=None), vocabulary=ByteVocabulary(), length=8), "Mine.open returned None"),
        (documents(count=0), "Mine.open returned no document for 'train'"),
        (documents(digest={1}), "Texts.fingerprint returned .* must return a JSON value"),
    ):
        with pytest.raises(UserError, match=said):
            wrong.documents("train")
    from capibara.data.pipeline.loader import make_loader

    for found, said in (
        ("text", "Texts.example returned 'text', must return an Example"),
        (Example(3), "must be a str"),
    ):
        share = {"split": "train", "batch_size": 1, "shard_index": 0, "shard_count": 1, "epochs": None}
        loader = make_loader(documents(found=found), **share)
        with contextlib.closing(loader), pytest.raises(UserError, match=said):
            next(loader)


def test_a_batch_provider_makes_the_steps_batches(all_is_users):
    """The step was compiled for its arrays; a state that is no JSON would only be found at the first save."""
    from capibara.objectives.batches import BatchProvider
    from capibara.training.feed import BatchFeed

    class Mine(BatchProvider):
        batch, saved = {"tokens": np.zeros((2, 3), np.int32)}, {}

        def begin(self, params, step, saved): ...

        def next_batch(self, step, params):
            return self.batch

        def evaluate(self, params): ...

        def state(self):
            return self.saved

    provider, loader = Mine(), types.SimpleNamespace(position=None, batches=0)
    feed = BatchFeed(loader, None, provider, {"tokens": ((2, 3), np.dtype(np.int32))})
    assert feed.next_batch(1, {}) is provider.batch and feed.provider_state() == {}
    for batch, said in (
        (
            {"tokens": np.zeros((2, 2), np.int32)},
            r"the batch of Mine has int32\[2, 2\] for 'tokens', must have int32\[2, 3\]",
        ),
        ({"tokens": np.zeros((2, 3), np.float32)}, r"has float32\[2, 3\]"),
        ({"words": 0}, r"the batch of Mine has the arrays \['words'\], must have \['tokens'\]"),
    ):
        provider.batch = batch
        with pytest.raises(UserError, match=said):
            feed.next_batch(1, {})
    provider.saved = {"at": {1}}
    with pytest.raises(UserError, match="Mine.state returned .* must return a JSON value"):
        feed.provider_state()
