"""Runs a verb with the files of a bundle: what each host of a job runs.

`python -m capibara.launch staged --url=gs://bucket/jobs/NAME/HASH --sha256=... -- train --gin_file=run.gin`
"""

from __future__ import annotations

import argparse
import os
import pathlib
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence

from capibara.cli.launching.local import check_verb
from capibara.core.types import TryAgain, UserError
from capibara.multihost import exits

_DESCRIPTION = """Run a verb with the files that a job has staged, and restart it; a job calls this, not a user.

exit codes: those of the verb; 128 + N if signal N stopped it"""

_TERMINATED = 128 + signal.SIGTERM
REST_S = 10.0  # after maintenance was announced, before the run starts again


def main(argv: Sequence[str]) -> int:
    """Unpacks the bundle, reads the secrets, runs the verb and reports on it; returns the exit code."""
    options, verb = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    parser = argparse.ArgumentParser("capibara launch staged", description=_DESCRIPTION, allow_abbrev=False)
    parser.add_argument("where", choices=("staged",), metavar="staged")
    parser.add_argument("--url", required=True, help="the folder of the bundle")
    parser.add_argument("--sha256", required=True, help="of its SHA256SUMS")
    parser.add_argument("--reports", default="", metavar="URL", help="the folder for this host's report")
    parser.add_argument("--restarts", type=int, default=3, metavar="N", help="most restarts")
    parser.add_argument("--grace", type=float, default=300.0, metavar="S", help="seconds to save after SIGTERM")
    parser.add_argument("--secret", action="append", default=[], metavar="VARIABLE=NAME", help="of Secret Manager")
    parser.add_argument("--maintenance", action="store_true", help="take maintenance that is announced as SIGTERM")
    args = parser.parse_args(list(options))
    check_verb(verb)
    from capibara.jobs.reports import Reporter

    with Reporter(args.reports, say=_say) as reporter:
        try:
            code = _run(args, verb)
        except (UserError, TryAgain) as error:
            reporter.end(exits.EXIT_USER_ERROR if isinstance(error, UserError) else exits.EXIT_HUNG, str(error))
            raise
        except Exception as error:
            reporter.end(exits.EXIT_FAULT, f"{type(error).__name__}: {error}")
            raise
        if code not in (_TERMINATED, exits.EXIT_INTERRUPTED):  # its system starts it again, or has deleted it
            reporter.end(code, f"see its log for why {verb[0]} has ended" if code else "")
        return code


def _run(args: argparse.Namespace, verb: Sequence[str]) -> int:
    from capibara.jobs import bundle, secret_manager, secrets
    from capibara.jobs.local import Supervisor

    for secret in map(secrets.parse, args.secret):
        os.environ[secret.variable] = secret_manager.read(secret.name)
    with tempfile.TemporaryDirectory(prefix="capibara-job-") as folder:
        bundle.unpack(args.url, args.sha256, pathlib.Path(folder))
        work = pathlib.Path(folder) / bundle.FOLDER / "0"
        work.mkdir(parents=True, exist_ok=True)
        os.chdir(work)
        supervisor = Supervisor(
            command=[sys.executable, "-m", f"capibara.{verb[0].replace('-', '_')}", *verb[1:]],
            restarts=args.restarts,
            grace_s=args.grace,
        )
        try:
            return _through_maintenance(supervisor.run) if args.maintenance else supervisor.run()
        finally:
            os.chdir("/")


def _through_maintenance(run: Callable[[], int]) -> int:
    """Runs it, and once more after each SIGTERM that announced maintenance, until the host really goes."""
    from capibara.jobs.maintenance import Maintenance

    stopped = threading.Event()  # by a signal that arrives while nothing runs
    before = signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    try:
        with Maintenance(say=_say) as maintenance:
            code = run()
            while code == _TERMINATED and maintenance.was_announced() and not maintenance.is_preempted():
                if stopped.wait(REST_S):  # by a second announcement, or by another process
                    stopped.clear()
                    continue
                _say("the run starts again until the maintenance begins")
                code = run()
            return code
    finally:
        signal.signal(signal.SIGTERM, before)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
