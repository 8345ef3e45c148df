"""Processes of a run as the hosts of a cluster start them: by a fake metadata server, or by environment variables."""

from __future__ import annotations

import contextlib
import http.server
import importlib.util
import os
import pathlib
import subprocess
import sys
import threading
from collections.abc import Mapping

import pytest

from capibara.jobs.local import free_address

HERE = pathlib.Path(__file__).resolve().parent
CHECKOUT = HERE.parents[1]


def load(path: str):
    """A module of this folder, which is no package."""
    spec = importlib.util.spec_from_file_location(f"of_hosts {path}", HERE / path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_integration = load("../integration/conftest.py")
nursery_module = load("nursery.py")
shell = _integration.shell


class Cluster:
    """Starts `count` processes of a verb, each with its own environment, one CPU device each unless told otherwise.

    They come from a nursery where there is one, else each is a new interpreter.
    """

    program = ("-m", "capibara.{verb}")

    def __init__(self, folder: pathlib.Path, count: int, nursery=None):
        self.folder, self.count, self.nursery = folder, count, nursery
        self.port = int(free_address().rpartition(":")[2])

    def environment(self, index: int) -> dict[str, str]:
        """What the cluster says to a process."""
        raise NotImplementedError

    def start(self, index: int, verb: str, *args: str, **environment: str):
        """One of the processes."""
        mine = {**plain_environment(), **self.environment(index), **environment}
        if self.nursery is not None:
            return self.nursery.start(verb, args, self.folder, mine)
        command = [sys.executable, *(part.format(verb=verb) for part in self.program), *args]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, cwd=self.folder, env=mine, **pipes)

    def run(self, verb: str, *args: str, timeout_s: float = 240, **environment: str):
        """All of them -> their ends."""
        return ends([self.start(index, verb, *args, **environment) for index in range(self.count)], timeout_s)


def plain_environment() -> dict[str, str]:
    """Ours without the eight devices, and without what JAX has set here."""
    flags = os.environ["XLA_FLAGS"].replace("--xla_force_host_platform_device_count=8", "")
    known = {name: value for name, value in os.environ.items() if name != "TPU_SKIP_MDS_QUERY"}
    return {**known, "PYTHONPATH": str(CHECKOUT), "XLA_FLAGS": flags}


def ends(processes, timeout_s: float = 240):
    """(exit code, stdout, stderr) of each; none is left."""
    try:
        said = [process.communicate(timeout=timeout_s) for process in processes]
        return [_integration.Done(process.returncode, *texts) for process, texts in zip(processes, said, strict=True)]
    finally:
        for process in processes:
            process.kill()


class Named(Cluster):
    """Nothing finds them: flags and JAX's own variables do."""

    def environment(self, index):
        return {
            "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{self.port}",
            "JAX_NUM_PROCESSES": str(self.count),
            "JAX_PROCESS_ID": str(index),
            "TPU_SKIP_MDS_QUERY": "1",
        }


class Slurm(Cluster):
    """What srun sets."""

    def environment(self, index):
        names = {"JOB_ID": "77", "STEP_NODELIST": "localhost", "NTASKS": self.count, "PROCID": index, "LOCALID": index}
        return {f"SLURM_{name}": str(value) for name, value in names.items()} | {
            "JAX_COORDINATOR_PORT": str(self.port),
            "TPU_SKIP_MDS_QUERY": "1",
        }


class OpenMpi(Cluster):
    """What mpirun of Open MPI 4 sets."""

    def environment(self, index):
        names = {"SIZE": self.count, "RANK": index, "LOCAL_RANK": index}
        return {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in names.items()} | {
            "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://127.0.0.1:34911",
            "JAX_COORDINATOR_PORT": str(self.port),
            "TPU_SKIP_MDS_QUERY": "1",
        }


class Gce(Cluster):
    """A slice of plain or queued TPU VMs: nothing but a metadata server on each host, of which this is a fake."""

    program = (str(HERE / "fake_tpu_vm.py"), "{verb}")

    def __init__(self, folder, count, nursery=None):
        super().__init__(folder, count, nursery)
        self.pci = fake_pci(folder / "pci")
        self.servers = [_Metadata(self.attributes(index)) for index in range(count)]

    def attributes(self, index: int) -> dict[str, str]:
        """What the metadata server knows."""
        return {
            "agent-worker-number": str(index),
            "worker-network-endpoints": ",".join(f"unused:{8470 + i}:127.0.0.1" for i in range(self.count)),
            "tpu-env": f"ACCELERATOR_TYPE: 'v5litepod-{4 * self.count}'\nWORKER_ID: '{index}'\n",
        }

    def environment(self, index):
        host = f"127.0.0.1:{self.servers[index].server_address[1]}"
        return {"FAKE_PCI": self.pci, "GCE_METADATA_IP": host, "JAX_COORDINATOR_PORT": str(self.port)}

    def close(self) -> None:
        """Ends the servers."""
        for server in self.servers:
            server.shutdown()
            server.server_close()


class Gke(Gce):
    """What GKE's webhook sets in a pod of a TPU slice, whose metadata server knows nothing of TPUs."""

    def attributes(self, index):
        return {}

    def environment(self, index):
        return {
            **super().environment(index),
            "TPU_SKIP_MDS_QUERY": "1",
            "TPU_WORKER_ID": str(index),
            "TPU_WORKER_HOSTNAMES": ",".join(["localhost"] * self.count),
            "KUBERNETES_SERVICE_HOST": "10.0.0.1",
        }


class _Metadata(http.server.ThreadingHTTPServer):
    def __init__(self, answers: Mapping[str, str]):
        asked = self.asked = []

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                name = self.path.rpartition("/")[2]
                asked.append(name)
                known = name in answers and self.headers.get("Metadata-Flavor") == "Google"
                self.send_response(200 if known else 404)
                self.end_headers()
                self.wfile.write(answers.get(name, "").encode())

            def log_message(self, *args):
                pass

        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()


def fake_pci(folder: pathlib.Path) -> str:
    """Four chips of v5e, and a network card of the same vendor."""
    for number, device in enumerate(["0x0042", *["0x0063"] * 4]):
        address = folder / f"0000:00:{number + 4:02x}.0"  # newer JAX counts function 0 of a device alone
        address.mkdir(parents=True, exist_ok=True)
        (address / "vendor").write_text("0x1ae0\n")
        (address / "device").write_text(f"{device}\n")
    return str(folder)


KINDS = {"GCE": Gce, "GKE": Gke, "Slurm": Slurm, "Open MPI": OpenMpi, "flags": Named}


sys.modules["of_hosts_conftest"] = sys.modules[__name__]


@pytest.fixture(scope="session")
def nursery(tmp_path_factory):
    """Where processes come from that need not import anything."""
    pci = fake_pci(tmp_path_factory.mktemp("nursery") / "pci")
    made = nursery_module.Nursery({**plain_environment(), "FAKE_PCI": pci})
    yield made
    made.close()


@pytest.fixture
def cluster(shell, nursery):
    """(kind, count, fresh=False) -> a cluster in the folder of `shell`, of new interpreters or of the nursery."""
    with contextlib.ExitStack() as stack:

        def make(kind, count, fresh=False):
            made = KINDS[kind](shell.folder, count, None if fresh else nursery)
            if hasattr(made, "close"):
                stack.callback(made.close)
            return made

        yield make
