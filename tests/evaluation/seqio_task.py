"""A SeqIO task whose metrics the test knows by heart."""

import functools

import numpy as np
import seqio
import tensorflow as tf

VOCABULARY = seqio.ByteVocabulary()
TEXTS = [("1+1=", "2"), ("a", "bc"), ("x y", "z")]


def _examples(split, shuffle_files, seed=None):
    return tf.data.Dataset.from_tensor_slices({"inputs": [a for a, _ in TEXTS], "targets": [b for _, b in TEXTS]})


def lengths(targets, predictions):
    return {
        "length": float(np.mean([len(text) for text in predictions])),
        "targets": "|".join(targets) == "<2>|<bc>|<z>",
    }


def scored(targets, scores):
    return {"score": seqio.metrics.Scalar(float(np.sum(scores)))}


FAULTS = []  # what `faulty` gives or raises, one for each call; then it works


def faulty(targets, predictions):
    fault = FAULTS.pop(0) if FAULTS else 3.0
    if isinstance(fault, Exception):
        raise fault
    return {"faulty": fault, "count": 3}


def bracketed(text, is_target, **_):
    return f"<{text}>" if is_target else text


def add(name, metric_fns, splits=("validation",)):
    seqio.TaskRegistry.add(
        name,
        source=seqio.FunctionDataSource(_examples, splits=splits, num_input_examples=dict.fromkeys(splits, 3)),
        preprocessors=[functools.partial(seqio.preprocessors.tokenize, copy_pretokenized=False)],
        postprocess_fn=bracketed,
        metric_fns=metric_fns,
        output_features={name: seqio.Feature(VOCABULARY, add_eos=False) for name in ("inputs", "targets")},
    )


add("sums", [lengths, scored])
add("unjudged", [])
add("lengths", [lengths], ("train", "validation"))
add("faulty", [faulty], ("train", "validation"))
add("scores", [scored], ("train", "validation"))
add("trained_only", [scored], ("train",))
seqio.MixtureRegistry.add("judged", ["lengths", "scores", "trained_only"], default_rate=1.0)
