"""Stand-ins for Slurm's commands, one program under their names in a folder for PATH: what Slurm 22.05 does, as far as it is used.

Jobs run: as processes of this machine, each "node" as one process of srun. A test puts files into the folder:
  slow-COMMAND    the command does nothing until the file is gone
  fail-COMMAND    the command prints this and fails
  half-COMMAND    the second half of what the command prints is missing
  storm           so many calls more, of any command, fail as when the controller has too many
  hold            jobs wait, for this reason
  no-accounting   there is no accounting
and reads `calls`, a line for each call.
"""

import contextlib
import datetime
import fcntl
import io
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

COMMANDS = ("sbatch", "squeue", "sacct", "scancel", "scontrol", "srun")
KILL_WAIT_S = 5.0
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "PREEMPTED", "NODE_FAIL", "TIMEOUT", "OUT_OF_MEMORY")
# Of `man sbatch`.
OPTIONS = frozenset(
    "account acctg-freq array batch bb bbf begin chdir cluster-constraint clusters comment constraint container contiguous "
    "core-spec cores-per-socket cpu-freq cpus-per-gpu cpus-per-task deadline delay-boot dependency distribution error exclude "
    "exclusive export export-file extra-node-info get-user-env gid gpu-bind gpu-freq gpus gpus-per-node gpus-per-socket "
    "gpus-per-task gres gres-flags hint hold ignore-pbs input job-name kill-on-invalid-dep licenses mail-type mail-user "
    "mcs-label mem mem-bind mem-per-cpu mem-per-gpu mincpus network nice no-kill no-requeue nodefile nodelist nodes ntasks "
    "ntasks-per-core ntasks-per-gpu ntasks-per-node ntasks-per-socket open-mode output overcommit oversubscribe parsable "
    "partition power prefer priority profile propagate qos quiet reboot requeue reservation signal sockets-per-node "
    "spread-job switches test-only thread-spec threads-per-core time time-min tmp uid use-min-nodes verbose wait "
    "wait-all-nodes wckey wrap".split()
)


def install(folder):
    """Writes the commands into a folder."""
    folder.mkdir()
    path = os.path.dirname(os.path.abspath(__file__))
    text = f"#!{sys.executable} -ES\nimport sys\nsys.path.insert(0, {path!r})\nimport fake_slurm\nfake_slurm.main()\n"
    for name in COMMANDS:
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)


@contextlib.contextmanager
def jobs(folder):
    """The jobs by number, to read and to change."""
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        path = folder / "jobs.json"
        known = json.loads(path.read_text()) if path.exists() else {}
        before = json.dumps(known)
        yield known
        if json.dumps(known) != before:
            (folder / "jobs.new").write_text(json.dumps(known))
            (folder / "jobs.new").replace(path)


def _job(comment, state, reason):
    return {
        "comment": comment, "state": state, "reason": reason, "restarts": 0, "steps": [], "is_purged": False,
        "submitted": datetime.datetime.now().isoformat(timespec="seconds"), "is_cancelled": False, "again": False,
    }  # fmt: skip


def add(folder, comment, state, reason="None", **more):
    """Adds a job that has no processes; returns its number."""
    with jobs(folder) as known:
        number = str(len(known) + 1)
        known[number] = {**_job(comment, state, reason), **more}
        return number


def end(folder, number, state, reason="None"):
    """Ends a job as Slurm or its administrators would, its processes with it."""
    with jobs(folder) as known:
        job = known[number]
        if "pid" in job and job["state"] == "RUNNING":
            job["end"] = [state, reason]
            _signal([job["pid"], *job["steps"]], signal.SIGKILL)
        else:
            job["state"], job["reason"] = state, reason


def preempt(folder, number):
    """Takes a job's nodes away and puts it back into the queue, as PreemptMode=REQUEUE does."""
    with jobs(folder) as known:
        known[number]["again"] = True
        _signal([known[number]["pid"], *known[number]["steps"]], signal.SIGKILL)


def purge(folder):
    """As MinJobAge seconds after the jobs' end: only the accounting has those that have ended."""
    with jobs(folder) as known:
        for job in known.values():
            job["is_purged"] = job["state"] in ENDED


def calls(folder, command=""):
    """The calls of a command so far."""
    path = folder / "calls"
    lines = path.read_text().splitlines() if path.exists() else []
    return [line for line in lines if line.startswith(command)]


def _fail(text, code=1):
    print(text, file=sys.stderr)
    sys.exit(code)


def _signal(groups, number):
    for group in groups:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, number)


def _options(script):
    if not script.startswith("#!"):
        _fail("sbatch: error: This does not look like a batch script.  The first")
    found = {}
    for line in script.splitlines()[1:]:
        if line.startswith("#SBATCH "):
            name, _, value = line.removeprefix("#SBATCH ").strip().partition("=")
            if not name.startswith("--") or name[2:] not in OPTIONS:
                _fail(f"sbatch: unrecognized option '{name}'\nTry \"sbatch --help\" for more information", 255)
            found[name[2:]] = value
        elif line.strip() and not line.startswith("#"):
            break
    # Variables beat the script.
    names = {"timelimit": "time"}
    for name, value in os.environ.items():
        if name.startswith("SBATCH_"):
            option = name.removeprefix("SBATCH_").lower().replace("_", "-")
            found[names.get(option, option)] = value
    return found


def sbatch(folder, arguments):
    assert arguments == ["--parsable"], arguments
    script = sys.stdin.read()
    options = _options(script)
    with jobs(folder) as known:
        number = str(len(known) + 1)
        name = options.get("job-name", "sbatch")
        output = options.get("output", "slurm-%j.out").replace("%j", number)
        known[number] = {
            **_job(options.get("comment", "(null)"), "PENDING", "None"), "name": name, "output": os.path.abspath(output),
            "nodes": int(options.get("nodes", 1)), "can_requeue": "no-requeue" not in options, "options": options,
            "folder": os.getcwd(),
        }  # fmt: skip
        (folder / f"script-{number}").write_text(script)
    silent = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    own = {} if options.get("export") != "NONE" else {"env": {"PATH": os.environ["PATH"]}}
    command = [sys.executable, str(folder / "sbatch"), "--run", number]
    running = subprocess.Popen(command, start_new_session=True, **silent, **own)
    if "wait" in options:
        running.wait()
    print(number)


def _run(folder, number):
    """Runs a job, in a process of its own, until it has ended and is not put back into the queue."""
    while True:
        hold = folder / "hold"
        with jobs(folder) as known:
            job = known[number]
            if job["state"] != "PENDING":
                return
            job["reason"] = hold.read_text() if hold.exists() else "None"
            if not hold.exists():
                process = _start(folder, number, job)
                job |= {"state": "RUNNING", "pid": process.pid, "steps": [], "again": False}
        if hold.exists():
            time.sleep(0.02)
            continue
        code = _wait(folder, number, process)
        with jobs(folder) as known:
            job = known[number]
            job["restarts"] += 1
            if "end" in job:
                job["state"], job["reason"] = job["end"]
            elif job["again"]:
                job |= {"state": "PENDING", "reason": "BeginTime", "is_cancelled": False}
            elif job["is_cancelled"]:
                job["state"] = "CANCELLED"
            else:
                job["state"], job["reason"] = ("COMPLETED", "None") if code == 0 else ("FAILED", "NonZeroExitCode")


def _start(folder, number, job):
    own = {
        "SLURM_JOB_ID": number, "SLURM_JOB_NAME": job["name"], "SLURM_JOB_NUM_NODES": str(job["nodes"]),
        "SLURM_RESTART_COUNT": str(job["restarts"]),
    }  # fmt: skip
    with open(job["output"], "ab") as output:
        return subprocess.Popen(
            ["bash", str(folder / f"script-{number}")], env={**os.environ, **own}, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip


def _wait(folder, number, process):
    kill_s = None
    while process.poll() is None:
        time.sleep(0.02)
        with jobs(folder) as known:
            job = known[number]
        if job["is_cancelled"] and kill_s is None:
            kill_s = time.monotonic() + KILL_WAIT_S
        if kill_s is not None and time.monotonic() > kill_s:
            _signal([process.pid, *job["steps"]], signal.SIGKILL)
    return process.returncode


def squeue(folder, arguments):
    assert arguments[:4] == ["--me", "--noheader", "--states=all", "-o"] and len(arguments) == 5, arguments
    with jobs(folder) as known:
        pass
    for number, job in known.items():
        cancelling = job["is_cancelled"] and job["state"] == "RUNNING"
        letters = {
            "i": number, "T": "COMPLETING" if cancelling else job["state"], "V": job["submitted"], "r": job["reason"],
            "k": job["comment"],
        }  # fmt: skip
        if not job["is_purged"]:
            print(re.sub("%([a-zA-Z])", lambda found: letters[found[1]], arguments[4]))


def sacct(folder, arguments):
    flags = dict(argument.partition("=")[::2] for argument in arguments)
    assert {"--noheader", "--parsable2", "--allocations", "--format"} < flags.keys(), arguments
    chosen = flags.keys() - {"--noheader", "--parsable2", "--allocations", "--format"}
    assert chosen == {"--jobs"} or (chosen == {"--user", "--starttime"} and flags["--user"] == str(os.getuid())), chosen
    if (folder / "no-accounting").exists():
        _fail("Slurm accounting storage is disabled")
    with jobs(folder) as known:
        pass
    for number, job in known.items():
        if flags.get("--jobs", number) != number:
            continue
        state = f"CANCELLED by {os.getuid()}" if job["state"] == "CANCELLED" else job["state"]
        comment = "" if job["comment"] == "(null)" else job["comment"]
        fields = {"JobID": number, "State": state, "Submit": job["submitted"], "Comment": comment}
        fields["WorkDir"] = job.get("folder", "")
        print("|".join(fields[name] for name in flags["--format"].split(",")))


def scancel(folder, arguments):
    number = arguments[-1]
    if not number.isdigit():
        _fail(f"scancel: error: Invalid job id {number}")
    with jobs(folder) as known:
        job = known.get(number)
        if job is None or job["state"] in ENDED:
            return
        if arguments[:-1] == ["--signal=TERM"]:
            if job["is_cancelled"]:
                _fail(f"scancel: error: Kill job error on job id {number}: Invalid job id specified")
            _signal(job["steps"], signal.SIGTERM)
            return
        assert len(arguments) == 1, arguments
        if job["state"] == "PENDING":
            job["state"] = "CANCELLED"
        else:
            job["is_cancelled"] = True
            _signal([job["pid"], *job["steps"]], signal.SIGTERM)


def scontrol(folder, arguments):
    with jobs(folder) as known:
        if arguments[:2] == ["show", "job"]:
            job = known.get(arguments[2])
            if job is None or job["is_purged"]:
                _fail("slurm_load_jobs error: Invalid job id specified")
            print(f"JobId={arguments[2]} JobName={job['name']}\n   Comment={job['comment']} \n   StdIn=/dev/null")
            print(f"   StdOut={job['output']}\n   Power=\n")
            return
        number = arguments[1].removeprefix("JobId=")
        job = known.get(number)
        if job is None:
            _fail(f"Invalid job id specified for job {number}")
        if job["state"] in ENDED:
            _fail(f"Job has already finished for job {number}")
        if arguments[0] == "update":
            assert arguments[2:] == ["Requeue=0"], arguments
            job["can_requeue"] = False
        elif not job["can_requeue"]:
            _fail(f"Requested operation is presently disabled for job {number}")
        else:
            assert arguments[0] == "requeue", arguments
            job["again"] = True  # even after scancel
            _signal([job["pid"]], signal.SIGTERM)


def srun(folder, arguments):
    while arguments[0].startswith("--"):
        assert "=" in arguments[0], arguments
        arguments = arguments[1:]
    number, nodes = os.environ["SLURM_JOB_ID"], int(os.environ["SLURM_JOB_NUM_NODES"])
    one = {"SLURM_NTASKS": str(nodes), "SLURM_LOCALID": "0", "SLURM_STEP_NODELIST": "localhost"}
    tasks = [
        subprocess.Popen(arguments, env={**os.environ, **one, "SLURM_PROCID": str(index)}, start_new_session=True)
        for index in range(nodes)
    ]
    with jobs(folder) as known:
        known[number]["steps"] += [task.pid for task in tasks]
        if known[number]["is_cancelled"]:
            _signal(known[number]["steps"], signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda *_: _signal([task.pid for task in tasks], signal.SIGTERM))
    codes = [task.wait() for task in tasks]
    sys.exit(max(code if code >= 0 else 128 - code for code in codes))


def main():
    folder, name = pathlib.Path(sys.argv[0]).resolve().parent, pathlib.Path(sys.argv[0]).name
    if sys.argv[1:2] == ["--run"]:
        return _run(folder, sys.argv[2])
    with open(folder / "calls", "a") as file:
        file.write(f"{' '.join([name, *sys.argv[1:]])}\n")
    while (folder / f"slow-{name}").exists():
        time.sleep(0.02)
    if (folder / f"fail-{name}").exists():
        _fail((folder / f"fail-{name}").read_text())
    with jobs(folder):  # the lock alone
        storm = folder / "storm"
        if (left := int(storm.read_text()) if storm.exists() else 0) > 0:
            storm.write_text(str(left - 1))
            _fail(f"{name}: error: Socket timed out on send/recv operation")
    if not (folder / f"half-{name}").exists():
        return globals()[name](folder, sys.argv[1:])
    with contextlib.redirect_stdout(io.StringIO()) as said:
        globals()[name](folder, sys.argv[1:])
    print(said.getvalue()[: len(said.getvalue()) // 2], end="")
