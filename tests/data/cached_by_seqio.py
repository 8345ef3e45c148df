"""Tasks whose caches the real seqio_cache_tasks wrote: cached_by_seqio.zip.

In an environment with apache-beam, seqio and google-crc32c, in this folder:
    seqio_cache_tasks --module_import=cached_by_seqio --tasks='by_seqio.*' --min_shards=4 --output_cache_dir=FOLDER
"""

import seqio
import tensorflow as tf

COUNTS = {"train": 60, "validation": 3}  # of which one of the four files is empty


def _examples(split, shuffle_files, seed=None):
    numbers = tf.data.Dataset.range(COUNTS[split])
    text = lambda n, before: tf.strings.join([before, tf.strings.as_string(n)])  # noqa: E731
    return numbers.map(lambda n: {"inputs": text(n, f"{split} "), "targets": text(n * n, "squared ")})


for _name in ("by_seqio", "by_seqio_too"):
    seqio.TaskRegistry.add(
        _name,
        source=seqio.FunctionDataSource(_examples, splits=tuple(COUNTS), num_input_examples=COUNTS),
        preprocessors=[seqio.preprocessors.tokenize, seqio.CacheDatasetPlaceholder(), seqio.preprocessors.append_eos],
        output_features={name: seqio.Feature(seqio.ByteVocabulary(), add_eos=True) for name in ("inputs", "targets")},
    )
seqio.MixtureRegistry.add("by_seqio_mix", [("by_seqio", 3.0), ("by_seqio_too", 1.0)])
