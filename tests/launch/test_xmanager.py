"""launch/xm_launch.py: the commands of its work units, and all of it with XManager itself.

XMANAGER_PYTHON names the python that has xmanager==0.8.5.post1; the work units run with the python of the tests.
"""

from __future__ import annotations

import os
import pathlib
import re
import shlex
import shutil
import signal
import sqlite3
import subprocess
import sys
import time

import pytest

from capibara.cli import launch
from capibara.multihost import exits

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "launch" / "xm_launch.py"
PAGE = (ROOT / "docs" / "xmanager.md").read_text()
PYTHON = os.path.abspath(shutil.which(named) or named) if (named := os.environ.get("XMANAGER_PYTHON")) else None
with_xmanager = pytest.mark.skipif(not PYTHON, reason="XMANAGER_PYTHON names no python with XManager")
T5X = (
    "name run_mode clone_github copybara_config copybara_workflow copybara_origin tpu_cores model_dir tfds_data_dir "
    "seqio_additional_cache_dirs project_dirs pip_install"
).split()
RUN = """
include "runs/pretrain.gin"
include "models/tiny.gin"
include "tasks/stdlib.gin"
MODEL_DIR = "runs/mine"
TRAIN_STEPS = 2
BATCH_SIZE = 4
LENGTH = 64
LEARNING_RATE = 1e-3
"""
JOB = ("--storage=gs://bucket/folder", "--image=registry/capibara:1", "--poll=0.1")


@pytest.fixture(autouse=True)
def cwd(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))  # of XManager's database
    monkeypatch.setenv("CAPIBARA_STATE", str(tmp_path / "jobs.sqlite"))
    (tmp_path / "run.gin").write_text(RUN)
    return tmp_path


def printed(*argv):
    """What --print_commands does with a command line, here without XManager."""
    command = [sys.executable, str(SCRIPT), "--print_commands", *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def commands(*argv):
    """The variables and the arguments of `capibara launch` of each work unit."""
    done = printed(*argv)
    assert done.returncode == 0, done.stderr
    found = []
    for line in done.stdout.splitlines():
        words = shlex.split(line)
        start = words.index("capibara.launch")
        assert words[start - 2 : start] == [sys.executable, "-m"]
        found.append((words[: start - 2], words[start + 1 :]))
    return found


def test_a_run_on_this_machine_has_the_flags_as_they_were_written():
    passed = [
        "--emulate=8",
        "--start_over",
        "--gin.TRAIN_STEPS=-3",
        '--gin.A="b c"',
        "--gin.s/X.y=(1, 2)",
        "--notes=no",
    ]
    assert commands("--gin_file=run.gin,more.gin", *passed) == [([], ["local", "run.gin", "more.gin", *passed])]


def test_flags_of_t5x_become_capibaras(tmp_path):
    (tmp_path / "project").mkdir()
    flags = ["--gin_file=run.gin", "--project_dirs=project", "--seqio_additional_cache_dirs=gs://a,gs://b"]
    flags += ["--tfds_data_dir=gs://tfds", "--model_dir=gs://runs/one"]
    made = [f"--gin_search_paths={tmp_path}", '--gin.Dataset.cache_dirs=("gs://a", "gs://b",)']
    folder = '--gin.MODEL_DIR="gs://runs/one"'
    assert commands(*flags) == [(["TFDS_DATA_DIR=gs://tfds"], ["local", "run.gin", *made, folder])]
    data = "--env=TFDS_DATA_DIR=gs://tfds"
    job = ["gke", "run.gin", *made, data, folder, "--name=mine"]
    assert commands(*flags, "--where=kubernetes", "--name=mine") == [([], job)]


def test_modes_of_t5x_are_verbs():
    (evaluated,) = commands("--run_mode=eval", "--model_dir=runs/one", "--restarts=0", "--task=copa")
    assert evaluated == ([], ["local", "--restarts=0", "--", "evaluate", "--task=copa", "--model_dir=runs/one"])
    (inferred,) = commands("--run_mode=infer", "--gin_file=run.gin", "--model_dir=runs/one", "--prompt=a b")
    wanted = ["--prompt=a b", "--model_dir=runs/one", "--gin_file=run.gin"]
    assert inferred == ([], ["local", "--", "infer", *wanted])


def test_a_sweep_makes_a_work_unit_with_a_name_and_a_folder_for_each_combination():
    flags = ["--where=vertex", f"--gin_file={'Long_' * 10}.gin", "--model_dir=gs://b/sweep/"]
    made = commands(*flags, "--sweep=A = 1e-3,'x,y'", "--sweep=B=[(1, 2), [3, '[']]")
    names = [f"{'long-' * 7}lon-{number}" for number in range(1, 5)]
    assert [arguments[-1] for _, arguments in made] == [f"--name={name}" for name in names]
    assert [arguments[-2] for _, arguments in made] == [f'--gin.MODEL_DIR="gs://b/sweep/{name}"' for name in names]
    values = [("1e-3", "(1, 2)"), ("1e-3", "[3, '[']"), ("'x,y'", "(1, 2)"), ("'x,y'", "[3, '[']")]
    assert [arguments[2:4] for _, arguments in made] == [[f"--gin.A={a}", f"--gin.B={b}"] for a, b in values]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--emulate=8",), "--gin_file is not set"),
        (
            ("--gin_file=a", "--where=moon"),
            "--where=moon must be one of local, gce, gke, slurm, ssh, vertex, kubernetes",
        ),
        (("--gin_file=a", "--run_mode=test"), "--run_mode=test must be one of train, eval, infer"),
        (("--gin_file=a", "--run_mode=eval", "--where=gke"), "launch gke trains, use --where=local"),
        (("--gin_file=a", "--slice", "v5e-8"), "unexpected argument 'v5e-8': flags that are passed on"),
        (("--gin_file=a", "--tpu_cores=32"), "--tpu_cores is not supported: a slice says"),
        (("--gin_file=a", "--clone_github"), "--clone_github is not supported: jobs run the capibara"),
        (("--gin_file=a", "--pip_install=x,y"), "--pip_install is not supported: add the packages to the image"),
        (("--gin_file=a", "--project_dirs=no"), "--project_dirs=no must be a folder"),
        (("--gin_file=a", "--launch_python=no"), "--launch_python=no must be a python"),
        (("--gin_file=a", "--launch_python=false"), "has no capibara"),
        (("--gin_file=a", "--sweep=A=1,2"), "--model_dir is not set"),
        (("--gin_file=a", "--sweep=A=1", "--model_dir=b", "--gin.MODEL_DIR=c"), "--gin.MODEL_DIR is the same for all"),
        (("--gin_file=a", "--sweep=MODEL_DIR=a,b", "--model_dir=b"), "each run has a folder of its own already"),
        (("--gin_file=a", "--sweep=A", "--model_dir=b"), "--sweep=A must be NAME=VALUE,VALUE"),
        (("--gin_file=a", "--sweep=A=1,,2", "--model_dir=b"), "has an empty value"),
        (("--gin_file=a", "--sweep=A=1,1", "--model_dir=b"), "1 is there twice"),
        (("--gin_file=a", "--sweep=A=1", "--sweep=A=2", "--model_dir=b"), "--sweep=A=... is there twice"),
        (("--gin_file=a", "--sweep=A=log(1e-4, 1e-2)", "--model_dir=b"), "is a range, must be values"),
        (("--run_mode=eval", "--model_dir=b", "--sweep=A=1"), "--sweep trains, and --run_mode is eval"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_mistakes_are_one_line(argv, message):
    done = printed(*argv)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and message in done.stderr, done.stderr


def test_without_xmanager_the_error_says_what_to_install():
    command = [sys.executable, str(SCRIPT), "--gin_file=run.gin"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stderr.startswith("error: XManager is not installed: pip install xmanager")


def test_the_commands_of_the_page_are_ones_that_capibara_takes(capsys):
    blocks = [block.replace("\\\n", " ") for block in re.findall(r"(?:^ {4}.+\n)+", PAGE, re.MULTILINE)]
    lines = [line for block in blocks for line in block.splitlines() if "xm_launch.py" in line]
    assert len(lines) == 3
    count = 0
    for line in lines:
        for _, arguments in commands(*line.split("--", 1)[1].split()):
            if arguments[0] != "local":
                count += 1
                assert exits.run_verb(launch.main, [*arguments, "--dry-run"]) == 0, capsys.readouterr().err
    assert count == 5


def test_the_page_has_each_flag_of_t5x():
    rows = "\n".join(line for line in PAGE.partition("From T5X")[2].splitlines() if line.startswith("|"))
    assert not [name for name in T5X if f"`--{name}`" not in rows]
    refused = [name for name in T5X if re.search(rf"`--{name}`[^|]*\| refused", rows)]
    assert len(refused) == 6 and all(printed(f"--{name}=x").returncode == 2 for name in refused)
    values = {"run_mode": "train", "project_dirs": "."}
    commands("--gin_file=run.gin", *(f"--{name}={values.get(name, 'x')}" for name in T5X if name not in refused))


@pytest.fixture
def start():
    """Starts XManager's own command; the work units' python is ours."""

    def begin(*argv):
        command = [PYTHON, "-m", "xmanager.cli.cli", "launch", str(SCRIPT), "--", f"--launch_python={sys.executable}"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen([*command, "--gin_file=run.gin", *argv], **pipes))
        return started[-1]

    started = []
    yield begin
    for process in started:
        if process.poll() is None:  # a test has failed
            process.terminate()  # so that the work units end, too
            process.communicate(timeout=60)


def end(process):
    """The exit code, what was printed, and the exit code of each work unit."""
    out, err = process.communicate(timeout=300)
    return process.returncode, out + err, dict(re.findall(r"work unit (\S+): exit code (\d+)", err))


def until(condition, process, seconds=120):
    """The value of a condition once it is true."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "it is not true in time"
        time.sleep(0.05)
    return value


@pytest.mark.heavy
@with_xmanager
def test_runs_on_this_machine_one_after_the_other_and_the_first_failure_is_the_exit_code(start, tmp_path):
    code, shown, codes = end(start("--emulate=1", "--model_dir=runs/sweep", "--sweep=LEARNING_RATE=-1,1e-3,-2"))
    assert (code, codes) == (2, {"run-1": "2", "run-2": "0", "run-3": "2"}), shown
    assert "[run-1] error: Schedule.learning_rate is -1.0" in shown and "[run-2] finished at step 2" in shown
    assert shown.index("[run-1]") < shown.index("[run-2]") < shown.index("[run-3]") and "Traceback" not in shown
    assert (tmp_path / "runs/sweep/run-2/checkpoints/2").is_dir()
    with sqlite3.connect(tmp_path / ".xmanager/experiments.sqlite3") as database:
        assert database.execute("SELECT experiment_title FROM experiment").fetchall() == [("run",)]
        assert database.execute("SELECT COUNT(*) FROM work_unit").fetchone() == (3,)


@pytest.mark.heavy
@with_xmanager
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_signal_reaches_the_run_which_saves_and_the_next_one_does_not_start(start, tmp_path, number):
    process = start("--emulate=1", "--gin.TRAIN_STEPS=20000", "--model_dir=runs", "--sweep=LEARNING_RATE=1e-3,1e-4")
    metrics = tmp_path / "runs/run-1/metrics.jsonl"
    until(lambda: metrics.exists() and '"loss"' in metrics.read_text(), process)
    process.send_signal(number)
    code, shown, codes = end(process)
    # XManager ends a work unit by SIGTERM.
    assert (code, codes) == (128 + number, {"run-1": str(128 + signal.SIGTERM), "run-2": str(128 + number)}), shown
    (saved,) = (tmp_path / "runs/run-1/checkpoints").glob("[0-9]*")
    assert f"[run-1] step {saved.name} saving" in shown and not (tmp_path / "runs/run-2").exists()


@pytest.fixture
def fakes(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "jobs" / "systems"))


@pytest.mark.heavy
@with_xmanager
@pytest.mark.parametrize(
    ("slice_", "machine", "last", "code"),
    [("v5e-64", "ct5lp-hightpu-4t", "SUCCEEDED", 0), ("v6e-64", "ct6e-standard-4t", "FAILED", 1)],
)
def test_a_sweep_of_jobs_of_vertex_ai(start, fakes, gs, monkeypatch, slice_, machine, last, code):
    from fake_vertex import FakeVertex

    with FakeVertex() as vertex:
        monkeypatch.setenv("CAPIBARA_VERTEX_ENDPOINT", vertex.url)
        place = ("--where=vertex", "--project=my-project", "--region=us-west1", f"--slice={slice_}", "--restarts=0")
        process = start(*place, *JOB, "--model_dir=gs://bucket/runs", "--sweep=LEARNING_RATE=1e-3,1e-4")
        until(lambda: len(vertex.jobs) == 2, process)  # both at once
        for name, job in [*vertex.jobs.items()]:
            spec = job.job_spec.worker_pool_specs[0].machine_spec
            assert (spec.machine_type, spec.tpu_topology) == (machine, "8x8")
            vertex.set_state(name, "SUCCEEDED" if job.labels["capibara-job"] == "run-1" else last)
        ended, shown, codes = end(process)
    assert (ended, codes) == (code, {"run-1": "0", "run-2": str(code)}), shown


@pytest.fixture
def cluster(fakes, gs, monkeypatch, tmp_path):
    def started(**options):
        made.append(FakeKubernetes(active_after_s=0.1, **options))
        made[-1].write_kubeconfig(tmp_path / "kubeconfig")
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
        return made[-1]

    from fake_kubernetes import FakeKubernetes

    made = []
    yield started
    for server in made:
        server.__exit__(None, None, None)


@pytest.mark.heavy
@with_xmanager
@pytest.mark.parametrize(
    ("slice_", "accelerator"), [("v5e-64", "tpu-v5-lite-podslice"), ("v6e-64", "tpu-v6e-slice")], ids=["v5e", "v6e"]
)
def test_a_job_of_kubernetes_has_its_chips(start, cluster, slice_, accelerator):
    server = cluster(done_after_s=0.1)
    code, shown, _ = end(start("--where=kubernetes", f"--slice={slice_}", *JOB))
    assert code == 0, shown
    (job,) = server.objects("jobsets")["run"]["spec"]["replicatedJobs"]
    pod = job["template"]["spec"]["template"]["spec"]
    assert pod["nodeSelector"]["cloud.google.com/gke-tpu-accelerator"] == accelerator
    assert pod["containers"][0]["resources"]["limits"]["google.com/tpu"] == "4"
    assert job["template"]["spec"]["parallelism"] == 16


@pytest.mark.heavy
@with_xmanager
def test_a_job_outlives_xmanager(start, cluster, capsys):
    server = cluster()
    process = start("--where=gke", "--slice=v5e-64", *JOB)
    until(lambda: "run" in server.objects("jobsets"), process)
    process.send_signal(signal.SIGTERM)
    code, shown, _ = end(process)
    assert code == 128 + signal.SIGTERM and "jobs that were submitted continue" in shown, shown
    server.play("complete", "run")
    assert exits.run_verb(launch.main, ["manage", "--poll=0.1"]) == 0
    assert "job run is succeeded" in capsys.readouterr().err
    assert sum(call.startswith("POST ") for call in server.calls) == 1


@pytest.mark.heavy
@with_xmanager
def test_xmanagers_own_executors_cannot_spec_the_slices():
    """Else the page is no longer true, and this script could do without `capibara launch`."""
    code = """
from xmanager import xm, xm_local
from xmanager.cloud import kubernetes, vertex
for name in ("v5e", "v6e"):
    needs = xm.JobRequirements(**{f"tpu_{name}": 8})
    print(kubernetes.requirements_from_executor(xm_local.Kubernetes(requirements=needs)).limits)
    try:
        print(vertex.get_machine_spec(xm.Job(executable=None, executor=xm_local.Vertex(requirements=needs))))
    except KeyError as error:
        print("KeyError")
"""
    done = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.split("\n") == ["{}", "KeyError", "{}", "KeyError", ""], done.stderr


@pytest.mark.heavy
@with_xmanager
def test_no_flag_of_capibara_is_absls_or_xmanagers(cwd):
    listed = "import xm_launch; from absl import app, flags; app.define_help_flags(); print(*flags.FLAGS)"
    done = subprocess.run(
        [PYTHON, "-c", listed], env={**os.environ, "PYTHONPATH": str(SCRIPT.parent)}, capture_output=True, text=True
    )
    taken = {*done.stdout.split()}
    assert {"xm_launch_script", "gin_file", "help"} <= taken, done.stderr
    ours = {"name", "gin_file", "model_dir", "help"}  # passed on, or the same
    for where in ("local", "gce", "gke", "slurm", "vertex", "ssh"):
        shown = subprocess.run(
            [sys.executable, "-m", "capibara.launch", where, "--help"], capture_output=True, text=True
        )
        known = {*re.findall(r"^ +(?:-h, )?--([\w-]+)", shown.stdout, re.MULTILINE)}
        assert len(known) > 4 and not (known & taken) - ours, (where, known & taken)
    for verb in ("train", "evaluate", "infer"):
        shown = subprocess.run([sys.executable, "-m", f"capibara.{verb}", "--help"], capture_output=True, text=True)
        known = {*re.findall(r"^ +(?:-h, )?--([\w-]+)", shown.stdout, re.MULTILINE)}
        assert len(known) > 4 and not (known & taken) - ours, (verb, known & taken)
