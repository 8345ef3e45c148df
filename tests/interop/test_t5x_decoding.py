"""Generation as in T5X: texts and scores of beam search by its networks.

t5x_decoding.json holds T5X's own results (t5x_decoding_peer.py wrote it):

make test-peer PEER=t5x PEER_PYTHON=PATH/bin/python    makes it anew and compares (T5X is github.com/google-research/t5x)
"""

import json
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

from capibara.data.tokenizers.vocabulary import ByteVocabulary
from capibara.inference.engine import beam_search
from capibara.inference.engine.engine import Engine, EngineConfig
from capibara.inference.sampling import sampler
from capibara.inference.sampling.sampling import Sampling
from capibara.models import api

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import t5x_decoding_peer as peer  # noqa: E402
import t5x_peer  # noqa: E402
from test_t5x_training import MODELS, begun  # noqa: E402

PYTHON = os.environ.get("T5X_PYTHON")
T5X = json.loads((HERE / "t5x_decoding.json").read_text())
VOCAB = 64


@pytest.fixture(scope="module")
def params_of(tmp_path_factory):
    """(model, its parameters) of a case."""
    found = {}

    def of(case):
        if case not in found:
            model = api.build(MODELS[case])
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(t5x_peer, "drawn", peer.drawn)
                found[case] = model, begun(model, tmp_path_factory.mktemp(case) / "t5x")
        return found[case]

    return of


def rows_of(case, prompts):
    """A batch of prompts, and the number of tokens before the generated text."""
    if t5x_peer.CASES[case][0] == "decoder_only":
        texts = [[0, *prompt] for prompt in prompts]
        size = max(map(len, texts))
        tokens = np.array([text + [0] * (size - len(text)) for text in texts], np.int32)
        counts = np.array([len(text) for text in texts], np.int32)
        return {"tokens": tokens, "counts": counts, "inputs": counts}, [len(prompt) for prompt in prompts]
    size = max(map(len, prompts))
    encoder = np.array([prompt + [0] * (size - len(prompt)) for prompt in prompts], np.int32)
    batch = {"tokens": np.zeros((len(prompts), 1), np.int32), "counts": np.ones(len(prompts), np.int32)}
    real = (encoder > 0).astype(np.int32)
    batch |= {"encoder_tokens": encoder, "encoder_segment_ids": real}
    return batch, [0] * len(prompts)


def searched(model, params, case, prompts, num_decodes, alpha, min_log_prob=-1e7):
    batch, before = rows_of(case, prompts)
    length = batch["encoder_tokens"].shape[1] if "encoder_tokens" in batch else None
    capacity = batch["tokens"].shape[1] + peer.NEW
    programs = beam_search.build(model, VOCAB, beam_search.Sizes(num_decodes, peer.NEW, capacity, length))
    count = len(prompts)
    asked = beam_search.beam_requests_of([peer.NEW] * count, before, [[peer.CASES[case]]] * count, alpha, min_log_prob)
    return beam_search.search(programs, model.serving(params), batch, asked)


SHORT = [("t5", "k4"), ("decoder_only", "k9_a8"), ("prefix_lm", "k4_a2")]
ALL = [(case, how) for case in peer.CASES for how in peer.BEAMS]


def agrees(found, wanted, where):
    for row, want in enumerate(wanted):
        assert found.texts[row].tolist() == want["texts"], f"{where} prompt {row}"
        np.testing.assert_allclose(found.scores[row], want["scores"], rtol=2e-5, err_msg=f"{where} prompt {row}")


@pytest.mark.parametrize(
    ("case", "how"), [one if one in SHORT else pytest.param(*one, marks=pytest.mark.heavy) for one in ALL]
)
def test_texts_and_scores_of_beam_search_are_those_of_t5x(case, how, params_of):
    """All prompts in one batch; T5X ran each alone."""
    agrees(searched(*params_of(case), case, peer.prompts(case), **peer.BEAMS[how]), T5X[case][how], f"{case} {how}")


def log_probabilities_of(model, params, case):
    """(prompt, text, sampling) -> the distribution that each token of the text is drawn from; compiled once for all."""
    size = max(map(len, peer.prompts(case))) + peer.NEW

    @jax.jit
    def of_tokens(batch, before, tokens, settings):
        logits = jax.lax.dynamic_slice_in_dim(model.logits(params, batch)[0], before - 1, peer.NEW)
        limited = sampler._likeliest(logits / settings.temperature[:, None], settings)
        return sampler.log_probability(limited, tokens)

    def of(prompt, text, sampling):
        batch, _ = rows_of(case, [prompt])
        before = batch["tokens"].shape[1]
        row = np.zeros((1, size), np.int32)
        row[0, : before + len(text) - 1] = [*batch["tokens"][0], *text[:-1]]
        batch |= {"tokens": row, "segment_ids": (np.arange(size) < before + len(text) - 1)[None].astype(np.int32)}
        batch["positions"] = np.arange(size, dtype=np.int32)[None]
        tokens = np.array([*text, *[0] * (peer.NEW - len(text))], np.int32)
        return of_tokens(batch, before, tokens, sampler.settings_of([sampling] * peer.NEW))[: len(text)]

    return of


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.heavy if case == "t5" else ()) for case in peer.DRAWING]
)
def test_what_t5x_draws_has_its_probability_here(case, params_of):
    """With the same temperature and limits: T5X selects the likeliest draw by these scores."""
    log_probabilities = log_probabilities_of(*params_of(case), case)
    for how, options in peer.DRAWN.items():
        given = {"temperature": options["temperature"], "top_k": options["topk"] or None, "top_p": options.get("topp")}
        for prompt, drawn in zip(peer.prompts(case), T5X[case][how]):
            for text, score in zip(drawn["texts"], drawn["scores"]):
                size = text.index(peer.CASES[case]) + 1 if peer.CASES[case] in text else len(text)
                got = log_probabilities(prompt, text[:size], Sampling(**given))
                np.testing.assert_allclose(float(got.sum()), score, rtol=2e-5, err_msg=f"{case} {how} {text}")


def test_the_searches_ended_in_every_way():
    """With finished texts and without; before the token limit, and at it."""
    sizes, without = set(), 0
    for case, end in peer.CASES.items():
        for texts in [row["texts"] for how in peer.BEAMS for row in T5X[case][how]]:
            sizes |= {text.index(end) + 1 for text in texts if end in text}
            without += not any(end in text for text in texts)
    assert sizes == {*range(1, peer.NEW + 1)} and without > 20


@pytest.mark.parametrize("case", ["prefix_lm", pytest.param("decoder_only", marks=pytest.mark.heavy)])
def test_greedy_texts_of_the_engine_are_those_of_t5x(case, params_of):
    """A prefix LM attends to its prompt in both directions, in both programs."""
    model, params = params_of(case)
    engine = Engine(model, params, ByteVocabulary(), 32, EngineConfig(slots=2))
    ends, greedy = (peer.CASES[case],), Sampling(temperature=0.0, max_new_tokens=peer.NEW)
    streams = [engine.submit([0, *prompt], greedy, ends=ends) for prompt in peer.prompts(case)]
    for stream, want in zip(streams, T5X[case]["greedy"]):
        text = want["texts"][0]
        assert stream.result().tokens == text[: text.index(ends[0]) if ends[0] in text else None]


@pytest.mark.skipif(not PYTHON, reason="T5X_PYTHON names no python with t5x")
def test_t5x_still_gives_the_recorded_results(tmp_path):
    done = subprocess.run(
        [PYTHON, HERE / "t5x_decoding_peer.py", tmp_path / "now.json"],
        env={name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "XLA_FLAGS")}
        | {"JAX_PLATFORMS": "cpu"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert json.loads((tmp_path / "now.json").read_text()) == T5X
