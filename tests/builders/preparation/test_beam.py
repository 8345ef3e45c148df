"""Beam writes the bytes of the local build: the DirectRunner, with several processes, and the DaskRunner on a cluster.

BEAM_PYTHON names a python with apache-beam[dask] and capibara's extra `builders`; None: the one that runs the tests. Without
either the steps run in this process, connected as on Beam.
"""

import dataclasses
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import types

import pytest

from capibara.builders.preparation import beam
from capibara.builders.preparation.filters import DatatroveFilter
from capibara.builders.preparation.near import NearDuplicates
from capibara.builders.preparation.settings import CorpusPreparation
from capibara.data.packing.packing import Packing
from tests.builders.preparation import corpora, fake_beam
from tests.builders.preparation.test_build import files, prepare

PYTHON = os.environ.get("BEAM_PYTHON") or (sys.executable if importlib.util.find_spec("apache_beam") else "")
FEW = CorpusPreparation(length=256, part_bytes=20_000, shard_parts=2, near=NearDuplicates(bands=6, rows=4))
OTHERS = {
    "keys": dataclasses.replace(FEW, near=NearDuplicates(bands=6, rows=4, similarity=0.0)),
    "all": dataclasses.replace(FEW, near=None),
    "filtered": dataclasses.replace(
        FEW, filters=(DatatroveFilter(name="RegexFilter", options={"regex_exp": "^mo"}),), packing=Packing.CONCAT
    ),
}
ROOT = pathlib.Path(__file__).parents[3]
needs_beam = pytest.mark.skipif(not PYTHON, reason="BEAM_PYTHON names no python with apache-beam")

_DASK = """
import sys
from capibara.builders.preparation import beam
from tests.builders.preparation.test_beam import FEW

if __name__ == "__main__":
    import distributed

    cluster = distributed.LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None)
    with cluster, distributed.Client(cluster) as client:
        pids = client.run(__import__("os").getpid)
        address = f"--dask_client_address={cluster.scheduler_address}"
        beam.prepare([sys.argv[1]], sys.argv[2], FEW, "DaskRunner", [address])
        done = client.run(lambda dask_worker: len(dask_worker.state.tasks) + dask_worker.state.executed_count)
    print(len({*pids.values()}), min(done.values()))
"""


_OTHERS = """
import sys
from capibara.builders.preparation import beam
from tests.builders.preparation.test_beam import OTHERS

if __name__ == "__main__":
    for name, settings in OTHERS.items():
        beam.prepare([sys.argv[1]], f"{sys.argv[2]}/{name}", settings, "DirectRunner", [])
"""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return corpora.write_corpus(tmp_path_factory.mktemp("corpus") / "in")


@pytest.fixture(scope="module")
def expected(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("expected") / "out"
    prepare(corpus, out, FEW)
    return files(out)


def run(*command):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [PYTHON, *map(str, command)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("name", ["few", *OTHERS])
def test_the_steps_of_the_pipeline_write_the_same_bytes(corpus, tmp_path, monkeypatch, name):
    options = types.SimpleNamespace(PipelineOptions=list)
    monkeypatch.setitem(sys.modules, "apache_beam", fake_beam)
    monkeypatch.setitem(sys.modules, "apache_beam.options.pipeline_options", options)
    settings = {"few": FEW, **OTHERS}[name]
    found = beam.prepare([str(corpus)], str(tmp_path / "out"), settings, "FlinkRunner", ["--flink_master=host:8081"])
    assert fake_beam.Pipeline.options[-1] == ["--runner=FlinkRunner", "--flink_master=host:8081"]
    assert found == prepare(corpus, tmp_path / "here", settings) and found.counts["kept"] > 20
    assert files(tmp_path / "out") == files(tmp_path / "here")


@needs_beam
def test_the_direct_runner_with_processes_writes_the_same_bytes(corpus, expected, tmp_path):
    settings = [
        f"--gin.CorpusPreparation.{name}={getattr(FEW, name)}" for name in ("length", "part_bytes", "shard_parts")
    ]
    settings += [
        "--gin.NearDuplicates.bands=6",
        "--gin.NearDuplicates.rows=4",
        "--gin.CorpusPreparation.near=@NearDuplicates()",
    ]
    arguments = [corpus, f"--out={tmp_path / 'out'}", "--runner=DirectRunner", "--num_workers=2", "--json", *settings]
    printed = run("-m", "capibara.prepare", "corpus", *arguments)
    assert json.loads(printed)["counts"]["kept"] == 61 and files(tmp_path / "out") == expected


@needs_beam
def test_a_cluster_of_dask_writes_the_same_bytes(corpus, expected, tmp_path):
    (tmp_path / "program.py").write_text(_DASK)
    processes, least_done = map(int, run(tmp_path / "program.py", corpus, tmp_path / "out").split())
    assert processes == 2 and least_done > 0 and files(tmp_path / "out") == expected


@needs_beam
def test_other_settings_write_the_same_bytes(corpus, tmp_path):
    (tmp_path / "program.py").write_text(_OTHERS)
    run(tmp_path / "program.py", corpus, tmp_path)
    for name, settings in OTHERS.items():
        prepare(corpus, tmp_path / f"{name}_here", settings)
        assert files(tmp_path / name) == files(tmp_path / f"{name}_here"), name
