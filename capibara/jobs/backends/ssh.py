"""Hosts that are there already, reached by SSH: a script that each of them runs, which starts the job and returns.

What a host has of a job, in FOLDER/JOB/HOST, where HOST is its name in --hosts (hosts may share a disk):

  lock       of whoever changes what follows
  now/       of the attempt that was started last
    job.json      its labels and hosts
    attempt       LAUNCH-NUMBER
    grace_s       seconds between SIGTERM and SIGKILL
    process       the number of its process group, when that started (by the kernel and by the clock), and the boot
    log           what it prints
    code          its exit code, once it has ended by itself
    stopping      when SIGTERM was sent to end it, in seconds since the host's boot
  before/    of the attempt before that, which has ended
"""

from __future__ import annotations

import dataclasses
import ipaddress
import json
import os
import re
import shlex
from collections.abc import Mapping
from typing import ClassVar

from capibara.config import configurable
from capibara.core.types import UserError
from capibara.jobs.backends.backend import Backend, Form, Rendering, command, no_tpu
from capibara.jobs.secrets import Secret, Source
from capibara.jobs.spec import JobSpec

# Exit codes of the script: it has started the attempt; it had started it before; another attempt runs; try again; no util-linux.
STARTED, EXISTS, OTHER, AGAIN, MISSING = 0, 10, 11, 75, 12
# What scripts print begins with a line of this, after whatever the user's .bashrc prints.
MARK = "capibara-job"
_END_S = 30  # for the launcher to end after the run
_HOST = re.compile(r"([A-Za-z0-9_][A-Za-z0-9._-]*@)?[A-Za-z0-9_][A-Za-z0-9._-]*")
_LOCK_S = 10
# Functions of bash, for this script and for those that look and stop.
FUNCTIONS = r"""# Sets capibara_is to what became of the attempt in a folder, and capibara_group and capibara_began.
capibara_look() {
  local start boot stat fields
  capibara_is=absent capibara_group= capibara_began="$(stat --format=%Y "$1/attempt" 2> /dev/null)"
  [ -e "$1/process" ] || return 0
  read -r capibara_group start boot capibara_began < "$1/process"
  capibara_is=ended
  [ ! -e "$1/code" ] || return 0
  capibara_is=rebooted
  [ "$boot" = "$(< /proc/sys/kernel/random/boot_id)" ] || return 0
  capibara_is=killed
  # Its group is there as long as one of its processes is. If its first process is another one, the number was used again.
  for stat in "/proc/$capibara_group/stat" /proc/[0-9]*/stat; do
    { read -r fields < "$stat"; } 2> /dev/null || continue
    fields=(${fields##*') '})
    [ "$stat" != "/proc/$capibara_group/stat" ] || [ "${fields[19]}" = "$start" ] || return 0
    if [ "${fields[2]}" = "$capibara_group" ] && [[ "${fields[0]}" != [ZX] ]]; then
      capibara_is=running
      return 0
    fi
  done
}

# Keeps what an attempt that has ended has left, in the place of the one before.
capibara_retire() {
  rm -rf "$1/before" && mv "$1/now" "$1/before"
}

# What was to be stopped is no longer there once it has ended; it is killed when its time to save is over.
capibara_settle() {
  local sent now
  capibara_look "$1/now"
  [ -e "$1/now/stopping" ] || return 0
  if [ "$capibara_is" != running ]; then
    capibara_retire "$1" && capibara_is=absent
  else
    read -r sent < "$1/now/stopping" && read -r now < /proc/uptime &&
      (( ${now%%.*} - sent >= $(< "$1/now/grace_s") )) && kill -s KILL -- "-$capibara_group"
  fi
}
"""
# The first process of the job's group: $0 is the folder, and its arguments are the command, which gets SIGTERM itself.
_RUN = r"""capibara_signalled=
trap capibara_signalled=1 TERM
{ read -r line < "/proc/$$/stat"; fields=(${line##*') '})
echo "$$ ${fields[19]} $(< /proc/sys/kernel/random/boot_id) $(date +%s)" > "$0/process.new"; } || exit
mv "$0/process.new" "$0/process" || exit
exec 9>&- 3>&2 2> "$0/signal"
code=143
if [ -z "$capibara_signalled" ]; then
  "$@" 2>&3 3>&-
  code=$?
fi
# After 137 the shell has said here whether SIGKILL was the cause, which is no exit code.
if [ "$code" != 137 ] || [ ! -s "$0/signal" ]; then
  echo "$code" > "$0/code.new" && mv "$0/code.new" "$0/code"
fi"""


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Ssh(Backend):
    """Linux machines with bash that OpenSSH reaches without a password.

    Attributes:
      hosts: their names with commas between, as ssh takes them: an alias, a host, or user@host.
      python: the interpreter on the hosts that has capibara.
      folder: on each host, for the jobs' logs and what is known of their processes.
      config_file: of ssh, as its -F; None: ~/.ssh/config.
      known_hosts: file with the hosts' keys, in place of those of ssh's configuration; None: those.
      port_of_coordinator: where the first host listens for the others.
      coordinator: the first host's address, as the others reach it; None: its name in --hosts, without the user.
    """

    name: ClassVar[str] = "ssh"
    secret_sources: ClassVar[frozenset[Source]] = frozenset({Source.ENVIRONMENT, Source.SECRET_MANAGER})
    uses_buckets: ClassVar[bool] = False
    has_limit: ClassVar[bool] = False

    hosts: str | None = None
    python: str = "python"
    folder: str = "~/.capibara/jobs"
    config_file: str | None = None
    known_hosts: str | None = None
    port_of_coordinator: int = 8476
    coordinator: str | None = None

    def __post_init__(self) -> None:
        names = [] if self.hosts is None else self.hosts.split(",")
        for name in names:
            if not (_HOST.fullmatch(name) or _is_address(name)):
                raise UserError(
                    f"--hosts: {name!r} must be an alias of ssh, a host or user@host, in letters, digits, -, . and _: "
                    "name any other in ssh's configuration"
                )
        if twice := sorted(name for name in {*names} if names.count(name) > 1):
            raise UserError(f"--hosts names {twice[0]} twice: omit one of them")
        if not (re.match(r"~?/.", self.folder) and self.folder.isprintable()):
            raise UserError(f"--folder={self.folder!r} must begin with / or ~/")
        if not (self.python and self.python.isprintable() and not self.python.startswith("-")):
            raise UserError(f"--python={self.python!r} must be the path of a python, or its name")
        if not 1 <= self.port_of_coordinator <= 65_535:
            raise UserError(f"--port_of_coordinator is {self.port_of_coordinator}, must be from 1 to 65535")
        if self.coordinator is not None and not (_HOST.fullmatch(self.coordinator) or _is_address(self.coordinator)):
            raise UserError(f"--coordinator={self.coordinator!r} must be a host's name or address, without a port")
        for field in ("config_file", "known_hosts"):
            if (file := getattr(self, field)) is not None:  # whoever manages the jobs may work in another folder
                object.__setattr__(self, field, os.path.abspath(os.path.expanduser(file)))
        if self.known_hosts is not None and not re.fullmatch(r"[^\"%$\\]+", self.known_hosts):
            raise UserError(f"--known_hosts={self.known_hosts!r} must be a path without quotes, %, $ and backslashes")

    @property
    def names(self) -> list[str]:
        """The hosts, in the order of their indices.

        Raises:
          UserError: none are set.
        """
        if self.hosts is None:
            raise UserError("--hosts is not set: name the machines as ssh does, e.g. --hosts=gpu0,gpu1")
        return self.hosts.split(",")

    def check(self, spec: JobSpec) -> None:
        no_tpu(self, spec)
        if len(self.names) != spec.slice_.hosts:
            raise UserError(
                f"--hosts={self.hosts} has {len(self.names)} of the {spec.slice_.hosts} hosts of {spec.slice_.name}: name as "
                "many, or change --slice"
            )
        unused = {
            "--image": spec.image,
            "--wheel": spec.bundle.wheel,
            "--priority": spec.priority,
            "--capacity": None if spec.capacity == "on_demand" else spec.capacity,
        }
        for flag, value in unused.items():
            if value is not None:
                why = f"which runs --python={self.python} of hosts that are there already"
                raise UserError(f"{flag}={value} has no effect with launch ssh, {why}: omit it")
        sources = ", ".join(sorted(self.secret_sources))
        for secret in spec.secrets:
            if secret.source not in self.secret_sources:
                where = f"--secret={secret.variable}=... is in {secret.source}"
                raise UserError(f"{where}, which launch ssh cannot read: it reads {sources}")

    def render(self, spec: JobSpec) -> Rendering:
        self.check(spec)
        return Rendering(form=Form.SCRIPT, script="\n".join([*self._head(spec), *self._body(spec), ""]))

    def path(self, *parts: str) -> str:
        """A path within the folder, for bash on a host."""
        return _word("/".join([self.folder.rstrip("/"), *parts]))

    def _head(self, spec: JobSpec) -> list[str]:
        description = {"labels": dict(spec.all_labels), "hosts": self.names}
        return [
            "#!/bin/bash",
            "# Each host of the job runs this, by `bash -s INDEX`. The values of its secrets follow, each with a NUL at its end.",
            FUNCTIONS,
            # A function, so that nothing runs before all of it is there.
            "capibara_start() {",
            f"capibara_hosts=({' '.join(map(shlex.quote, self.names))})",
            'capibara_host="${capibara_hosts[${1:?must be the index of this host}]:?}"',
            f'capibara_folder={self.path(spec.name)}/"$capibara_host"',
            f"capibara_attempt={shlex.quote(attempt_of(spec.all_labels))}",
            f"capibara_job={shlex.quote(json.dumps(description, sort_keys=True))}",
        ]

    def _body(self, spec: JobSpec) -> list[str]:
        exported = [f"export {name}={shlex.quote(value)}" for name, value in spec.environment.items()]
        if len(self.names) > 1:
            exported += [
                f"export JAX_COORDINATOR_ADDRESS={shlex.quote(self._coordinator())} JAX_NUM_PROCESSES={len(self.names)}",
                'export JAX_PROCESS_ID="$1"',
            ]
        inherited = [
            f"IFS= read -r -d '' {item.variable} && export {item.variable} || return {AGAIN}" for item in inherits(spec)
        ]
        python, *arguments = command(spec, python=self.python)
        return [
            *exported,
            *inherited,
            "",
            f"command -v flock > /dev/null && command -v setsid > /dev/null || return {MISSING}",
            'capibara_umask="$(umask)"; umask 077',
            'mkdir -p "$capibara_folder" && exec 9> "$capibara_folder/lock" || return 1',
            f"flock --wait {_LOCK_S} 9 || return {AGAIN}",
            'capibara_settle "$capibara_folder"',
            'if [ "$capibara_is" != absent ]; then',
            '  if [ "$(< "$capibara_folder/now/attempt")" = "$capibara_attempt" ]; then',
            f"    return {EXISTS}",
            '  elif [ "$capibara_is" = running ]; then',
            f"    return {OTHER}",
            "  fi",
            '  capibara_retire "$capibara_folder" || return 1',
            "fi",
            'rm -rf "$capibara_folder/new" "$capibara_folder/now" && mkdir "$capibara_folder/new" &&',
            '  printf "%s\\n" "$capibara_job" > "$capibara_folder/new/job.json" &&',
            '  printf "%s\\n" "$capibara_attempt" > "$capibara_folder/new/attempt" &&',
            f'  echo {spec.grace_s + _END_S} > "$capibara_folder/new/grace_s" &&',
            '  mv "$capibara_folder/new" "$capibara_folder/now" || return 1',
            'umask "$capibara_umask"',
            "# It keeps the lock until its process is on record: so no second one can start, whatever ends this script.",
            f'setsid bash -c {shlex.quote(_RUN)} "$capibara_folder/now" \\',
            f"  {_word(python)} {shlex.join(arguments)} \\",
            '  < /dev/null > "$capibara_folder/now/log" 2>&1 &',
            "exec 9>&-",
            f'flock --wait {_LOCK_S} "$capibara_folder/lock" test -e "$capibara_folder/now/process" || return {AGAIN}',
            f"printf '\\n{MARK}\\n'",
            "}",
            'capibara_start "$@"; exit',
        ]

    def _coordinator(self) -> str:
        host = self.coordinator or self.names[0].rpartition("@")[2]
        return f"{f'[{host}]' if ':' in host else host}:{self.port_of_coordinator}"


def attempt_of(labels: Mapping[str, str]) -> str:
    """The text by which a host knows an attempt from the others of a job."""
    return f"{labels.get('capibara-launch', '0')}-{labels.get('capibara-attempt', '0')}"


def inherits(spec: JobSpec) -> list[Secret]:
    """The secrets whose values the script reads from its input, in this order."""
    return [secret for secret in spec.secrets if secret.source is Source.ENVIRONMENT]


def _is_address(text: str) -> bool:
    try:
        return "%" not in text and ipaddress.ip_address(text).version > 0  # after % any sign may come
    except ValueError:
        return False


def _word(path: str) -> str:
    """A path as one word of bash, which expands ~/ alone."""
    return f'"$HOME"/{shlex.quote(path[2:])}' if path.startswith("~/") else shlex.quote(path)
