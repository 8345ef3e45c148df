"""Slurm, by its own commands on a login node: sbatch, squeue, sacct, scancel and scontrol.

A job's labels are its comment. squeue lists a job until MinJobAge after its end (5 minutes by default); sacct lists it for days,
in clusters whose accounting stores comments (AccountingStoreFlags=job_comment). Formats and states: slurm.schedmd.com/squeue.html
and sacct.html; messages: those of Slurm 22.05.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
import threading
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

from capibara.core.types import UserError
from capibara.jobs.backends.backend import Backend
from capibara.jobs.spec import JobSpec
from capibara.jobs.systems.system import CALL_S, Busy, Denied, Exists, Phase, Resource, System

_LOG_LINES, _LOG_BYTES = 1000, 1 << 20
_LOOK_S = 0.1  # between two tries to get the lock
_LONGEST = 300  # characters of a message of Slurm's
_STATES = {
    Phase.WAITING: "PENDING CONFIGURING REQUEUED REQUEUE_FED REQUEUE_HOLD RESIZING RESV_DEL_HOLD SPECIAL_EXIT SUSPENDED",
    Phase.RUNNING: "RUNNING SIGNALING STOPPED",
    Phase.SUCCEEDED: "COMPLETED",
    Phase.FAILED: "BOOT_FAIL DEADLINE FAILED LAUNCH_FAILED OUT_OF_MEMORY REVOKED TIMEOUT",
    Phase.PREEMPTED: "NODE_FAIL PREEMPTED",
    Phase.CANCELLED: "CANCELLED",
    Phase.DELETING: "COMPLETING STAGE_OUT",  # its end is not known yet
}
_PHASES = {state: phase for phase, states in _STATES.items() for state in states.split()}
_NO_REASON = ("", "None", "(null)")
# The user's defaults that may stay in the environment of sbatch; there any other SBATCH_ variable beats the script.
_DEFAULTS = ("ACCOUNT", "CONSTRAINT", "PARTITION", "QOS", "RESERVATION")
_BUSY = re.compile(
    r"timed out|unable to contact|temporarily|connection (refused|reset)|connect failure|connection failure|"
    r"zero bytes|standby mode|resource temporarily|problem talking to the database|slurm_persist_conn",
    re.IGNORECASE,
)
_NOT_HERE = re.compile(r"configuration source|slurm\.conf", re.IGNORECASE)
_GONE = re.compile(r"invalid job id|already (finished|completing)|already completed", re.IGNORECASE)
_NO_ACCOUNTING = re.compile(r"accounting storage is disabled", re.IGNORECASE)
# What a message of a command says is missing -> what to ask for.
_ACCOUNT = "name an --account of yours, or ask the cluster's administrators for one"
_QOS = "name a --qos of your account, or ask the cluster's administrators for this one"
_DENIED = {
    r"invalid account": _ACCOUNT,
    r"invalid qos|qos specification": _QOS,
    r"violates accounting|\b(QOS|Assoc)(Max|Grp|Min)\w+": (
        "wait for your other jobs to end, ask for less, or ask the cluster's administrators for a higher limit"
    ),
    r"permission denied|not permitted": "name another --partition, or ask the cluster's administrators for access",
}
_WRONG = {
    r"invalid partition": "name a --partition that sinfo lists",
    r"time limit": "lower --minutes, or name another --partition",
    r"": "change --slice, --cpus or --partition, or ask the cluster's administrators",
}
# Reasons of a job that waits, and would for ever -> what to ask for. Those of other jobs' limits pass.
_FOR_EVER = {
    r"InvalidAccount|AccountNotAllowed": _ACCOUNT,
    r"InvalidQOS|QOSNotAllowed": _QOS,
    r"PartitionTimeLimit|(Assoc|QOS)MaxWallDurationPerJobLimit": (
        "lower --minutes, or ask the cluster's administrators for a higher limit"
    ),
    r"(Assoc|QOS)Max\w+PerJob(Limit)?": (
        "take a smaller --slice or fewer --cpus, or ask the cluster's administrators for a higher limit"
    ),
    r"QOSMin\w+": "take a larger --slice or another --qos",
}


def connect(backend: Backend) -> System:
    """The cluster whose commands this machine has.

    Raises:
      UserError: it has none.
    """
    for command in ("sbatch", "squeue", "scancel", "scontrol"):
        if shutil.which(command) is None:
            raise _missing(command)
    return SlurmCluster(backend)


class SlurmCluster(System):
    """A cluster with Slurm.

    Args:
      backend: Slurm, whose script is submitted.
      call_s: seconds after which a command has failed.
    """

    has_unique_names: ClassVar[bool] = False

    def __init__(self, backend: Backend, *, call_s: float = CALL_S):
        self._backend, self._call_s = backend, call_s

    def submit(self, spec: JobSpec) -> None:
        """Submits the script in the current folder, where its log will be.

        Slurm takes the same script as often as it comes. So the job is looked up first, under a lock.
        """
        script = self._backend.render(spec).script
        for secret in spec.secrets:
            if secret.name not in os.environ:
                raise UserError(
                    f"--secret={secret.variable}=env:{secret.name}: {secret.name} is not set here: export it"
                )
        with _locked(self._call_s) as lock:
            for item in self.resources():
                is_same = (item.attempt.launch, item.attempt.number) == (spec.attempt.launch, spec.attempt.number)
                if item.job == spec.name and (is_same or not item.phase.has_ended):
                    raise Exists(f"job {item.id} ({item.job})")
            self._sbatch(script, lock)

    def resources(self) -> list[Resource]:
        # The comment, in which others may have any character, comes last.
        listed = self._run("squeue", "--me", "--noheader", "--states=all", "-o", "%i|%T|%V|%r|%k")
        result = {item.id: item for item in _read(listed, ("id", "state", "time", "reason", "comment"))}
        recorded = self._sacct(f"--user={os.getuid()}", "--starttime=now-7days", "--format=JobID,State,Submit,Comment")
        # What squeue does not list has ended, even if the accounting has not heard of it yet.
        known = _read(recorded, ("id", "state", "time", "comment"))
        return [*result.values(), *(item for item in known if item.id not in result and item.phase.has_ended)]

    def delete(self, resource: Resource) -> None:
        """Cancels the job. The run has KillWait of the cluster (30 s by default) to save a checkpoint."""
        # Else the script, whose run ends by SIGTERM, would put its job back into the queue. A job that has ended has no such flag.
        with contextlib.suppress(_Failed, Denied):
            self._run("scontrol", "update", f"JobId={resource.id}", "Requeue=0")
        try:
            self._run("scancel", resource.id)
        except _Failed as error:
            if not _GONE.search(str(error)):
                raise

    def log(self, spec: JobSpec, resource: Resource) -> Iterator[str]:
        path = pathlib.Path(self._output(spec, resource.id))
        try:
            return iter(_tail(path))
        except FileNotFoundError:
            return iter([f"there is no log yet: {path.absolute()} does not exist"])
        except OSError as error:
            return iter([f"the log {path.absolute()} cannot be read: {error.strerror}"])

    def close(self) -> None:
        pass

    def _output(self, spec: JobSpec, number: str) -> str:
        """The path of a job's output; one in the current folder if nobody knows the job any more."""
        try:
            shown = self._run("scontrol", "show", "job", number)
            if result := re.search(r"^\s*StdOut=(.+)$", shown, re.MULTILINE):
                return result[1].replace("%j", number)
        except _Failed as error:
            if not _GONE.search(str(error)):
                raise
        folders = self._sacct(f"--jobs={number}", "--format=WorkDir").splitlines()
        return os.path.join(*folders[:1], f"{spec.name}-{number}.log")

    def _sacct(self, *options: str) -> str:
        """What the accounting says of jobs; nothing if there is none."""
        if shutil.which("sacct") is None:
            return ""
        try:
            return self._run("sacct", "--noheader", "--parsable2", "--allocations", *options)
        except _Failed as error:
            if not _NO_ACCOUNTING.search(str(error)):
                raise
            return ""

    def _sbatch(self, script: str, lock: int) -> None:
        """Submits a script.

        Whoever is killed meanwhile, sbatch still runs and may submit the job. It must not be missed by another submit: so it
        inherits the lock and keeps it until it ends, is in a session of its own, which no Ctrl-C reaches, and has the whole
        script from a file, not a part of it from a pipe. For the same reason it is not killed if it takes too long.
        """
        with tempfile.TemporaryFile() as whole, tempfile.TemporaryFile() as errors:
            whole.write(script.encode())
            whole.seek(0)
            try:
                process = subprocess.Popen(
                    ["sbatch", "--parsable"],
                    stdin=whole,
                    stdout=subprocess.DEVNULL,
                    stderr=errors,
                    env=_environment(script),
                    pass_fds=(lock,),
                    start_new_session=True,
                )
            except FileNotFoundError:
                raise _missing("sbatch") from None
            try:
                code = process.wait(self._call_s)
            except subprocess.TimeoutExpired:
                threading.Thread(target=process.wait, daemon=True).start()
                raise Busy(f"sbatch has not answered after {self._call_s:g} s") from None
            if code:
                errors.seek(0)
                raise _fault("sbatch", errors.read().decode(errors="replace"), UserError, _WRONG)

    def _run(self, *command: str) -> str:
        """What a command prints.

        Raises:
          _Failed: it has failed; every such error is a Busy, too.
        """
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=self._call_s,
                env=_environment(),
                check=False,
            )
        except FileNotFoundError:
            raise _missing(command[0]) from None
        except subprocess.TimeoutExpired:
            raise Busy(f"{command[0]} has not answered after {self._call_s:g} s") from None
        if done.returncode:
            raise _fault(command[0], (done.stderr or done.stdout).decode(errors="replace"), _Failed)
        if done.stdout and not done.stdout.endswith(b"\n"):
            raise Busy(f"{command[0]} has sent a part of its answer only")
        return done.stdout.decode(errors="replace")


class _Failed(Busy):
    """A command that looks or cancels has failed for a reason that is not known to last."""


def _missing(command: str) -> UserError:
    return UserError(f"{command} is not on this machine: run this on a login node of the cluster")


def _fault(
    command: str, output: str, other: type[Exception], fixes: Mapping[str, str] = types.MappingProxyType({})
) -> Exception:
    """The error for what a command says.

    Args:
      command: its name.
      output: its message.
      other: the error for messages that are none of the known ones.
      fixes: of those; pattern -> what the user can do.
    """
    lines = (re.sub(r"^\w+: (error|fatal): ", "", line.strip()) for line in output.splitlines())
    text = f"{command}: {'; '.join(filter(None, lines))[:_LONGEST] or 'it has failed without a message'}"
    if _NOT_HERE.search(output):
        return UserError(f"{text}: run this on a login node of the cluster")
    if _BUSY.search(output):
        return Busy(text)
    if fix := _first(_DENIED, output):
        return Denied(f"{text}: {fix}")
    fix = _first(fixes, output)
    return other(f"{text}: {fix}" if fix else text)


def _first(texts: Mapping[str, str], output: str) -> str | None:
    """The text of the first pattern that a message has."""
    return next((text for pattern, text in texts.items() if re.search(pattern, output, re.IGNORECASE)), None)


def _environment(script: str | None = None) -> dict[str, str]:
    """The environment of a command, without the variables that would change what it does; of sbatch for a script.

    The job has the environment of sbatch, too.
    """

    def stays(name: str) -> bool:
        if name.startswith(("SQUEUE_", "SACCT_", "SCANCEL_", "SCONTROL_")):
            return False
        if script is None:
            return not name.startswith("SBATCH_")
        # What launches is itself on no accelerator, and may be a job.
        if name == "JAX_PLATFORMS" or (name.startswith("SLURM_") and name not in ("SLURM_CONF", "SLURM_CLUSTERS")):
            return False
        option = name.removeprefix("SBATCH_")
        return option == name or (option in _DEFAULTS and f"#SBATCH --{option.lower()}=" not in script)

    times = {"SLURM_TIME_FORMAT": "standard"} if script is None else {}
    return {**{name: value for name, value in os.environ.items() if stays(name)}, **times}


@contextlib.contextmanager
def _locked(longest_s: float) -> Iterator[int]:
    """The file of a lock that one submit of this user's has at a time.

    Raises:
      Busy: another one has it, or an sbatch that was started by another one and still runs.
    """
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    folder = pathlib.Path(state).expanduser() / "capibara"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        number = os.open(folder / "slurm.lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise UserError(
            f"{folder} cannot be written ({error.strerror}): set XDG_STATE_HOME to another folder"
        ) from None
    try:
        try:
            _lock(number, longest_s)
        except OSError as error:
            raise UserError(f"{folder} has no locks ({error.strerror}): set XDG_STATE_HOME to another folder") from None
        yield number
    finally:
        os.close(number)


def _lock(number: int, longest_s: float) -> None:
    until_s = time.monotonic() + longest_s
    while True:
        try:
            return fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until_s:
                raise Busy(f"another sbatch of this user has not ended after {longest_s:g} s") from None
            time.sleep(_LOOK_S)


def _read(listed: str, fields: Sequence[str]) -> Iterator[Resource]:
    """The jobs that have labels, of lines with these fields."""
    for line in listed.splitlines():
        job = dict(zip(fields, line.split("|", len(fields) - 1)))
        labels, state, reason = _labels(job.get("comment", "")), job.get("state", ""), job.get("reason", "")
        if "capibara-job" in labels and job["id"].isdigit():  # else it is another job, or one of an array
            phase = _PHASES.get(state.partition(" ")[0], Phase.WAITING)  # CANCELLED by 1000
            fix = _for_ever(reason) if phase is Phase.WAITING else None
            text = state if reason in _NO_REASON else f"{state}: {reason}"
            yield Resource(
                id=job["id"],
                labels=labels,
                phase=phase,
                reason=f"{text}: {fix}" if fix else text,
                created_s=_seconds(job["time"]),
                is_denied=fix is not None,
            )


def _for_ever(reason: str) -> str | None:
    """What to ask for if a job waits for a reason that does not pass; None: it may."""
    return next((fix for pattern, fix in _FOR_EVER.items() if re.fullmatch(pattern, reason)), None)


def _labels(comment: str) -> Mapping[str, str]:
    return {key: value for key, equals, value in (pair.partition("=") for pair in comment.split(",")) if equals}


def _seconds(text: str) -> float:
    try:
        return datetime.datetime.fromisoformat(text).timestamp()  # of this machine's time zone, as Slurm writes it
    except ValueError:
        return 0.0


def _tail(path: pathlib.Path) -> Sequence[str]:
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _LOG_BYTES))
        lines = file.read(_LOG_BYTES).decode(errors="replace").splitlines()
    return lines[-_LOG_LINES:]
