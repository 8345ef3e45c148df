"""The script that each TPU VM of a queued resource runs when it starts."""

from __future__ import annotations

import hashlib
import shlex

from capibara.jobs import bundle
from capibara.jobs.backends.backend import command
from capibara.jobs.spec import JobSpec

# What the hosts of a job install beside capibara.
_EXTRAS = "tpu,gcs"


def script(spec: JobSpec) -> str:
    """A bash script that installs capibara, or pulls its image, and runs the job's command; root runs it at each start.

    The folder CAPIBARA_HOME (/opt/capibara) keeps what is installed, so that a VM that starts again resumes at once. The
    log is in /var/log/capibara.log, and in the VM's serial port, as that of all start-up scripts.
    """
    lines = [
        "#!/bin/bash",
        f"# Runs the job {spec.name}: written by capibara launch.",
        "set -euo pipefail",
        'home="${CAPIBARA_HOME:-/opt/capibara}"',
        'mkdir -p "$home" && cd "$home"',
        'exec > >(tee -a "${CAPIBARA_LOG:-/var/log/capibara.log}") 2>&1',
        *(f"export {name}={shlex.quote(value)}" for name, value in spec.environment.items()),
        *(_container(spec) if spec.image is not None else _installed(spec)),
    ]
    return "\n".join([*lines, ""])


def _container(spec: JobSpec) -> list[str]:
    assert spec.image is not None
    registry = spec.image.partition("/")[0]
    options = [option for name in spec.environment for option in ("--env", name)]
    run = ["docker", "run", "--rm", "--privileged", "--network=host", f"--stop-timeout={spec.grace_s + 30}", *options]
    return [
        f"gcloud auth configure-docker --quiet {shlex.quote(registry)}",
        f"docker pull {shlex.quote(spec.image)}",
        _supervised(shlex.join([*run, spec.image, *command(spec)]), spec),
    ]


def _installed(spec: JobSpec) -> list[str]:
    wheel, digest = spec.bundle.wheel, hashlib.sha256(bundle.sums(spec.bundle.files)).hexdigest()
    assert wheel is not None
    url = spec.bundle.url
    return [
        f'files="$home/files-{digest[:16]}"',
        'if [ ! -e "$files/installed" ]; then',
        '  python=""',
        "  for candidate in python3.13 python3.12 python3.11 python3; do",
        "    if \"$candidate\" -c 'import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \\",
        '      2>/dev/null; then python="$candidate"; break; fi',
        "  done",
        '  if [ -z "$python" ]; then  # Ubuntu 22.04 comes with 3.10',
        "    apt-get update && apt-get install --yes python3.11 python3.11-venv",
        "    python=python3.11",
        "  fi",
        '  mkdir -p "$files"',
        f'  gcloud storage cp {shlex.quote(f"{url}/{bundle.SUMS}")} {shlex.quote(f"{url}/{wheel}")} "$files/"',
        '  cd "$files"',
        f"  echo {shlex.quote(f'{digest}  {bundle.SUMS}')} | sha256sum --check --quiet",
        f"  grep --fixed-strings {shlex.quote(f'  {wheel}')} {bundle.SUMS} | sha256sum --check --quiet",
        '  "$python" -m venv --clear "$files/venv"',
        f'  "$files/venv/bin/python" -m pip install --quiet {shlex.quote(f"./{wheel}[{_EXTRAS}]")}',
        '  cd "$home" && touch "$files/installed"',
        "fi",
        _supervised(f'"$files/venv/bin/python" {shlex.join(command(spec)[1:])}', spec),
    ]


def _supervised(run: str, spec: JobSpec) -> str:
    """The last line: a service of its own gets SIGTERM when the VM is taken, and the time to save a checkpoint."""
    unit = ["systemd-run", "--unit=capibara", "--collect", "--pipe", "--wait"]
    unit += ["--property=KillMode=mixed", f"--property=TimeoutStopSec={spec.grace_s + 30}"]
    unit += [f"--setenv={name}" for name in spec.environment]
    return (
        "# A service of its own gets SIGTERM when the VM is taken, and the time to save a checkpoint.\n"
        'if [ -d /run/systemd/system ] && [ -z "${CAPIBARA_HOME:-}" ]; then\n'
        f"  exec {shlex.join(unit)} {run}\n"
        "fi\n"
        f"exec {run}"
    )
