"""Drafts by the model's modules for multi-token prediction: the texts are those without drafts."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest

from capibara.core.types import UserError
from capibara.data.tokenizers.vocabulary import ByteVocabulary
from capibara.inference.engine.engine import Engine, EngineConfig
from capibara.inference.sampling.sampling import Sampling
from capibara.models import api
from capibara.models.api import DecoderConfig, GatedDelta, Mtp
from capibara.objectives.base import of_cross_entropy
from capibara.sharding import RematPolicy

VOCABULARY = ByteVocabulary()
CONFIG = DecoderConfig(
    vocab_size=VOCABULARY.size, embed_dim=32, num_layers=1, num_heads=2, mlp_dim=64, dtype="float32",
    mtp=Mtp(loss_weight=1.0),
)  # fmt: skip
MODEL = api.build(CONFIG)
TEXT = "the quick brown fox jumps over the lazy dog. "
PROMPTS = ("the quick", TEXT + "the quick brown", "lazy d", TEXT * 2 + "the qui")
SAMPLINGS = tuple(
    Sampling(max_new_tokens=24, temperature=temperature, seed=seed)
    for seed, temperature in enumerate((0.0, 0.9, 0.0, 0.7))
)


@functools.cache
def trained():
    """Parameters that know one sentence."""
    ids = VOCABULARY.encode(TEXT * 4)[:96]
    tokens = jnp.asarray([ids[:-1]])
    ones = jnp.ones_like(tokens)
    batch = {
        "tokens": tokens,
        "targets": jnp.asarray([ids[1:]]),
        "segment_ids": ones,
        "weights": ones.astype(jnp.float32),
    }
    batch |= {"positions": jnp.arange(tokens.shape[1])[None]}
    objective = of_cross_entropy(MODEL, 0.0)

    @jax.jit
    def step(params, squares):
        """RMSProp."""
        grads = jax.grad(lambda p: objective.sums(p, batch, RematPolicy(), jnp.int32(0))[0] / 95.0)(params)
        squares = jax.tree.map(lambda s, g: 0.95 * s + 0.05 * g * g, squares, grads)
        return jax.tree.map(lambda x, g, s: x - 3e-3 * g / (jnp.sqrt(s) + 1e-6), params, grads, squares), squares

    params = MODEL.init(jax.random.key(0))
    squares = jax.tree.map(jnp.zeros_like, params)
    for _ in range(150):
        params, squares = step(params, squares)
    return params


def engine(**config):
    return Engine(MODEL, trained(), VOCABULARY, 128, EngineConfig(slots=3, **config))


def texts(engine):
    streams = [engine.submit(prompt, sampling) for prompt, sampling in zip(PROMPTS, SAMPLINGS, strict=True)]
    return [stream.result().tokens for stream in streams]


@functools.cache
def without_drafts():
    return texts(engine())


@pytest.mark.parametrize(
    "config",
    [
        dict(draft_tokens=1),
        dict(draft_tokens=3, page_size=16),
        dict(draft_tokens=2, prefill_tokens=16),
        dict(draft_tokens=1, page_size=8, pages=24, prefill_tokens=16),
    ],
    ids=str,
)
def test_texts_are_those_without_drafts_in_fewer_steps(config):
    drafting = engine(drafts="mtp", **config)
    assert texts(drafting) == without_drafts()
    of_drafts = drafting.statistics
    assert of_drafts.acceptance > 0.5 and of_drafts.steps < 0.8 * sum(s.max_new_tokens for s in SAMPLINGS) / 2
    again = texts(drafting)  # from the prefix cache
    assert again == without_drafts()


def guesses_of(prompt, text):
    """Numbers of guesses and of right ones where each step guesses one token: by the module's states of the whole row."""
    ids = jnp.asarray([[*prompt, *text]])
    ones = jnp.ones_like(ids)
    rows = {"tokens": ids, "segment_ids": ones, "positions": jnp.arange(ids.shape[1])[None]}
    hidden, _ = MODEL.hidden(trained(), rows)
    after = jnp.pad(ids[:, 1:], ((0, 0), (0, 1)))
    (states,), _ = MODEL.ahead.states(trained(), hidden, [after], rows, RematPolicy(), None)
    guessed = jnp.argmax(MODEL.logits_of(trained(), states)[0], axis=-1).tolist()
    drafted = accepted = 0
    last, end = len(prompt), ids.shape[1] - 1  # the first token of the text is known
    while last < end - 1:  # the last token of a text is not guessed
        right = guessed[last - 1] == int(ids[0, last + 1])
        drafted, accepted, last = drafted + 1, accepted + right, last + 1 + right
    return drafted, accepted


def test_a_step_goes_on_from_the_last_right_guess():
    """Each guess is that of the whole row's states, after wrong guesses, too."""
    drafting = Engine(MODEL, trained(), VOCABULARY, 128, EngineConfig(slots=1, drafts="mtp", draft_tokens=1))
    for prompt in ("fox dog", "zzz the"):
        drafting.statistics.clear()
        done = drafting.submit(prompt, Sampling(max_new_tokens=40, temperature=0.9, seed=1)).result()
        want = guesses_of(VOCABULARY.encode(prompt), done.tokens)
        assert 0 < want[1] < want[0], "there are wrong and right guesses"
        assert (drafting.statistics.drafted, drafting.statistics.accepted) == want


def test_a_prompt_is_continued_from_its_end_alone():
    drafting, prompt = engine(drafts="mtp", draft_tokens=1), VOCABULARY.encode(TEXT)
    drafting.submit(prompt, SAMPLINGS[0]).result()
    assert drafting.submit([*prompt[:30], 7, 8, 9], SAMPLINGS[0]).result().cached_tokens == 0
    assert drafting.submit([*prompt, 7, 8, 9], SAMPLINGS[0]).result().cached_tokens == len(prompt)


def test_an_engine_without_these_drafts_has_no_modules():
    plain = engine()
    assert "mtp" not in plain.core.params.current
    assert len(plain.core.runner.state["cache"]["layers"]) == CONFIG.num_layers
    plain.update(trained())
    assert texts(plain) == without_drafts()


def test_drafts_without_modules_are_refused():
    with pytest.raises(UserError, match="drafts is 'mtp', and draft_tokens is 0"):
        EngineConfig(drafts="mtp")
    plain = api.without_mtp(MODEL)
    with pytest.raises(UserError, match=r"drafts is 'mtp', and the model has no modules for multi-token prediction"):
        Engine(plain, plain.init(jax.random.key(0)), VOCABULARY, 64, EngineConfig(drafts="mtp", draft_tokens=1))


def test_drafts_of_recurrent_layers_are_refused():
    mixer = GatedDelta(key_heads=2, value_heads=2, key_dim=8, value_dim=8)
    options = dict(vocab_size=VOCABULARY.size, embed_dim=32, num_layers=2, num_heads=2, mlp_dim=64, mtp=Mtp())
    model = api.build(DecoderConfig(layer_pattern=("recurrent", "global"), mixer=mixer, **options))
    with pytest.raises(UserError, match="layers have states, which cannot forget wrong guesses"):
        Engine(model, model.init(jax.random.key(0)), VOCABULARY, 64, EngineConfig(drafts="mtp", draft_tokens=1))
