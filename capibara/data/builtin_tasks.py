"""SeqIO tasks over the Python standard library: the task module of the quickstart, and an example for your own.

Tasks: `python_stdlib` (source code, one module per example) and `python_stdlib_titled` (each module after its name).
Mixture: `python_stdlib_mix`, in a ratio of three to one. The vocabulary is bytes.
"""

from __future__ import annotations

import functools
import os
import sysconfig
from collections.abc import Callable
from typing import Any

import seqio
import tensorflow as tf

from capibara.data.sources.sources import StdlibSource
from capibara.data.text.disk import SPLITS

_OUTPUT_FEATURES = {"targets": seqio.Feature(seqio.ByteVocabulary(), add_eos=True)}


@functools.cache
def _paths(split: str) -> list[str]:
    return StdlibSource().paths(split)


def _modules(split: str, shuffle_files: bool, seed: int | None = None) -> tf.data.Dataset:
    """Examples with `name` and `text`, not shuffled: the task's shuffle buffer holds all of them."""
    del shuffle_files, seed
    paths = _paths(split)
    names = [os.path.relpath(path, sysconfig.get_paths()["stdlib"]) for path in paths]
    examples = tf.data.Dataset.from_tensor_slices({"name": names, "path": paths})
    return examples.map(lambda example: {"name": example["name"], "text": tf.io.read_file(example["path"])})


def _title(examples: tf.data.Dataset) -> tf.data.Dataset:
    """Puts `# name` in front of the text."""
    return examples.map(lambda e: {**e, "text": tf.strings.join(["# ", e["name"], "\n", e["text"]])})


def _register(name: str, *preprocessors: Callable[..., Any]) -> None:
    seqio.TaskRegistry.add(
        name,
        source=seqio.FunctionDataSource(
            dataset_fn=_modules,
            splits=SPLITS,
            num_input_examples={split: len(_paths(split)) for split in SPLITS},
        ),
        preprocessors=[
            *preprocessors,
            functools.partial(seqio.preprocessors.rekey, key_map={"targets": "text"}),
            functools.partial(seqio.preprocessors.tokenize, copy_pretokenized=False),
            seqio.preprocessors.append_eos,
        ],
        output_features=_OUTPUT_FEATURES,
        shuffle_buffer_size=1024,
    )


_register("python_stdlib")
_register("python_stdlib_titled", _title)
seqio.MixtureRegistry.add("python_stdlib_mix", [("python_stdlib", 3.0), ("python_stdlib_titled", 1.0)])
