"""What holds for every decoder, whatever its parts: its loop, its cache, packed rows and adapters change no logits."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from capibara.models import api

LENGTH = 24


@functools.cache
def model_and_params(config):
    """A model and parameters of which none is 0 or 1 by its initialisation."""
    model = api.build(config)

    def noisy():
        leaves, tree = jax.tree.flatten(model.init(jax.random.key(0)))
        keys = jax.random.split(jax.random.key(1), len(leaves))
        noise = [0.1 * jax.random.normal(key, x.shape) for key, x in zip(keys, leaves, strict=True)]
        return jax.tree.unflatten(tree, [x + y for x, y in zip(leaves, noise, strict=True)])

    return model, jax.jit(noisy)()


@functools.cache
def logits_of(config):
    return jax.jit(api.build(config).logits)


def batch_of(rows=2, length=LENGTH, vocab=96):
    tokens = np.random.default_rng(0).integers(0, vocab, (rows, length)).astype(np.int32)
    positions = np.broadcast_to(np.arange(length, dtype=np.int32), tokens.shape)
    return {"tokens": tokens, "positions": positions, "segment_ids": np.ones_like(tokens)}


def loops_are_alike(config):
    _, params = model_and_params(config)
    unrolled = dataclasses.replace(config, layer_loop="unroll")
    got, want = (logits_of(each)(params, batch_of()) for each in (config, unrolled))
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


def the_cache_gives_whole_rows(config, first=9, sizes=(14, 1)):
    """A prefill of the first tokens, then pieces of these sizes, against whole rows."""
    model, params = model_and_params(config)
    batch = batch_of()
    want = logits_of(config)(params, batch)
    served, cache, at = jax.jit(model.serving)(params), model.start_cache(2, LENGTH), first
    piece = {"tokens": batch["tokens"][:, :first], "counts": np.full(2, first, np.int32)}
    logits, cache = jax.jit(model.prefill)(served, piece, cache)
    pieces = [logits[:, None]]
    for size in sizes:
        piece = {"tokens": batch["tokens"][:, at : at + size], "counts": np.full(2, size, np.int32)}
        logits, _, cache = jax.jit(model.extend)(served, piece, cache)
        pieces.append(logits)
        at += size
    np.testing.assert_allclose(jnp.concatenate(pieces, axis=1), want[:, first - 1 : at], rtol=0, atol=5e-5)


def documents_are_apart(config):
    """Two documents in a row have the logits that each has alone."""
    _, params = model_and_params(config)
    both, half = batch_of(rows=1), LENGTH // 2
    alone = {name: value[:, :half] for name, value in both.items()}
    second = alone | {"tokens": both["tokens"][:, half:]}
    both["segment_ids"] = np.where(np.arange(LENGTH) < half, 1, 2)[None].astype(np.int32)
    both["positions"] = (np.arange(LENGTH) % half)[None].astype(np.int32)
    got = logits_of(config)(params, both)
    np.testing.assert_allclose(got[:, :half], logits_of(config)(params, alone), rtol=0, atol=1e-5)
    np.testing.assert_allclose(got[:, half:], logits_of(config)(params, second), rtol=0, atol=1e-5)


def adapters_merge(config, *targets):
    """Adapters of each of these targets change the logits, and are merged into the weights."""
    config = dataclasses.replace(config, lora=api.Lora(rank=2, targets=targets))
    model, params = model_and_params(config)
    changed = logits_of(config)(params, batch_of())
    plain = jax.jit(model.plain.logits)
    assert np.abs(changed - plain(jax.jit(model.base)(params), batch_of())).max() > 1e-4
    np.testing.assert_allclose(plain(jax.jit(model.merge)(params), batch_of()), changed, rtol=0, atol=5e-5)
