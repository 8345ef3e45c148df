"""Cached SeqIO tasks: a run goes on by position, exactly, whatever the number of hosts."""

from __future__ import annotations

import collections
import itertools
import json
import logging
import os
import pathlib
import random
import subprocess
import zipfile

import numpy as np
import pytest

from capibara.core.types import BATCH_KEYS, UserError
from capibara.data.dataset import CachedOrder, Dataset
from capibara.data.packing.packing import Packing
from capibara.data.pipeline.cached import CachedBlocks
from capibara.data.pipeline.loader import make_loader, merge_states
from capibara.data.pipeline.readers import GROUP
from capibara.data.shards.tfrecord import TfRecords
from capibara.data.tasks import tasks

EXAMPLES = 240


@pytest.fixture
def cache(tmp_path):
    """(preprocessors after the cache) -> changes -> a Dataset of a task that is cached by hand in three files."""
    import seqio
    import tensorflow as tf

    folder = tmp_path / "cached"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for file in range(3):
        with tf.io.TFRecordWriter(f"{seqio.get_cached_tfrecord_prefix(folder, 'train')}-{file:05}-of-00003") as writer:
            for n in range(file, EXAMPLES, 3):
                ids = np.array([100 + n, *[50] * int(rng.integers(0, 5))], np.int32)
                example = {"targets": ids, "domain": f"of {file}", "note": "x" * 60}
                writer.write(seqio.dict_to_tfexample(example).SerializeToString())
    shapes = {"targets": ([None], "int32"), "domain": ([], "string"), "note": ([], "string")}
    features = {name: {"shape": shape, "dtype": dtype} for name, (shape, dtype) in shapes.items()}
    about = {"num_shards": 3, "features": features, "seqio_version": "0.0.18"}
    for path, content in (
        (seqio.get_cached_info_path(folder, "train"), about),
        (seqio.get_cached_stats_path(folder, "train"), {"examples": EXAMPLES}),
    ):
        with open(path, "w") as file:
            json.dump(content, file)
    (folder / "COMPLETED").touch()

    def source(split, shuffle_files, seed=None):
        raise AssertionError("the source of a cached task is not read")

    def add(*after):
        seqio.TaskRegistry.add(
            "cached",
            source=seqio.FunctionDataSource(source, splits=["train"]),
            preprocessors=[seqio.CacheDatasetPlaceholder(), *after],
            output_features={"targets": seqio.Feature(seqio.PassThroughVocabulary(600, eos_id=1), add_eos=False)},
            shuffle_buffer_size=50,
        )
        seqio.MixtureRegistry.add("cached_mix", [("cached", 1.0)])
        given = {"mixture_or_task_name": "cached", "use_cached": True, "cache_dirs": (str(tmp_path),), "length": 6}
        return lambda **changes: Dataset(**{**given, "window_rows": 2, "window_documents": 8, "seed": 3, **changes})

    yield add
    seqio.set_global_cache_dirs([])
    seqio.TaskRegistry.remove("cached")
    seqio.MixtureRegistry.remove("cached_mix")


def noise():
    """A preprocessor that draws an id for the end of each example."""
    import seqio
    import tensorflow as tf

    @seqio.map_over_dataset(num_seeds=1)
    def draw(example, seed):
        drawn = tf.random.stateless_uniform([1], seed, 10, 50, tf.int32)
        return {**example, "targets": tf.concat([example["targets"], drawn], 0)}

    return draw


def no_thirds(examples):
    return examples.filter(lambda example: example["targets"][0] % 3 != 0)


def read(dataset, count: int, *, hosts: int = 1, state=None, batch_size: int = 4, **options):
    """Global batches as `hosts` hosts read them, and the merged state after them."""
    shares, states = [], []
    for index in range(hosts):
        loader = make_loader(dataset, batch_size=batch_size, shard_index=index, shard_count=hosts, **options)
        if state is not None:
            loader.set_state(json.loads(json.dumps(state)))
        shares.append(list(itertools.islice(loader, count)))
        states.append(loader.get_state())
        loader.close()
    parts = zip(*shares, strict=True)
    joined = [{key: np.concatenate([part[key] for part in each]) for key in each[0]} for each in parts]
    return joined, merge_states(states)


def assert_same(first, second) -> None:
    for one, other in zip(first, second, strict=True):
        for key in BATCH_KEYS:
            np.testing.assert_array_equal(one[key], other[key])


def counted(batches) -> collections.Counter:
    return collections.Counter(int(n) for batch in batches for n in batch["targets"].ravel() if n >= 100)


def test_runs_go_on_by_position_over_any_number_of_hosts(cache, monkeypatch, caplog):
    dataset = cache(noise())(task_shards=4)
    whole, _ = read(dataset, 160)
    reads, records = [], TfRecords.records
    monkeypatch.setattr(TfRecords, "records", lambda self, *bounds: reads.append(bounds) or records(self, *bounds))
    state, read_before = read(dataset, 130, hosts=2)[1], len(reads)
    assert state["settings"]["cached_order"] == "blocks"
    caplog.set_level(logging.WARNING)
    parts = []
    for hosts in (4, 1, 2):
        reads.clear()
        more, state = read(dataset, 10, hosts=hosts, state=state)
        parts += more
        assert 0 < len(reads) <= 4 * 4 * 3, "of each stream the group at hand, the next, and perhaps one more"
        assert len(reads) < read_before, "what is before the position is read"
    assert_same(parts, whole[130:])
    assert not [record for record in caplog.records if "resumes" in record.message]


@pytest.mark.heavy
def test_groups_and_streams_have_seeds_and_orders_of_their_own(cache):
    dataset = cache(noise())(task_shards=4, shuffle=False)  # else their orders alone would make a difference
    task = tasks.get("cached")
    read(dataset, 1)  # knows the folder of the cache
    blocks = CachedBlocks(task, dataset, "train", {"targets": 6}, any_steps=False)
    for starts in ([(0, group * GROUP) for group in range(4)], [(stream, 0) for stream in range(4)]):
        found = [[example["targets"] for _, example in itertools.islice(blocks.read(*start), 30)] for start in starts]
        assert len({tuple(int(ids[-1]) for ids in one) for one in found}) == 4, "the same noise"
        assert len({frozenset(int(ids[0]) for ids in one) for one in found}) == 4, "the same examples"
    again = [example["targets"].tolist() for _, example in itertools.islice(blocks.read(0, 3 * GROUP + 10), 20)]
    assert again == [example["targets"].tolist() for _, example in itertools.islice(blocks.read(0, 3 * GROUP), 30)][10:]


@pytest.mark.parametrize("shuffle", [pytest.param(False, marks=pytest.mark.heavy), True])
def test_every_example_comes_as_often_as_the_others(cache, shuffle):
    plain = {"packing": Packing.NONE, "window_rows": 1, "window_documents": 1}
    dataset = cache()(shuffle=shuffle, length=5, **plain)
    batches, _ = read(dataset, EXAMPLES // 4)
    if not shuffle:
        assert counted(batches) == dict.fromkeys(range(100, 100 + EXAMPLES), 1)
    else:
        first = [int(n) for batch in batches for n in batch["targets"][:, 0]]
        assert first != sorted(first)
    more = counted(read(dataset, 4 * EXAMPLES // 4)[0])
    assert set(more) == set(range(100, 100 + EXAMPLES)) and max(more.values()) - min(more.values()) <= 2


def test_examples_are_those_that_seqio_reads(cache):
    dataset = cache(noise())(domains=("of 1",), shuffle=False, packing=Packing.NONE, window_rows=1, window_documents=1)
    batches, _ = read(dataset, EXAMPLES // 4)
    passed, _ = read(dataset, EXAMPLES, epochs=1)  # a pass that ends is SeqIO's own

    def found(batches):
        return {tuple(row[: (segment > 0).sum() - 1]) for batch in batches
                for row, segment in zip(batch["targets"], batch["segment_ids"], strict=True)}  # fmt: skip

    assert counted(batches) == counted(passed) and found(batches) == found(passed)


def test_the_blocks_of_a_document_can_be_told(cache):
    loader = make_loader(cache()(), batch_size=4)
    told = loader.documents_after(loader.position)
    [name, *_] = told["rows"][0]
    assert name["shard"] == 0 and len(name["blocks"]) == 4 and name["blocks"][0].startswith("train.tfrecord-0000")


@pytest.mark.heavy
def test_preprocessors_that_do_not_only_map_have_seqios_order_unless_asked(cache, caplog):
    dataset = cache(no_thirds)
    _, state = read(dataset(), 20)
    assert state["settings"]["cached_order"] == "seqio"
    read(dataset(), 1, state=state)
    assert "all before it again (its preprocessors after the cache change the number of examples" in caplog.text
    caplog.clear()
    asked = dataset(cached_order=CachedOrder.BLOCKS)
    whole, _ = read(asked, 60)
    _, state = read(asked, 41)
    assert_same(read(asked, 19, state=state)[0], whole[41:])
    assert state["settings"]["cached_order"] == "blocks" and "all before it again" not in caplog.text


def test_states_in_seqios_order_go_on_in_it(cache):
    dataset = cache(noise())
    seqio_order = dataset(cached_order=CachedOrder.SEQIO)
    whole, _ = read(seqio_order, 20)
    _, state = read(seqio_order, 12)
    del state["settings"]["cached_order"], state["settings"]["task_shards"]  # as older versions wrote it
    state["settings"]["hosts"] = 1
    assert_same(read(seqio_order, 8, state=state)[0], whole[12:])
    for name, sources in (("cached", ["cached"]), ("cached_mix", ["cached"])):
        seqio_order = dataset(mixture_or_task_name=name, cached_order=CachedOrder.SEQIO)
        _, of_cache = read(seqio_order, 1)
        assert [*of_cache["settings"]["data"]["sources"]] == sources
        of_cache["settings"]["data"]["sources"]["cached"] = {"examples": None, "shards": "of an older version"}
        read(seqio_order, 1, state=of_cache)
        of_cache["settings"]["data"]["sources"]["cached"] = {"cache": "another"}
        with pytest.raises(UserError, match="Dataset.source's .or task's. data"):
            read(seqio_order, 1, state=of_cache)
    with pytest.raises(UserError, match="Dataset.cached_order was 'seqio', is 'blocks'.*set these back"):
        read(dataset(), 1, state=state)


def test_a_cache_that_is_not_there_or_not_whole(cache, tmp_path):
    dataset = cache()
    with pytest.raises(UserError, match="'cached_mix'.*a mixture draws its examples from several tasks: leave it out"):
        read(dataset(mixture_or_task_name="cached_mix", cached_order=CachedOrder.BLOCKS), 1)
    path = sorted(tmp_path.glob("cached/train.tfrecord-*"))[2]
    whole = path.read_bytes()
    path.write_bytes(whole[:-7])
    with pytest.raises(UserError, match="is cut short"):
        read(dataset(), 1)
    with pytest.raises(UserError, match="train.tfrecord-00002-of-00003 is cut short"):
        read(dataset(mixture_or_task_name="cached_mix"), 60)  # in SeqIO's order it shows when it is read
    path.write_bytes(whole[:30] + bytes([whole[30] ^ 255]) + whole[31:])
    with pytest.raises(UserError, match="train.tfrecord-00002-of-00003 is .*corrupted, at byte 0 .*checksum.*again"):
        read(dataset(mixture_or_task_name="cached_mix"), 60)
    with pytest.raises(UserError, match="train.tfrecord-00002-of-00003 is .*corrupted, at byte 0 .*checksum.*again"):
        read(dataset(), 60)
    path.unlink()
    for name in ("cached", "cached_mix"):
        with pytest.raises(UserError, match="train.tfrecord-00002-of-00003 is missing in .*, which has 2 of 3 files"):
            read(dataset(mixture_or_task_name=name), 1)
    (tmp_path / "cached" / "COMPLETED").unlink()
    import seqio

    seqio.TaskRegistry.get("cached")._cache_dir = None  # it keeps where it has found it
    with pytest.raises(UserError, match=f"no COMPLETED in .*{tmp_path}/cached.*seqio_cache_tasks.*Dataset.cache_dirs"):
        read(dataset(), 1)


def test_all_flipped_bits_of_a_cache_that_is_read_in_blocks_are_told(cache, tmp_path):
    dataset = cache()()
    task = tasks.get("cached")
    read(dataset, 1)  # knows the folder of the cache
    path = sorted(tmp_path.glob("cached/train.tfrecord-*"))[1]
    content, chosen = path.read_bytes(), random.Random(0)

    def read_all():
        blocks = CachedBlocks(task, dataset, "train", {"targets": 6}, any_steps=False)
        return [record for block in range(len(blocks._index.blocks)) for record in blocks._records(block)]

    assert len(read_all()) == EXAMPLES
    for at in chosen.sample(range(len(content)), 40):
        changed = bytearray(content)
        changed[at] ^= 1 << chosen.randrange(8)
        path.write_bytes(changed)
        with pytest.raises(UserError, match=r"train.tfrecord-00001-of-00003 is .* at byte [0-9,]+.*: copy it again$"):
            read_all()


@pytest.mark.parametrize("name", ["cached", "cached_mix"])
def test_a_cache_of_something_else(cache, tmp_path, name):
    dataset, path = cache(), tmp_path / "cached" / "info.train.json"
    about = json.loads(path.read_text())
    for feature, told in (
        (None, r"has no feature 'targets' after its preprocessors \(it has: domain, note\)"),
        ("float32", "the feature 'targets' of its cache is float32, must be int32"),
    ):
        features = {key: value for key, value in about["features"].items() if key != "targets"}
        if feature is not None:
            features["targets"] = {"shape": [None], "dtype": feature}
        path.write_text(json.dumps({**about, "features": features}))
        with pytest.raises(UserError, match=f"SeqIO task 'cached'.*{told}.*write the cache again"):
            read(dataset(mixture_or_task_name=name), 1)
    path.write_text("{}")
    with pytest.raises(UserError, match="info.train.json cannot be read .*write the cache again"):
        read(dataset(mixture_or_task_name=name), 1)
    path.rename(path.with_name("info.test.json"))
    with pytest.raises(UserError, match=r"'cached' in .* has no split 'train' \(it has: test\): write it again"):
        read(dataset(mixture_or_task_name=name), 1)


def by_seqio(folder, name="by_seqio", **changes):
    """A Dataset of a task that seqio_cache_tasks cached in `folder`."""
    given = {"mixture_or_task_name": name, "task_module": "cached_by_seqio", "cache_dirs": (str(folder),)}
    given |= {
        "use_cached": True,
        "kind": "encoder_decoder",
        "encoder_length": 24,
        "length": 24,
        "packing": Packing.NONE,
    }
    return Dataset(**{**given, "window_rows": 2, "window_documents": 8, **changes})


def assert_the_tools_cache_trains(folder) -> None:
    """A task, by blocks, and a mixture go on exactly; the examples are those that the task has without its cache."""
    import seqio

    def texts(batches):
        rows = [(batch["encoder_tokens"], batch["targets"]) for batch in batches]
        decode = tasks.vocabulary_of(tasks.get("by_seqio")).decode
        return {
            (decode(a[a > 1]), decode(b[b > 1])) for inputs, targets in rows for a, b in zip(inputs, targets) if b.any()
        }

    for name, order in (("by_seqio", "blocks"), ("by_seqio_mix", "seqio")):
        dataset = by_seqio(folder, name)
        whole, _ = read(dataset, 30)
        _, state = read(dataset, 19, hosts=2)
        assert state["settings"]["cached_order"] == order
        assert_same(read(dataset, 11, state=state)[0], whole[19:])
        known = {(f"train {n}", f"squared {n * n}") for n in range(60)}
        assert texts(whole) == known if order == "blocks" else len(texts(whole) & known) > 20 and texts(whole) <= known
        passed, _ = read(dataset, 2 if name == "by_seqio_mix" else 1, split="validation", epochs=1)
        assert texts(passed) == {(f"validation {n}", f"squared {n * n}") for n in range(3)}
    seqio.set_global_cache_dirs([])


@pytest.fixture
def task_folder(monkeypatch):
    """The folder of the module cached_by_seqio, whose tasks forget their caches."""
    folder = pathlib.Path(__file__).parents[1]
    monkeypatch.syspath_prepend(str(folder))
    yield folder
    import seqio

    seqio.set_global_cache_dirs([])
    for name in ("by_seqio", "by_seqio_too"):
        seqio.TaskRegistry.get(name)._cache_dir = None


def test_a_cache_that_seqio_cache_tasks_wrote_trains(task_folder, tmp_path):
    zipfile.ZipFile(task_folder / "cached_by_seqio.zip").extractall(tmp_path)
    assert_the_tools_cache_trains(tmp_path)


@pytest.mark.heavy
def test_a_cache_made_now_trains(task_folder, tmp_path):
    """BEAM_PYTHON is a python whose environment has seqio_cache_tasks, apache-beam and google-crc32c."""
    if (python := os.environ.get("BEAM_PYTHON")) is None:
        pytest.skip("BEAM_PYTHON names no python with apache-beam")
    tool = [python, "-m", "seqio.scripts.cache_tasks_main", "--module_import=cached_by_seqio", "--tasks=by_seqio.*"]
    environment = {**os.environ, "PYTHONPATH": str(task_folder)}
    subprocess.run(
        [*tool, "--min_shards=4", f"--output_cache_dir={tmp_path}"], env=environment, check=True, timeout=500
    )
    assert_the_tools_cache_trains(tmp_path)


def test_a_stream_without_examples_ends_the_run(cache):
    dataset = cache(lambda examples: examples.filter(lambda example: example["targets"][0] < 0))
    with pytest.raises(UserError, match="stream 0 of its cache has no example"):
        read(dataset(cached_order=CachedOrder.BLOCKS), 1)
