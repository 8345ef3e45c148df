"""SeqIO tasks and mixtures as a feed: the same documents as the direct feed, exact state, clear mistakes."""

from __future__ import annotations

import collections
import concurrent.futures
import email.utils
import functools
import itertools
import json
import os
import subprocess
import sys
import sysconfig
import textwrap

import numpy as np
import pytest
from etils import epy

from capibara.core.types import BATCH_KEYS, UserError
from capibara.data.dataset import Dataset
from capibara.data.packing.packing import Packing
from capibara.data.pipeline.loader import make_loader, merge_states
from capibara.data.sources.sources import StdlibSource
from capibara.data.tasks import tasks
from capibara.data.tokenizers.vocabulary import ByteVocabulary

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


@pytest.mark.parametrize("most", [40, pytest.param(None, marks=pytest.mark.heavy)])
def test_same_documents_as_the_direct_feed(most):
    task = make_dataset(shuffle=False)
    direct = Dataset(source=StdlibSource(), vocabulary=ByteVocabulary(), length=512, window_rows=8, window_documents=8)
    loaders = [make_loader(d, split="validation", batch_size=4, epochs=1) for d in (task, direct)]
    batches = [list(itertools.islice(loader, most)) for loader in loaders]
    assert len(batches[0]) == most if most else len(batches[0]) > 100
    for loader in loaders:
        loader.close()
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
            assert name["shard"] == 0
            assert vocabulary.decode(ids[segments == segment]) in documents.example(name["example"]).text


@pytest.mark.parametrize("name", [pytest.param("python_stdlib", marks=pytest.mark.heavy), "python_stdlib_mix"])
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


def test_validation_of_a_mixture_takes_every_task_whole():
    documents = StdlibSource().open("validation")
    sizes = [len(documents[i].encode()) + 1 for i in range(len(documents))]
    root = sysconfig.get_paths()["stdlib"]
    titles = [len(f"# {os.path.relpath(path, root)}\n".encode()) for path in StdlibSource().paths("validation")]
    batches = list(make_loader(make_dataset("python_stdlib_mix"), split="validation", batch_size=4, epochs=1))
    assert sum(batch["weights"].sum() for batch in batches) == 2 * sum(sizes) + sum(titles)


@pytest.fixture
def of_tfds(tmp_path):
    """(name of a TFDS dataset) -> registers the task "of_tfds" that reads it from a folder with one prepared dataset."""
    import seqio
    import tensorflow_datasets as tfds

    class CapibaraSquares(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        VERSION = tfds.core.Version("1.0.0")
        pkg_dir_path, code_path = tmp_path, None  # else TFDS looks for the package of this file

        def _info(self):
            texts = {name: tfds.features.Text() for name in ("question", "answer")}
            return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(texts))

        def _split_generators(self, _):
            return {"train": self._generate_examples(40)}

        def _generate_examples(self, count):
            return ((n, {"question": f"{n} squared", "answer": str(n * n)}) for n in range(count))

    CapibaraSquares(data_dir=tmp_path).download_and_prepare()

    def add(name, **splits):
        source = seqio.TfdsDataSource(name, tfds_data_dir=str(tmp_path), **splits)
        keys = functools.partial(seqio.preprocessors.rekey, key_map={"inputs": "question", "targets": "answer"})
        features = {key: seqio.Feature(seqio.ByteVocabulary(), add_eos=True) for key in ("inputs", "targets")}
        preprocessors = [keys, seqio.preprocessors.tokenize, seqio.preprocessors.append_eos]
        seqio.TaskRegistry.add("of_tfds", source=source, preprocessors=preprocessors, output_features=features)

    yield add
    seqio.TaskRegistry.remove("of_tfds")


def test_a_dataset_of_tfds_trains_and_goes_on_exactly(of_tfds):
    of_tfds("capibara_squares:1.0.0", splits={"train": "train[:90%]", "validation": "train[90%:]"})
    packing = {"packing": Packing.NONE, "window_rows": 2, "window_documents": 8}
    dataset = Dataset(mixture_or_task_name="of_tfds", length=32, task_shards=2, **packing)
    whole, _ = read(dataset, 18, hosts=1, batch_size=4)
    _, state = read(dataset, 11, hosts=2, batch_size=4)
    assert_same(read(dataset, 7, hosts=1, state=json.loads(json.dumps(state)), batch_size=4)[0], whole[11:])
    validation = list(make_loader(dataset, split="validation", batch_size=4, epochs=1))
    decode, known = dataset.get_vocabulary().decode, {f"{n} squared{n * n}" for n in range(40)}
    seen, held_out = (
        {decode(row[row > 1]) for one in some for row in one["targets"] if row.any()} for some in (whole, validation)
    )
    assert len(held_out) == 4 and len(seen) > 20 and seen <= known - held_out and held_out <= known


def test_a_dataset_of_tfds_that_is_not_there(of_tfds):
    of_tfds("capibara_cubes:1.0.0")
    with pytest.raises(UserError, match="'of_tfds' has no splits .*capibara_cubes:1.0.0 in .*prepared on this machine"):
        next(make_loader(Dataset(mixture_or_task_name="of_tfds", length=32), batch_size=4))


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


def read(dataset, count: int, *, hosts: int, state=None, **options) -> tuple[list[dict[str, np.ndarray]], dict | None]:
    """Global batches as `hosts` hosts read them, and the merged state after them."""
    shares, states = [], []
    for index in range(hosts):
        loader = make_loader(dataset, shard_index=index, shard_count=hosts, **options)
        if state is not None:
            loader.set_state(json.loads(json.dumps(state)))
        shares.append(list(itertools.islice(loader, count)))
        states.append(loader.get_state())
        loader.close()
    parts = zip(*shares, strict=True)
    return [{key: np.concatenate([part[key] for part in each]) for key in BATCH_KEYS} for each in parts], (
        merge_states(states)
    )


def numbers_of(batches) -> collections.Counter:
    """How often each example of `numbered` is in the batches."""
    return collections.Counter(int(n) for batch in batches for n in batch["targets"].ravel() if n >= 100)


@pytest.fixture
def numbered(register):
    """`numbered` of 48 examples: a number of its own from 100 on, and 0 to 4 fillers."""
    import seqio

    examples = [{"targets": [100 + n, *[50 + n % 7] * (n * 5 % 11 % 5)]} for n in range(48)]
    register("numbered", examples, vocabulary=seqio.PassThroughVocabulary(200, eos_id=1), features=("targets",))
    layout = {"length": 6, "window_rows": 2, "window_documents": 8, "seed": 3}
    return lambda **changes: Dataset(**{"mixture_or_task_name": "numbered", **layout, **changes})


@pytest.mark.parametrize("shards", [*(pytest.param(n, marks=pytest.mark.heavy) for n in (1, 2)), 4])
def test_batches_do_not_depend_on_the_number_of_hosts(numbered, shards):
    dataset = numbered(task_shards=shards)
    whole, state = read(dataset, 8, hosts=1, batch_size=4)
    assert len(state["rows"]) == shards
    for hosts in (2, 4):
        batches, merged = read(dataset, 8, hosts=hosts, batch_size=4)
        assert_same(batches, whole)
        assert merged == state
    ended, _ = read(dataset, 99, hosts=1, batch_size=4, epochs=1)  # as evaluations read: in one stream
    assert numbers_of(ended) == dict.fromkeys(range(100, 148), 1)
    assert_same(read(dataset, 99, hosts=4, batch_size=4, epochs=1)[0], ended)


def test_another_number_of_hosts_goes_on_where_the_others_stopped(numbered):
    dataset = numbered(task_shards=4)
    whole, _ = read(dataset, 21, hosts=1, batch_size=4)
    parts, state = [], None
    for hosts in (2, 4, 1):
        more, state = read(dataset, 7, hosts=hosts, state=state, batch_size=4)
        parts += more
    assert len({tuple(row) for row in state["rows"]}) == 4, "streams that stand alike would hide a mix-up"
    assert_same(parts, whole)


def test_an_epoch_over_2_4_and_1_hosts_has_every_example_once(numbered):
    plain = {"packing": Packing.NONE, "window_rows": 1, "window_documents": 1, "shuffle": False}
    dataset, parts, state = numbered(task_shards=4, **plain), [], None
    for hosts in (2, 4, 1):
        more, state = read(dataset, 2, hosts=hosts, state=state, batch_size=8)
        parts += more
    assert numbers_of(parts) == dict.fromkeys(range(100, 148), 1)


def test_the_rows_of_each_stream_have_an_order_of_their_own(register):
    import seqio

    examples = [{"targets": [100 + n, 60]} for n in range(64)]
    register("in_rows", examples, vocabulary=seqio.PassThroughVocabulary(200, eos_id=1), features=("targets",))
    loader = make_loader(
        Dataset(mixture_or_task_name="in_rows", length=2, window_rows=2, window_documents=32, task_shards=2),
        batch_size=32,
    )
    rows = [
        [(name["shard"], name["example"]) for name in row] for row in loader.documents_after(loader.position)["rows"]
    ]
    first, second = ([number for [(shard, number)] in rows if shard == one] for one in range(2))
    assert sorted(first) == sorted(second) == list(range(16))
    assert first != second


def test_examples_of_few_files_are_dealt_out(tmp_path):
    """Three files for four streams: every stream must meet the examples in the same order, shuffled files or not."""
    import seqio

    for first, last in ((0, 7), (7, 13), (13, 24)):  # no multiples of four: another order would deal out others
        (tmp_path / f"{first}.txt").write_text("".join(f"<{line:02}>\n" for line in range(first, last)))
    steps = [
        lambda lines: lines.map(lambda line: {"targets": line}),
        functools.partial(seqio.preprocessors.tokenize, copy_pretokenized=False),
    ]
    seqio.TaskRegistry.add(
        "few_files",
        source=seqio.TextLineDataSource({"train": str(tmp_path / "*.txt")}),
        preprocessors=steps,
        output_features={"targets": seqio.Feature(seqio.ByteVocabulary(), add_eos=False)},
        shuffle_buffer_size=1,  # only the files are shuffled, so that an epoch can be counted
    )
    plain = {"length": 4, "packing": Packing.NONE, "window_rows": 1, "window_documents": 1}
    orders = set()
    try:
        for seed in range(4):
            dataset = Dataset(mixture_or_task_name="few_files", task_shards=4, seed=seed, **plain)
            rows = [row for batch in read(dataset, 6, hosts=2, batch_size=4)[0] for row in batch["targets"]]
            texts = [ByteVocabulary().decode(row[row > 0]) for row in rows]
            assert sorted(texts) == sorted(f"<{n:02}>" for n in range(24))
            orders.add(tuple(texts))
    finally:
        seqio.TaskRegistry.remove("few_files")
    assert len(orders) > 1


def test_states_of_older_versions(numbered):
    dataset = numbered()
    whole, _ = read(dataset, 10, hosts=1, batch_size=4)
    _, state = read(dataset, 6, hosts=1, batch_size=4)
    del state["settings"]["task_shards"]
    state["settings"]["hosts"] = 1
    assert_same(read(dataset, 4, hosts=2, state=state, batch_size=4)[0], whole[6:])
    with pytest.raises(UserError, match="Dataset.task_shards was 1, is 2"):
        read(numbered(task_shards=2), 1, hosts=1, state=state, batch_size=4)
    state["settings"]["hosts"] = 2
    with pytest.raises(
        UserError, match="number of hosts .2..*start another run from its weights, with Trainer.init_from"
    ):
        read(dataset, 1, hosts=2, state=state, batch_size=4)


def test_shards_that_do_not_divide_are_refused(numbered, register):
    for given in (0, -2):
        with pytest.raises(UserError, match=rf"Dataset.task_shards \({given}\) must be at least 1"):
            numbered(task_shards=given)
    with pytest.raises(UserError, match=r"task_shards \(8\) must divide the 12 rows of a batch.*: try 6"):
        make_loader(numbered(task_shards=8), batch_size=12)
    with pytest.raises(UserError, match=r"task_shards \(4\) must divide the 6 hosts or be a multiple of them: try 3"):
        make_loader(numbered(task_shards=4), batch_size=12, shard_count=6)
    with pytest.raises(UserError, match=r"task_shards \(2\) is only for SeqIO tasks.*leave it out"):
        Dataset(source=StdlibSource(), vocabulary=ByteVocabulary(), task_shards=2)
    register("three", [{"targets": [5]}] * 3, features=("targets",))
    with pytest.raises(UserError, match="'three' has no example for each of its 4 streams.*lower Dataset.task_shards"):
        next(make_loader(Dataset(mixture_or_task_name="three", length=8, task_shards=4), batch_size=4))
    make_loader(numbered(task_shards=8), batch_size=12, epochs=1)  # a pass that ends has one stream


def test_inputs_come_first_and_carry_no_loss(register):
    register("test_pairs", [{"inputs": [5, 6], "targets": [7, 8, 1]}, {"inputs": [], "targets": [9, 1]}])
    dataset = Dataset(mixture_or_task_name="test_pairs", length=8, shuffle=False)
    (batch,) = list(make_loader(dataset, batch_size=1, epochs=1))
    assert batch["targets"].tolist() == [[5, 6, 7, 8, 1, 9, 1, 0]]
    assert batch["tokens"].tolist() == [[0, 5, 6, 7, 8, 0, 9, 0]]
    assert batch["weights"].tolist() == [[0, 0, 1, 1, 1, 1, 1, 0]]
    assert batch["segment_ids"].tolist() == [[1, 1, 1, 1, 1, 2, 2, 0]]


@pytest.mark.parametrize("kind", ["causal", "prefix"])
def test_inputs_and_targets_of_a_decoder_have_lengths_of_their_own(register, kind):
    """Each is trimmed to its own, and a row holds both, as of seqio's DecoderFeatureConverter under T5X."""
    import seqio

    examples = [{"inputs": [*range(5, 5 + n)], "targets": [*range(40, 40 + m), 1]} for n, m in ((3, 9), (9, 2), (6, 4))]
    seen = []

    def given(dataset, sequence_length):
        seen.append(sequence_length)
        return dataset

    register("test_parted", examples, preprocessors=[given])
    lengths = {"inputs": 6, "targets": 4}
    theirs = seqio.get_mixture_or_task("test_parted").get_dataset(lengths, split="train", shuffle=False, num_epochs=1)
    rows = list(seqio.DecoderFeatureConverter(pack=False)(theirs, lengths).as_numpy_iterator())
    plain = {"shuffle": False, "packing": Packing.NONE, "window_rows": 1, "window_documents": 1, "kind": kind}
    dataset = Dataset(mixture_or_task_name="test_parted", length=10, inputs_length=6, **plain)
    batches = list(make_loader(dataset, batch_size=1, epochs=1))
    assert len(batches) == len(rows) == 3 and all(dict(one) == lengths for one in seen)
    for batch, row in zip(batches, rows, strict=True):
        np.testing.assert_array_equal(batch["targets"][0], row["decoder_target_tokens"])
        real = row["decoder_target_tokens"] > 0  # seqio reads the last target where nothing is to be told
        np.testing.assert_array_equal(batch["tokens"][0][real], row["decoder_input_tokens"][real])
        np.testing.assert_array_equal(batch["weights"][0], row["decoder_loss_weights"])
    state = make_loader(dataset, batch_size=1)
    next(state)
    other = make_loader(Dataset(mixture_or_task_name="test_parted", length=10, inputs_length=5, **plain), batch_size=1)
    with pytest.raises(UserError, match="Dataset.inputs_length was 6, is 5"):
        other.set_state(state.get_state())
        next(other)


def test_vocabularies_of_seqio():
    vocabulary = make_dataset().get_vocabulary()
    ours = ByteVocabulary()
    assert vocabulary.fingerprint() == ours.fingerprint()
    assert vocabulary.decode(vocabulary.encode("naïve\n")) == "naïve\n"
    assert vocabulary.encode("naïve") == ours.encode("naïve")


def test_a_sentencepiece_vocabulary_of_seqio(tmp_path):
    import seqio

    from capibara.data.tasks.tasks import SeqioVocabulary
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


def test_start_up_does_not_wait_for_seqio():
    """The loader of a SeqIO task is made, and its vocabulary known, before SeqIO is imported."""
    assert_runs(
        """
        import sys, capibara.data.pipeline.loader as loader, capibara.data.tokenizers.vocabulary as vocabulary
        dataset = loader.Dataset(mixture_or_task_name="python_stdlib", task_module="capibara.data.builtin_tasks",
                                 vocabulary=vocabulary.ByteVocabulary(), length=64)
        assert dataset.get_vocabulary().size == 384
        loader.make_loader(dataset, batch_size=2)
        assert not {"seqio", "tensorflow", "jax", "grain"} & {*sys.modules}
        """
    )


@pytest.mark.heavy
def test_the_accelerators_and_start_up_stay_free():
    """The loader is made, and TensorFlow imported beside JAX, without the main thread waiting or losing devices."""
    assert_runs(
        """
        import sys, capibara.data.pipeline.loader as loader, capibara.data.tokenizers.vocabulary as vocabulary
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


def assert_runs(program):
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, timeout=120)


def test_imports_of_other_threads_are_made_while_those_of_tfds_are_postponed():
    """As those of gcsfs, which opens a checkpoint's files while SeqIO is imported."""
    names = {"__package__": "email"}
    with concurrent.futures.ThreadPoolExecutor(1) as pool, tasks._lazy_imports_of_this_thread(), epy.lazy_imports():
        pool.submit(exec, "from . import utils", names).result()
        import no_such_module  # noqa: F401
    assert names["utils"] is email.utils
