"""Hosts that OpenSSH reaches: each job is a group of processes on every one of them.

All calls run a script of bash on the hosts, by the `ssh` of this machine with its configuration, keys and agent. What the scripts
read and write there: `capibara.jobs.backends.ssh`. Messages: those of OpenSSH 9.2.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from typing import ClassVar, TypeVar

from capibara.core.types import UserError
from capibara.jobs.backends.backend import Backend
from capibara.jobs.backends.ssh import (
    AGAIN,
    EXISTS,
    FUNCTIONS,
    MARK,
    MISSING,
    OTHER,
    STARTED,
    Ssh,
    attempt_of,
    inherits,
)
from capibara.jobs.spec import JobSpec
from capibara.jobs.systems.system import CALL_S, Busy, Denied, Exists, Phase, Resource, System

T = TypeVar("T")

_AT_ONCE = 32  # connections
_CONNECT_S = 10
_LOG_LINES, _LOG_BYTES = 1000, 1 << 20
_MORE_LINES = 50  # of each host but the first
_LOST = 255  # exit code of ssh itself
_LONGEST = 300  # characters of a message
_TERMINATED = 143  # exit code after a SIGTERM that was not ours, as of a host that shuts down
# A key that is not known is refused, nobody is asked, and nothing of the configuration opens a port or runs another command.
# A connection of the user's that is open already (ControlPath) is used; none is left behind.
_OPTIONS = (
    "BatchMode=yes",
    "StrictHostKeyChecking=yes",
    "UpdateHostKeys=no",
    f"ConnectTimeout={_CONNECT_S}",
    "ServerAliveInterval=5",
    "ServerAliveCountMax=3",
    "LogLevel=ERROR",
    "ClearAllForwardings=yes",
    "ControlMaster=no",
    "NoHostAuthenticationForLocalhost=no",
    "Tunnel=no",
    "PermitLocalCommand=no",
    "RemoteCommand=none",
)
# Their bodies are subshells. The last line that the list prints has no fields.
_LIST = """capibara_list() (
echo
for capibara_folder in {root}/*/{host}; do
  [ -e "$capibara_folder/now" ] && exec 9> "$capibara_folder/lock" || continue
  if flock --nonblock 9; then capibara_settle "$capibara_folder"; else capibara_look "$capibara_folder/now"; fi
  exec 9>&-
  [ -e "$capibara_folder/now/job.json" ] || continue
  case "$capibara_is" in
    running) [ ! -e "$capibara_folder/now/stopping" ] || capibara_is=stopping ;;
    ended) capibara_is="ended $(< "$capibara_folder/now/code")" ;;
  esac
  printf '{mark}\\t%s\\t%s\\t%s\\n' "$capibara_is" "$capibara_began" "$(< "$capibara_folder/now/job.json")"
done
echo {mark}
)
capibara_list
"""
_STOP = """capibara_stop() (
capibara_folder={folder}
[ -e "$capibara_folder/now" ] || return 0
exec 9> "$capibara_folder/lock" || return
flock --wait 10 9 || return {again}
capibara_settle "$capibara_folder"
[ "$(cat "$capibara_folder/now/attempt" 2> /dev/null)" = {attempt} ] || return 0
if [ "$capibara_is" != running ]; then
  capibara_retire "$capibara_folder"
elif [ ! -e "$capibara_folder/now/stopping" ]; then
  read -r capibara_now < /proc/uptime &&
    echo "${{capibara_now%%.*}}" > "$capibara_folder/now/stopping.new" &&
    mv "$capibara_folder/now/stopping.new" "$capibara_folder/now/stopping" || return
  kill -s TERM -- "-$capibara_group" && kill -s CONT -- "-$capibara_group" || :  # unless it has ended meanwhile
fi
)
capibara_stop; exit
"""
_TAIL = """capibara_tail() (
for capibara_part in {folder}/now {folder}/before; do
  if [ "$(cat "$capibara_part/attempt" 2> /dev/null)" = {attempt} ]; then
    printf '\\n{mark}\\n'
    tail -n {lines} "$capibara_part/log" | tail -c {bytes}
    return
  fi
done
)
capibara_tail; exit
"""


def connect(backend: Backend) -> System:
    """The hosts that a back end names.

    Raises:
      UserError: it names none, or this machine has no ssh.
    """
    assert isinstance(backend, Ssh)
    if shutil.which("ssh") is None:
        raise _missing()
    return SshHosts(backend)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Seen:
    """What one host has of a job.

    Attributes:
      host: its name.
      state: "absent", "running", "stopping", "ended CODE", "killed" or "rebooted".
      began_s: when the job started there, in seconds since 1970, by the host's clock.
      labels: of the job.
      hosts: all of the job's.
    """

    host: str
    state: str
    began_s: float
    labels: Mapping[str, str]
    hosts: Sequence[str]

    @property
    def is_alive(self) -> bool:
        return self.state in ("running", "stopping")


class SshHosts(System):
    """The hosts of a back end. It lists the jobs that were started on exactly these hosts.

    Args:
      backend: names the hosts.
      call_s: seconds after which a call to one host has failed.
    """

    repeats_delete: ClassVar[bool] = True

    def __init__(self, backend: Ssh, *, call_s: float = CALL_S):
        self._backend, self._hosts, self._call_s = backend, backend.names, call_s

    def submit(self, spec: JobSpec) -> None:
        """Starts the job's processes on all hosts.

        If some hosts do not answer meanwhile, those that have started wait for the others, which a later call starts.
        """
        script = self._backend.render(spec).script.encode() + _values(spec)
        for item in self._look():  # so that nothing starts anywhere if a host is not to be used
            if item.labels["capibara-job"] == spec.name and item.is_alive:
                self._check_free(spec, item)
        codes, faults = self._each(lambda host: self._start(host, script))
        is_free = OTHER not in codes.values()
        if not is_free or any(isinstance(fault, UserError) for fault in faults):  # no later call would start the others
            with contextlib.suppress(Busy, UserError):
                started = [host for host, code in codes.items() if code in (STARTED, EXISTS)]
                self._stop(spec.name, attempt_of(spec.all_labels), started)
        if faults:
            raise faults[0]
        if not is_free or {*codes.values()} == {EXISTS}:
            raise Exists(spec.name)

    def resources(self) -> list[Resource]:
        """The jobs of these hosts.

        No host knows of the others: what is left of an attempt of which one host has failed is stopped here.
        """
        result: dict[tuple[str, str], list[_Seen]] = collections.defaultdict(list)
        for item in self._look():
            if [*item.hosts] == self._hosts:
                result[item.labels["capibara-job"], attempt_of(item.labels)].append(item)
        for (job, attempt), seen in result.items():
            if _failure(seen) is not None and (left := [entry.host for entry in seen if entry.state == "running"]):
                self._stop(job, attempt, left)
        return [self._resource(*key, seen) for key, seen in result.items()]

    def delete(self, resource: Resource) -> None:
        """Sends SIGTERM to the job's processes, or SIGKILL if they had that long ago; forgets those that have ended."""
        self._stop(resource.job, attempt_of(resource.labels), self._hosts)

    def log(self, spec: JobSpec, resource: Resource) -> Iterator[str]:
        """The log of the first host, after the last lines of the others'."""
        attempt = shlex.quote(attempt_of(resource.labels))

        def tail(host: str) -> list[str]:
            folder, lines = self._backend.path(spec.name, host), _LOG_LINES if host == self._hosts[0] else _MORE_LINES
            script = _TAIL.format(folder=folder, attempt=attempt, mark=MARK, lines=lines, bytes=_LOG_BYTES)
            printed = self._run(host, script).splitlines()
            if MARK not in printed:
                return [f"{host} has no log of this attempt in {self._backend.folder}/{spec.name}"]
            return printed[printed.index(MARK) + 1 :]

        tails, faults = self._each(tail)
        if not tails:
            raise faults[0]
        heads = {host: [f"==> {host} <=="] if len(self._hosts) > 1 else [] for host in tails}
        lines = [line for host in reversed(tails) for line in (*heads[host], *tails[host])]
        return iter([*map(str, faults), *lines])

    def close(self) -> None:
        pass

    def _check_free(self, spec: JobSpec, host: _Seen) -> None:
        if [*host.hosts] != self._hosts:
            raise UserError(
                f"job {spec.name} runs on {host.host} with --hosts={','.join(host.hosts)}: cancel it with these, or choose "
                "another --name"
            )
        if attempt_of(host.labels) != attempt_of(spec.all_labels):
            raise Exists(f"{spec.name}, another attempt")

    def _start(self, host: str, script: bytes) -> int:
        code, output, error = self._ssh(host, script, str(self._hosts.index(host)))
        if code == AGAIN:
            raise Busy(f"{host}: the job has not started yet{_reason(error)}")
        if code == MISSING:
            raise UserError(f"{host} lacks flock or setsid: install its package util-linux")
        if code not in (STARTED, EXISTS, OTHER):
            raise _failed(host, code, error)
        if code == STARTED and MARK not in output.splitlines():
            raise UserError(
                f"{host} does not run what ssh passes to it: correct its authorized_keys, or name another host"
            )
        return code

    def _stop(self, job: str, attempt: str, hosts: Sequence[str]) -> None:
        def stop(host: str) -> None:
            folder = self._backend.path(job, host)
            self._run(host, FUNCTIONS + _STOP.format(folder=folder, attempt=shlex.quote(attempt), again=AGAIN))

        _, faults = self._each(stop, hosts)
        if faults:
            raise faults[0]

    def _look(self) -> list[_Seen]:
        """What all hosts have of all jobs."""

        def look(host: str) -> list[_Seen]:
            script = FUNCTIONS + _LIST.format(root=self._backend.path(), host=shlex.quote(host), mark=MARK)
            return _read(host, self._run(host, script))

        seen, faults = self._each(look)
        if faults:
            raise faults[0]
        return [item for host in self._hosts for item in seen[host]]

    def _resource(self, job: str, attempt: str, seen: Sequence[_Seen]) -> Resource:
        there = [item.host for item in seen if item.state != "absent"]
        phase, reason = _phase(seen, missing := [host for host in self._hosts if host not in there])
        return Resource(
            id=f"{job}/{attempt}",
            labels=seen[0].labels,
            phase=phase,
            reason=reason,
            created_s=min(item.began_s for item in seen),
            is_partial=phase is Phase.WAITING and bool(missing),
        )

    def _each(
        self, call: Callable[[str], T], hosts: Sequence[str] | None = None
    ) -> tuple[dict[str, T], list[Exception]]:
        """Calls with each host at the same time; returns the results by host, and the errors, those that will not pass first."""
        hosts = self._hosts if hosts is None else hosts
        with futures.ThreadPoolExecutor(_AT_ONCE) as pool:
            calls = {host: pool.submit(call, host) for host in hosts}
        results: dict[str, T] = {}
        faults: list[Exception] = []
        for host, item in calls.items():
            try:
                results[host] = item.result()
            except (Busy, UserError) as error:
                faults.append(error)
        return results, sorted(faults, key=lambda fault: not isinstance(fault, UserError))

    def _run(self, host: str, script: str) -> str:
        """What a script prints that is to succeed."""
        code, output, error = self._ssh(host, script.encode())
        if code == AGAIN:
            raise Busy(f"{host}: another call changes the job")
        if code:
            raise _failed(host, code, error)
        return output

    def _ssh(self, host: str, script: bytes, *arguments: str) -> tuple[int, str, str]:
        """Runs a script of bash on a host; returns its exit code and what it prints, to stdout and to stderr.

        Raises:
          Busy: the host is not reached.
          UserError: its key is not the known one, or it refuses this user.
        """
        options = [text for option in _OPTIONS for text in ("-o", option)]
        if self._backend.known_hosts is not None:
            options += [
                "-o",
                f'UserKnownHostsFile="{self._backend.known_hosts}"',
                "-o",
                "GlobalKnownHostsFile=/dev/null",
            ]
        file = ["-F", self._backend.config_file] if self._backend.config_file is not None else []
        command = ["ssh", "-T", "-a", "-x", *options, *file, "--", host, "bash", "-s", *arguments]
        # The messages are read; hosts that accept LC_ variables must not get another locale for the job than the user's.
        environment = {name: value for name, value in os.environ.items() if name != "LC_ALL"} | {"LC_MESSAGES": "C"}
        try:
            done = subprocess.run(
                command, input=script, capture_output=True, timeout=self._call_s, env=environment, check=False
            )
        except FileNotFoundError:
            raise _missing() from None
        except subprocess.TimeoutExpired:
            raise Busy(f"{host} has not answered after {self._call_s:g} s") from None
        error = done.stderr.decode(errors="replace")
        if done.returncode == _LOST:
            raise _fault(host, error)
        return done.returncode, done.stdout.decode(errors="replace"), error


def _missing() -> UserError:
    return UserError("ssh is not on this machine: install the client of OpenSSH")


def _values(spec: JobSpec) -> bytes:
    """The values of the job's secrets, as its script reads them."""
    for secret in inherits(spec):
        if secret.name not in os.environ:
            raise UserError(f"--secret={secret.variable}=env:{secret.name}: {secret.name} is not set here: export it")
    return b"".join(os.environb[secret.name.encode()] + b"\0" for secret in inherits(spec))


def _reason(error: str) -> str:
    """The last line of what a host says, to follow a message."""
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    text = "".join(letter for letter in (lines or [""])[-1] if letter.isprintable())[:_LONGEST]
    return f" ({text})" if text else ""


def _failed(host: str, code: int, error: str) -> UserError:
    return UserError(f"{host}: the script ends with exit code {code}{_reason(error)}: mend this on the host")


def _fault(host: str, error: str) -> Exception:
    """The error for what ssh says."""
    machine = host.rpartition("@")[2]
    if "IDENTIFICATION HAS CHANGED" in error:
        return UserError(
            f"{host} has another host key than the known one, and nothing was run: if its owner confirms the new one (ssh-keyscan "
            f"{machine} | ssh-keygen -lf -), remove the old one with ssh-keygen -R {machine} and add the new one to known_hosts"
        )
    if "Host key verification failed" in error or "REVOKED" in error:
        return UserError(
            f"{host} has a host key that is not known, and nothing was run: if its owner confirms it (ssh-keyscan {machine} | "
            "ssh-keygen -lf -), add it to known_hosts"
        )
    if re.search(r"Permission denied|Too many authentication failures", error):
        return Denied(
            f"{host} refuses this user{_reason(error)}: add your key to its authorized_keys, and to your ssh-agent if it has "
            "a passphrase"
        )
    if re.search(r"Bad .*(option|permissions)|[Cc]an't open user config|Name or service not known|no matching", error):
        return UserError(f"ssh {host}{_reason(error)}: correct --hosts, --config_file or ssh's configuration")
    return Busy(f"{host} is not reached{_reason(error)}")


def _read(host: str, output: str) -> list[_Seen]:
    """What a host has of all jobs, of what the list prints.

    Raises:
      Busy: that is not all of it: a job that is missed would be started again.
    """
    result, is_whole = [], False
    for line in output.splitlines():
        mark, *fields = line.split("\t", 3)
        if mark != MARK:  # a line of the user's .bashrc
            continue
        is_whole = not fields
        if len(fields) != 3:
            continue
        state, begin_s, description = fields
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):  # a file that was changed by hand
            known = json.loads(description)
            labels = {str(key): str(value) for key, value in known["labels"].items()}
            if "capibara-job" in labels:
                hosts = [*map(str, known["hosts"])]
                result.append(_Seen(host=host, state=state, began_s=float(begin_s), labels=labels, hosts=hosts))
    if not is_whole:
        raise Busy(f"{host} has sent a part of its answer only")
    return result


def _failure(seen: Sequence[_Seen]) -> tuple[Phase, str] | None:
    """How an attempt has failed, and on which host; None: it has not."""
    # If a host is lost, the processes on the others end with an error, too.
    lost = {"killed": "the job was killed", "rebooted": "the host was rebooted"}
    lost[f"ended {_TERMINATED}"] = "the job was ended by SIGTERM"
    for item in seen:
        if item.state in lost:
            return Phase.PREEMPTED, f"{item.host}: {lost[item.state]}"
    for item in seen:
        if item.state.startswith("ended ") and item.state != "ended 0":
            return Phase.FAILED, f"{item.host}: exit code {item.state.removeprefix('ended ')}"
    return None


def _phase(seen: Sequence[_Seen], missing: Sequence[str]) -> tuple[Phase, str]:
    """The phase of a job and the reason, of what its hosts have, and of the names of those where it has not started."""
    failure, states = _failure(seen), {item.state for item in seen}
    if "stopping" in states or (failure is not None and any(item.is_alive for item in seen)):
        return Phase.DELETING, "" if failure is None else failure[1]
    if failure is not None:
        return failure
    if missing:
        return Phase.WAITING, f"not started on {', '.join(missing)}"
    return (Phase.SUCCEEDED, "") if states == {"ended 0"} else (Phase.RUNNING, "")
