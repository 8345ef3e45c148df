"""SeqIO tasks and mixtures as a feed: the same documents as the direct feed, exact state, clear mistakes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import textwrap

import numpy as np
import pytest

from capibara.data.dataset import Dataset
from capibara.data.loader import make_loader
from capibara.data.sources import StdlibSource
from capibara.data.vocabulary import ByteVocabulary
from capibara.types import BATCH_KEYS, UserError

MODULE = "capibara.data.builtin_tasks"


def make_dataset(name: str = "python_stdlib", **changes) -> Dataset:
    defaults = dict(mixture_or_task_name=name, task_module=MODULE, length=512, window_rows=8, window_documents=8)
    return Dataset(**{**defaults, **changes})


def take(loader, count: int):
    return [next(loader) for _ in range(count)]


def assert_same(first, second) -> None:
    for one, other in zip(first, second, strict=True):
        for key in BATCH_KEYS:
            np.testing.assert_array_equal(one[key], other[key])


def test_same_documents_as_the_direct_feed():
    task = make_dataset(shuffle=False)
    direct = Dataset(source=StdlibSource(), vocabulary=ByteVocabulary(), length=512, window_rows=8, window_documents=8)
    batches = [list(make_loader(d, split="validation", batch_size=4, epochs=1)) for d in (task, direct)]
    assert len(batches[0]) > 100
    assert_same(*batches)


def test_the_documents_of_a_batch_can_be_told_afterwards():
    """Not shuffled, a task's examples are the documents of the source in their order."""
    loader = make_loader(make_dataset(shuffle=False), batch_size=4)
    documents, vocabulary = StdlibSource().open("train"), ByteVocabulary()
    take(loader, 20)
    position = loader.position
    batch = next(loader)
    found = loader.documents_after(position)
    assert found["first_row"] == 0 and len(found["rows"]) == 4
    for ids, segments, names in zip(batch["targets"], batch["segment_ids"], found["rows"], strict=True):
        assert len(names) == segments.max() > 0
        for segment, name in enumerate(names, 1):
            assert name["host"] == 0
            assert vocabulary.decode(ids[segments == segment]) in documents.example(name["example"]).text


@pytest.mark.parametrize("name", ["python_stdlib", "python_stdlib_mix"])
def test_resume_is_exact(name):
    dataset = make_dataset(name)
    loader = make_loader(dataset, batch_size=4)
    whole = take(loader, 40)
    state = loader.get_state()
    more = take(loader, 20)
    loader.close()
    again = make_loader(dataset, batch_size=4)
    assert_same(take(again, 40), whole)
    assert again.get_state() == state
    again.close()
    again.set_state(json.loads(json.dumps(state)))
    assert again.get_state() == state
    assert_same(take(again, 20), more)
    again.close()


def test_hosts_read_different_examples_and_states_stay_theirs():
    dataset = make_dataset()
    loaders = [make_loader(dataset, batch_size=4, shard_index=i, shard_count=2) for i in range(2)]
    first, second = (take(loader, 3) for loader in loaders)
    states = [loader.get_state() for loader in loaders]
    for loader in loaders:
        loader.close()
    assert first[0]["tokens"].shape == (2, 512)
    assert not np.array_equal(first[0]["tokens"], second[0]["tokens"])
    with pytest.raises(UserError, match="rows"):
        loaders[0].set_state(states[1])
    alone = make_loader(dataset, batch_size=4)
    alone.set_state(states[0])
    with pytest.raises(UserError, match="hosts was 2, is 1"):
        next(alone)


def test_validation_of_a_mixture_takes_every_task_whole():
    documents = StdlibSource().open("validation")
    sizes = [len(documents[i].encode()) + 1 for i in range(len(documents))]
    root = sysconfig.get_paths()["stdlib"]
    titles = [len(f"# {os.path.relpath(path, root)}\n".encode()) for path in StdlibSource().paths("validation")]
    batches = list(make_loader(make_dataset("python_stdlib_mix"), split="validation", batch_size=4, epochs=1))
    assert sum(batch["weights"].sum() for batch in batches) == 2 * sum(sizes) + sum(titles)


@pytest.fixture
def register():
    """Registers a task over given examples for the length of a test."""
    import seqio
    import tensorflow as tf

    names = []

    def add(name: str, examples: list[dict], *, vocabulary=None, preprocessors=(), features=("inputs", "targets")):
        def dataset_fn(split, shuffle_files, seed=None):
            signature = {key: tf.TensorSpec([None], tf.int32) for key in features}
            return tf.data.Dataset.from_generator(lambda: iter(examples), output_signature=signature)

        feature = seqio.Feature(vocabulary or seqio.ByteVocabulary(), add_eos=False)
        seqio.TaskRegistry.add(
            name,
            source=seqio.FunctionDataSource(dataset_fn, splits=["train"]),
            preprocessors=list(preprocessors),
            output_features={key: feature for key in features},
            shuffle_buffer_size=10,
        )
        names.append(name)

    yield add
    for name in names:
        seqio.TaskRegistry.remove(name)


def test_inputs_come_first_and_carry_no_loss(register):
    register("test_pairs", [{"inputs": [5, 6], "targets": [7, 8, 1]}, {"inputs": [], "targets": [9, 1]}])
    dataset = Dataset(mixture_or_task_name="test_pairs", length=8, shuffle=False)
    (batch,) = list(make_loader(dataset, batch_size=1, epochs=1))
    assert batch["targets"].tolist() == [[5, 6, 7, 8, 1, 9, 1, 0]]
    assert batch["tokens"].tolist() == [[0, 5, 6, 7, 8, 0, 9, 0]]
    assert batch["weights"].tolist() == [[0, 0, 1, 1, 1, 1, 1, 0]]
    assert batch["segment_ids"].tolist() == [[1, 1, 1, 1, 1, 2, 2, 0]]


def test_vocabularies_of_seqio():
    vocabulary = make_dataset().get_vocabulary()
    ours = ByteVocabulary()
    assert vocabulary.fingerprint() == ours.fingerprint()
    assert vocabulary.decode(vocabulary.encode("naïve\n")) == "naïve\n"
    assert vocabulary.encode("naïve") == ours.encode("naïve")


def test_a_sentencepiece_vocabulary_of_seqio(tmp_path):
    import seqio

    from capibara.data.tasks import SeqioVocabulary
    from capibara.data.train_vocabulary import train_sentencepiece

    documents = StdlibSource().open("validation")
    ours = train_sentencepiece(documents, str(tmp_path / "a.model"), size=400, report=lambda line: None)
    theirs = SeqioVocabulary(vocabulary=seqio.SentencePieceVocabulary(ours.path, extra_ids=10))
    text = "value_7 =  12\n\té"
    assert theirs.encode(text) == ours.encode(text) and theirs.decode(theirs.encode(text)) == text
    assert theirs.size == 512 and (theirs.pad_id, theirs.eos_id, theirs.bos_id) == (0, 1, 0)
    assert theirs.token_bytes()[400:].sum() == 0


def test_mistakes(register):
    with pytest.raises(UserError, match="'python_stdib'.*did you mean python_stdlib"):
        make_dataset("python_stdib").get_vocabulary()
    with pytest.raises(UserError, match="task_module .*'no_such_module'"):
        make_dataset("python_stdlib", task_module="no_such_module.tasks").get_vocabulary()
    with pytest.raises(UserError, match="has no split 'validation'"):
        register("test_train_only", [{"targets": [5]}], features=("targets",))
        next(make_loader(Dataset(mixture_or_task_name="test_train_only", length=8), split="validation", batch_size=1))
    with pytest.raises(UserError, match="differs from the one of SeqIO task"):
        import seqio

        numbers = seqio.PassThroughVocabulary(50, eos_id=1)
        register("test_size", [{"targets": [5]}], vocabulary=numbers, features=("targets",))
        dataset = Dataset(mixture_or_task_name="test_size", vocabulary=ByteVocabulary(), length=8)
        next(make_loader(dataset, batch_size=1))


def test_the_accelerators_and_start_up_stay_free():
    """The loader is made, and TensorFlow imported beside JAX, without the main thread waiting or losing devices."""
    program = textwrap.dedent(
        """
        import sys, capibara.data.loader as loader, capibara.data.vocabulary as vocabulary
        dataset = loader.Dataset(mixture_or_task_name="python_stdlib", task_module="capibara.data.builtin_tasks",
                                 vocabulary=vocabulary.ByteVocabulary(), length=64)
        assert dataset.get_vocabulary().size == 384
        batches = loader.make_loader(dataset, batch_size=2)
        assert "seqio" not in sys.modules and "jax" not in sys.modules and "grain" not in sys.modules
        dataset.preload()
        batches.start()
        import jax, flax.nnx
        assert next(batches)["tokens"].shape == (2, 64)
        import tensorflow as tf
        assert not tf.config.get_visible_devices("GPU") and not tf.config.get_visible_devices("TPU")
        batches.close()
        """
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
