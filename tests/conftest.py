"""The machine that every test sees: 8 emulated CPU devices, a compilation cache, no Gin bindings left over."""

from __future__ import annotations

import gc
import importlib.metadata
import importlib.util
import os
import pathlib
import signal
import subprocess
import sys
import zlib

# All of this is read when JAX starts, so it is set before any test module imports it; child processes inherit it.
CHECKOUT = pathlib.Path(__file__).resolve().parent.parent
os.environ["JAX_PLATFORMS"] = os.environ.get(
    "CAPIBARA_TEST_PLATFORM", "cpu"
)  # another in make test-peer PEER=gpu alone
# One thread per XLA operation: the workers of pytest-xdist share the cores, and 8 emulated devices already do. Programs
# are small and run a few times, so most of the time would go into compiling them well.
_XLA_FLAGS = (
    "--xla_force_host_platform_device_count=8 --xla_cpu_multi_thread_eigen=false --xla_backend_optimization_level=0 "
    "--xla_cpu_opt_preset=CPU_OPT_PRESET_FAST_COMPILE "
    "--xla_cpu_collective_call_terminate_timeout_seconds=240"  # devices that wait for each other for ever end in a trace
)
if importlib.metadata.version("jaxlib").startswith("0.10."):  # a later XLA ends at a flag that it no longer knows
    # MLIR takes long to compile; small programs that are split for several threads take longer than whole.
    _XLA_FLAGS += " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(CHECKOUT / ".jax_cache")
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# A shell that starts the tests in the background has them ignore it.
signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest  # noqa: E402

from capibara import config
from capibara.core import (
    devices,  # noqa: E402
    user_modules,
)

os.environ["XLA_FLAGS"] = devices.with_emulation_flags(_XLA_FLAGS)  # read with the first computation


# The files that take longest, begun first: else one worker is still at such a file when the others have nothing left.
# Those of tests/hosts, which start up to four processes each, stand apart from each other.
_LONGEST = """
data/tasks/test_tasks examples/test_extend training/test_loop faults/test_manager training/privacy/test_gradient
run/test_presets cli/test_prove faults/test_launched hosts/test_joining cli/test_launch_sweep hosts/test_startup
strategies/consensus/test_rounds integration/test_mistakes monitoring/dashboard/test_serving jobs/systems/test_ssh
inference/server/test_server jobs/sweeps/test_jobs test_dead_code jobs/systems/test_slurm integration/test_infer
hosts/test_ssh faults/test_kills faults/test_trust models/parts/test_moe training/profiling/test_profiler
faults/test_server integration/test_evaluate inference/engine/test_recovery faults/test_builders faults/test_runs
jobs/systems/test_gce inference/server/test_floods training/methods/test_nodes test_python
builders/preparation/test_build builders/redaction/test_redaction monitoring/trackers/test_tracking
models/test_families planner/compiler/test_compile_cache test_style inference/server/test_serve interop/test_folders
faults/test_numbers test_imports jobs/managing/test_manager training/test_evaluation strategies/group/test_coordinator
inference/test_sample kernels/cross_entropy/test_cross_entropy cli/test_launch test_types
monitoring/dashboard/test_access faults/test_supervision monitoring/dashboard/test_reader faults/test_judge
models/architectures/test_encdec cli/test_launched_jobs interop/test_gguf faults/test_options
inference/engine/cache/test_pages jobs/test_local cli/test_plan interop/test_adapters planner/model/test_memory
jobs/backends/test_scripts hosts/test_group interop/test_fuzz_readers models/adapters/test_lora
integration/test_prepared hosts/test_bucket integration/test_train launch/test_xmanager strategies/test_grpo
interop/test_t5x
""".split()


# Cases that make test leaves out: single ones of parametrized tests, which marks could not tell apart.
_HEAVY_CASES = {
    line
    for line in (CHECKOUT / "tests" / "heavy_cases.txt").read_text(encoding="utf-8").splitlines()
    if not line.startswith("#")
}


# What these find in the code is hardly of the interpreter: of all versions CI's, the oldest, looks; make test-heavy does on each.
_OF_THE_CODE = {"test_types.py", "test_dead_code.py"} if sys.version_info >= (3, 12) else set()


_NO_TEST = pytest.StashKey[list[str]]()  # heavy cases that are no test, of the files that were collected whole


@pytest.fixture
def heavy_cases_without_a_test(request):
    return request.config.stash.get(_NO_TEST, [])


def pytest_addoption(parser):
    parser.addoption("--part", metavar="I/N", default="1/1", help="run the I-th of N parts of the files, from 1")


def part_of(file, count):
    """The part, from 1, that a test file is in: the same in every run."""
    return zlib.crc32(file.encode()) % count + 1


@pytest.hookimpl(tryfirst=True)  # before -m deselects
def pytest_collection_modifyitems(config, items):
    """The longest files first, the others after them as they come; marks the heavy cases."""
    found = set()
    for item in items:
        name = item.nodeid.partition("tests/")[2]
        if name in _HEAVY_CASES:
            item.add_marker(pytest.mark.heavy)
            found.add(name)
        elif name.partition("::")[0] in _OF_THE_CODE:
            item.add_marker(pytest.mark.heavy)
    if not any("::" in arg for arg in config.args):
        files = {item.nodeid.partition("tests/")[2].partition("::")[0] for item in items}
        config.stash[_NO_TEST] = sorted(name for name in _HEAVY_CASES - found if name.partition("::")[0] in files)
    rank = {str(CHECKOUT / "tests" / f"{name}.py"): number for number, name in enumerate(_LONGEST)}
    number, count = map(int, config.getoption("part").split("/"))
    parts: dict[bool, list[pytest.Item]] = {True: [], False: []}
    for item in items:
        parts[part_of(item.nodeid.partition("::")[0], count) == number].append(item)
    config.hook.pytest_deselected(items=parts[False])
    items[:] = sorted(parts[True], key=lambda item: rank.get(str(item.path), len(rank)))


# Importing TensorFlow takes 13 s: one worker does it for all of these.
_WITH_TENSORFLOW = {
    f"tests/{name}.py"
    for name in """
data/tasks/test_tasks data/pipeline/test_cached data/packing/test_pairs data/packing/test_masking data/test_prefix
data/test_domains data/shards/test_formats data/tasks/test_routing evaluation/test_seqio_tasks
""".split()
}


def pytest_xdist_make_scheduler(config, log):
    """As --dist=loadfile: the tests of a file go to one worker."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid):
            file = super()._split_scope(nodeid)
            return "with TensorFlow" if file in _WITH_TENSORFLOW else file

    return Scheduling(config, log)


def pytest_xdist_auto_num_workers(config):
    """One more than there are cores: tests also wait for processes, servers and clocks."""
    return (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1) + 1


# Looking through all that JAX holds is a tenth of the time that most tests take.
gc.set_threshold(10_000, 10, 10)


@pytest.fixture(autouse=True)
def _no_gin_bindings():
    config.reset()
    yield
    config.reset()


@pytest.fixture(autouse=True, scope="module")
def _no_modules_of_tests(tmp_path_factory):
    """What a file of tests wrote and imported is gone for the next one: both may call a module my_metrics."""
    path, base, roots = [*sys.path], str(tmp_path_factory.getbasetemp()), {**user_modules._roots}
    yield
    sys.path[:] = path
    user_modules._roots.clear()  # a file of tests that a run has imported is nobody's code for the next one
    user_modules._roots.update(roots)
    for name, module in [*sys.modules.items()]:
        if (getattr(module, "__file__", None) or "").startswith(base):
            del sys.modules[name]


_GIB = 2**30
_most_resident = [4 * _GIB]  # of a worker; without a limit one grows to 7 GiB by the last tests


def _resident_bytes():
    """Memory of this process; 0 where the system does not tell."""
    statm = pathlib.Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGESIZE") if statm.exists() else 0


@pytest.fixture(autouse=True, scope="module")
def _compiled_programs_are_dropped():
    """The programs of earlier files, when they fill too much memory; a later file finds those that it needs on disk.

    Not for every file: looking them up takes time, too.
    """
    yield
    if (jax := sys.modules.get("jax")) and _resident_bytes() > _most_resident[0]:
        jax.clear_caches()
        gc.collect()
        _most_resident[0] = max(_most_resident[0], _resident_bytes() + _GIB)


# Folders whose tests run under strict promotion. The optimizers do not: optax 0.2.8 multiplies int32 by float32.
_STRICT = ("models", "kernels", "inference")


@pytest.fixture(autouse=True)
def _strict_promotion(request):
    folder = pathlib.Path(request.node.path).relative_to(CHECKOUT / "tests").parts[0]
    strict = folder in _STRICT or request.node.get_closest_marker("strict_promotion")
    if not strict or request.node.get_closest_marker("standard_promotion"):
        yield
        return
    import jax

    with jax.numpy_dtype_promotion("strict"):
        yield


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 4 MB; skips where this user may not mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def _load(path: str):
    """A module of these tests by its path: they are no package."""
    spec = importlib.util.spec_from_file_location(f"of_{path.replace('/', '_')}", CHECKOUT / "tests" / f"{path}.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def flaky():
    """The module tests/storage/flaky_bucket.py, for faults of `gs`."""
    return _load("storage/flaky_bucket")


@pytest.fixture(scope="module")
def bucket_server(flaky):
    """A FlakyBucket before the emulator of Google Cloud Storage, with the bucket gs://bucket."""
    server = pytest.importorskip("gcp_storage_emulator.server")
    from capibara.jobs.local import free_address

    host, _, port = free_address().rpartition(":")
    emulator = server.create_server(host, int(port), in_memory=True, default_bucket="bucket")
    emulator.start()
    made = flaky.FlakyBucket(f"{host}:{port}")
    yield made
    made.shutdown()
    made.server_close()
    emulator.stop()


@pytest.fixture
def gs(bucket_server, monkeypatch):
    """The same server for this process."""
    for name, value in bucket_server.environment.items():
        monkeypatch.setenv(name, value)
    return bucket_server


@pytest.fixture(scope="session")  # etils keeps the first connection for good
def s3_server():
    """The emulator of S3, with the bucket s3://bucket."""
    for package in ("moto.server", "s3fs"):
        pytest.importorskip(package)
    made = _load("storage/s3").S3Server()
    yield made
    made.close()


@pytest.fixture
def s3(s3_server, monkeypatch):
    """The same server for this process, whose faults of other tests are over."""
    import s3fs

    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    s3_server.faults[:], s3_server.refuses = [], None
    s3fs.S3FileSystem.clear_instance_cache()
    yield s3_server
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture(scope="session")
def toy_tokenizer(tmp_path_factory):
    """The folder of a tokenizer of bytes with a short chat template."""
    import json

    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    special = ["<|end|>", "<|turn|>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    folder = tmp_path_factory.mktemp("toy_tokenizer")
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}<|turn|>{{ m['role'][0] }}:{{ m['content'] }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|turn|>a:{% endif %}"
    )
    return str(folder)


@pytest.fixture
def processes(monkeypatch):
    """(count, function) -> what it gives, or raises, on each of so many processes: threads, each with an index of its own."""
    import concurrent.futures
    import json
    import threading

    import jax

    from capibara.multihost import hosts

    own, words = threading.local(), {}

    def run(count, function):
        barrier = threading.Barrier(count, timeout=20)

        def gathered(value):
            words[own.index] = json.dumps(value)
            barrier.wait()
            found = [json.loads(words[index]) for index in range(count)]
            barrier.wait()
            return found

        def one(index):
            own.index = index
            try:
                return function()
            except Exception as error:
                return error

        monkeypatch.setattr(hosts, "gathered", gathered)
        monkeypatch.setattr(jax, "process_count", lambda: count)
        monkeypatch.setattr(jax, "process_index", lambda: own.index)
        with concurrent.futures.ThreadPoolExecutor(count) as pool:
            return list(pool.map(one, range(count)))

    return run
