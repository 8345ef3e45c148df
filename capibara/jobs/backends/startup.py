"""The script that each TPU VM of a queued resource runs when it starts."""

from __future__ import annotations

import hashlib
import shlex

from capibara.jobs import bundle
from capibara.jobs.backends.backend import command
from capibara.jobs.spec import JobSpec

# What the hosts of a job install beside capibara.
_EXTRAS = "tpu,gcs"
_REGISTRIES = (".pkg.dev", "gcr.io")  # Google's, to which the machine's account has access


def script(spec: JobSpec) -> str:
    """A bash script that installs capibara, or pulls its image, and runs the job's command; root runs it at each start.

    The folder CAPIBARA_HOME (/opt/capibara) keeps what is installed, so that a VM that starts again resumes at once. The
    log is CAPIBARA_LOG (/var/log/capibara.log).
    """
    lines = [
        "#!/bin/bash",
        f"# Runs the job {spec.name}: written by capibara launch.",
        "set -euo pipefail",
        'capibara_home="${CAPIBARA_HOME:-/opt/capibara}"',
        'capibara_log="${CAPIBARA_LOG:-/var/log/capibara.log}"',
        'mkdir -p "$capibara_home"',
        'cd "$capibara_home"',
        "# What reads the other end may be gone before the run has saved its last checkpoint.",
        'exec > >(trap "" PIPE TERM INT; tee -p -a "$capibara_log") 2>&1',
        'capibara_try() { for pause in 5 15 45 120; do "$@" && return; sleep "$pause"; done; "$@"; }',
        *(_container(spec) if spec.image is not None else _installed(spec)),
    ]
    return "\n".join([*lines, ""])


def _container(spec: JobSpec) -> list[str]:
    assert spec.image is not None
    registry = spec.image.partition("/")[0]
    options = [f"--env={name}={value}" for name, value in spec.environment.items()]
    run = ["docker", "run", "--rm", "--name=capibara", "--privileged", "--network=host", "--ipc=host"]
    run += [f"--stop-timeout={spec.grace_s + 30}", *options, spec.image, *command(spec, "--maintenance")]
    login = f"gcloud auth configure-docker --quiet {shlex.quote(registry)}"
    return [
        *([f"capibara_try {login}"] if registry.endswith(_REGISTRIES) else []),
        f"capibara_try docker pull {shlex.quote(spec.image)}",
        *_supervised(["exec " + shlex.join(run)], spec),
    ]


def _installed(spec: JobSpec) -> list[str]:
    wheel, digest = spec.bundle.wheel, hashlib.sha256(bundle.sums(spec.bundle.files)).hexdigest()
    assert wheel is not None
    url = spec.bundle.url
    folder = f"files-{digest[:16]}"
    exported = [f"export {name}={shlex.quote(value)}" for name, value in spec.environment.items()]
    return [
        f"if [ ! -e {folder}/installed ]; then",
        '  capibara_python=""',
        "  for candidate in python3.13 python3.12 python3.11 python3; do",
        "    if \"$candidate\" -c 'import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \\",
        '      2>/dev/null; then capibara_python="$candidate"; break; fi',
        "  done",
        '  if [ -z "$capibara_python" ]; then  # Ubuntu 22.04 comes with 3.10',
        "    export DEBIAN_FRONTEND=noninteractive",
        "    capibara_try apt-get -o DPkg::Lock::Timeout=600 update",
        "    capibara_try apt-get -o DPkg::Lock::Timeout=600 install --yes python3.11 python3.11-venv",
        "    capibara_python=python3.11",
        "  fi",
        f"  mkdir -p {folder}",
        f"  cd {folder}",
        f"  capibara_try gcloud storage cp {shlex.quote(f'{url}/{bundle.SUMS}')} {shlex.quote(f'{url}/{wheel}')} ./",
        f"  echo {shlex.quote(f'{digest}  {bundle.SUMS}')} | sha256sum --check --quiet",
        f"  grep --fixed-strings {shlex.quote(f'  {wheel}')} {bundle.SUMS} | sha256sum --check --quiet",
        '  "$capibara_python" -m venv --clear venv',
        f"  capibara_try venv/bin/python -m pip install --quiet {shlex.quote(f'./{wheel}[{_EXTRAS}]')}",
        "  touch installed",
        '  cd "$capibara_home"',
        "fi",
        *_supervised(
            [*exported, f"exec {folder}/venv/bin/python {shlex.join(command(spec, '--maintenance')[1:])}"], spec
        ),
    ]


def _supervised(run: list[str], spec: JobSpec) -> list[str]:
    """The last lines: they write the job's own script and run it as a service, or, where there is no systemd, at once."""
    text = "\n".join(["#!/bin/bash", 'cd "$(dirname "$0")"', *run])
    unit = [
        "systemd-run",
        "--unit=capibara",
        "--collect",
        "--property=KillMode=mixed",
        f"--property=TimeoutStopSec={spec.grace_s + 30}",
        # The launcher restarts the run; this restarts a launcher that could not even begin. 2 is the user's mistake.
        "--property=Restart=on-failure",
        "--property=RestartSec=30",
        "--property=RestartPreventExitStatus=2",
    ]
    return [
        f'printf "%s\\n" {shlex.quote(text)} > "$capibara_home/run"',
        "# A service of its own gets SIGTERM when the VM is taken, and the time to save a checkpoint.",
        'if [ -d /run/systemd/system ] && [ -z "${CAPIBARA_HOME:-}" ]; then',
        f'  exec {shlex.join(unit)} --property="StandardOutput=append:$capibara_log" \\',
        '    --property="StandardError=append:$capibara_log" bash "$capibara_home/run"',
        "fi",
        'exec bash "$capibara_home/run"',
    ]
