"""Texts that T5X itself generates with its networks: the peer program of test_t5x_decoding.py.

Run in an environment with T5X (github.com/google-research/t5x):
        python tests/interop/t5x_decoding_peer.py FILE    writes texts and scores as JSON:
        tests/interop/t5x_decoding.json
"""

from __future__ import annotations

import json
import pathlib
import sys

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import t5x_peer  # noqa: E402

NEW = 10  # tokens of a text
SHARPER = 3.0  # the factor on t5x_peer's norms
# Case -> the id that ends its texts: one with enough probability.
CASES = {"t5": 54, "t5_1_1": 41, "scalable_t5": 2, "decoder_only": 59, "prefix_lm": 28}
BEAMS = {  # name -> arguments of beam_search
    "k1": dict(num_decodes=1, alpha=0.6),
    "k2_a0": dict(num_decodes=2, alpha=0.0),
    "k4": dict(num_decodes=4, alpha=0.6),
    "k4_a2": dict(num_decodes=4, alpha=2.0),
    "k7_min": dict(num_decodes=7, alpha=1.0, min_log_prob=-6.0),
    "k9_a8": dict(num_decodes=9, alpha=8.0),
}
GREEDY = dict(num_decodes=1, temperature=0.0, topk=0)  # of temperature_sample
DRAWN = {  # name -> arguments of temperature_sample, for two of the cases
    "topk": dict(num_decodes=3, temperature=0.7, topk=5),
    "topp": dict(num_decodes=4, temperature=1.3, topk=0, topp=0.8),
    "all": dict(num_decodes=2, temperature=1.5, topk=0),
}
DRAWING, SEED = ("t5", "decoder_only"), 5
_drawn = t5x_peer.drawn


def drawn(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """A parameter as in training, scaled so that the texts differ more, and end."""
    value = _drawn(name, shape)
    return value * np.float32(SHARPER) if name.endswith("decoder_norm/scale") else value


def is_decoder(case: str) -> bool:
    return t5x_peer.CASES[case][0] == "decoder_only"


def prompts(case: str) -> list[list[int]]:
    """The prompts, of several lengths: an encoder's inputs, or a decoder's after the beginning token."""
    rng = np.random.default_rng(3)
    return [rng.integers(2, 64, size).tolist() for size in ((9, 4) if is_decoder(case) else (9, 4, 12))]


def batches(case: str) -> list[dict[str, np.ndarray]]:
    """Each prompt alone: in a batch a search of T5X continues until its slowest row ends."""
    found, longest = [], max(map(len, prompts(case)))
    for prompt in prompts(case):
        if is_decoder(case):
            read = np.zeros((1, len(prompt) + NEW), np.int32)
            read[0, 1 : len(prompt) + 1] = prompt
            inputs = (np.arange(read.shape[1]) <= len(prompt)).astype(np.int32)[None]
            found.append({"decoder_input_tokens": read, "decoder_causal_attention": inputs})
        else:
            encoder = np.array([prompt + [0] * (longest - len(prompt))], np.int32)
            found.append({"encoder_input_tokens": encoder, "decoder_input_tokens": np.zeros((1, NEW), np.int32)})
    return found


def generated(case: str) -> dict:
    import jax
    from t5x import decoding

    t5x_peer.drawn = drawn
    try:
        _, state = t5x_peer.begun(case)
    finally:
        t5x_peer.drawn = _drawn
    found: dict = {}
    for how, options in (BEAMS | {"greedy": GREEDY} | (DRAWN if case in DRAWING else {})).items():
        function = decoding.beam_search if how in BEAMS else decoding.temperature_sample
        rng = jax.random.PRNGKey(SEED) if how in DRAWN else None
        model, options, rows = t5x_peer.model_of(case, decode_fn=function), dict(options), []
        count = options.pop("num_decodes")
        predict = jax.jit(
            lambda params, batch: model.predict_batch_with_aux(
                params,
                batch,
                rng,
                decoder_params=dict(options, eos_id=CASES[case]),
                num_decodes=count,
                return_all_decodes=True,
            )
        )
        for batch in batches(case):
            texts, aux = predict(state.params, batch)
            scores = [t5x_peer.rounded(row) for row in np.asarray(aux["scores"])]
            texts = np.asarray(texts)[..., :NEW].tolist()
            rows += [{"texts": own, "scores": of} for own, of in zip(texts, scores)]
        found[how] = rows
    return found


if __name__ == "__main__":
    answers = {case: generated(case) for case in CASES}
    text = json.dumps(answers, separators=(",", ":"))
    pathlib.Path(sys.argv[1]).write_text(text.replace('],"', '],\n"').replace("}],", "}],\n") + "\n")
