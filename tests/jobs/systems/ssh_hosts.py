"""Hosts on loopback with servers of OpenSSH, and keys of their own; on them `python` does what a test says."""

import contextlib
import getpass
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys

from capibara.jobs import backends
from capibara.jobs.systems.ssh import SshHosts

sys.path.append(str(pathlib.Path(__file__).resolve().parent))
from managed import until  # noqa: E402

SSHD = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin")
MISSING = "needs sshd: apt-get install openssh-server"


def key(path):
    """Makes a key; returns its public part."""
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(path)], check=True)
    return path.with_name(f"{path.name}.pub").read_text().strip()


class Host:
    """A host with its own server; each bash that is started over it first reads `rc`, as it does a .bashrc."""

    def __init__(self, folder, name):
        self.folder, self.name, self.rc = folder, name, folder / f"rc-{name}"
        self.key = key(folder / f"key-{name}")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.rc.write_text("")
        self.start()

    def start(self):
        config = self.folder / f"sshd-{self.name}"
        config.write_text(
            f"ListenAddress 127.0.0.1:{self.port}\nHostKey {self.folder}/key-{self.name}\nPidFile none\nUsePAM no\n"
            f"AuthorizedKeysFile {self.folder}/authorized\nStrictModes no\nPasswordAuthentication no\n"
            f"KbdInteractiveAuthentication no\nMaxStartups 100\nMaxSessions 100\n"
            f"SetEnv BASH_ENV={self.rc} HOME={self.folder}\n"  # not this machine's .bashrc
        )
        with open(self.folder / f"log-{self.name}", "ab") as log:
            self.process = subprocess.Popen([SSHD, "-D", "-e", "-f", str(config)], stdout=log, stderr=log)
        until(self._answers)

    def _answers(self):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port)) as connection:
            return connection.recv(3) == b"SSH"

    def stop(self):
        self.process.terminate()
        self.process.wait()

    @property
    def client(self):
        """Its lines of ssh's configuration."""
        return (
            f"Host {self.name}\nHostName 127.0.0.1\nPort {self.port}\nHostKeyAlias {self.name}\nUser {getpass.getuser()}\n"
            f"IdentityFile {self.folder}/user\nIdentitiesOnly yes\nIdentityAgent none\nGlobalKnownHostsFile /dev/null\n"
            f"UserKnownHostsFile {self.folder}/known\nStrictHostKeyChecking no\n"  # which capibara does not heed
        )


class Hosts:
    """Two hosts, h0 and h1, and their client's configuration."""

    def __init__(self, folder):
        self.folder = folder
        if os.getuid() == 0:
            pathlib.Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # as the service of sshd does
        self.allow(key(folder / "user"))
        self.all = [Host(folder, f"h{index}") for index in range(2)]
        self.know(*[host.key for host in self.all])
        self.client = folder / "client"
        self.client.write_text("".join(host.client for host in self.all))

    def allow(self, text):
        """The users' keys that the hosts take from now on."""
        (self.folder / "authorized").write_text(text)

    def know(self, *keys):
        """The hosts' keys that the client knows from now on."""
        self.known = "".join(f"h{index} {text}\n" for index, text in enumerate(keys) if text)
        (self.folder / "known").write_text(self.known)

    @contextlib.contextmanager
    def connected(self, folder):
        """Connections that stay open, for the client to use: sockets in a folder whose path is short."""
        self.client.write_text(f"{self.client.read_text()}Host *\nControlPath {folder}/%n\n")
        masters = [
            subprocess.Popen(["ssh", "-MN", "-F", str(self.client), host.name], stderr=subprocess.DEVNULL)
            for host in self.all
        ]
        try:
            for host in self.all:
                until(pathlib.Path(folder, host.name).exists)
            yield
        finally:
            for master in masters:
                master.terminate()
                master.wait()

    def stop(self):
        for host in self.all:
            host.stop()


class Pair:
    """A folder of two hosts that share a disk, with the jobs' files and a `python`."""

    def __init__(self, hosts, folder):
        self.hosts, self.folder, self.jobs = hosts, folder, folder / "jobs"
        self.does("exit 0")

    def does(self, text):
        """From now on `python` notes how it was called, and does this."""
        python = self.folder / "python"
        noted = (
            'echo "$JAX_PROCESS_ID/$JAX_NUM_PROCESSES $JAX_COORDINATOR_ADDRESS A=$A $(printf %s "$TOKEN" | sha256sum)"'
        )
        python.write_text(
            f'#!/bin/bash\n{noted} >> "{self.folder}/ran-$JAX_PROCESS_ID"\necho "began $JAX_PROCESS_ID $*"\n{text}\n'
        )
        python.chmod(0o755)

    def ran(self, index):
        """What `python` has noted on a host, a line for each start."""
        path = self.folder / f"ran-{index}"
        return path.read_text().splitlines() if path.exists() else []

    def backend(self, hosts="h0,h1", **fields):
        python, client = str(self.folder / "python"), str(self.hosts.client)
        own = {"python": python, "folder": str(self.jobs), "config_file": client, "coordinator": "127.0.0.1"}
        return backends.find("ssh")(hosts=hosts, **{**own, **fields})

    def system(self, hosts="h0,h1", **fields):
        return SshHosts(self.backend(hosts), **fields)

    def now(self, index):
        """The folder of the attempt that was started last."""
        return self.jobs / "run" / f"h{index}" / "now"

    def groups(self):
        """The process groups of the jobs that were started last."""
        return [int(path.read_text().split()[0]) for path in sorted(self.jobs.glob("*/*/now/process"))]

    def send(self, number, *groups):
        """A signal that does not come from capibara."""
        for group in groups or self.groups():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, number)

    def close(self):
        self.send(signal.SIGKILL)
        for host in self.hosts.all:
            host.rc.write_text("")


def is_alive(group):
    """Whether a process of a group runs; one that has ended, but that nobody has waited for, does not."""
    for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[2]) == group and fields[0] not in "ZX":
                return True
    return False
