"""Runs a verb with the files of a bundle: what each host of a job runs.

`python -m capibara.launch staged --url=gs://bucket/jobs/NAME/HASH --sha256=... -- train --gin_file=run.gin`
"""

from __future__ import annotations

import argparse
import os
import pathlib
import sys
import tempfile
from collections.abc import Sequence

from capibara.cli.launching.local import check_verb

_DESCRIPTION = """Run a verb with the files that a job has staged, and restart it; a job calls this, not a user.

exit codes: those of the verb; 128 + N if signal N stopped it"""


def main(argv: Sequence[str]) -> int:
    """Unpacks the bundle, reads the secrets and runs the verb; returns the exit code."""
    own, verb = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    parser = argparse.ArgumentParser("capibara launch staged", description=_DESCRIPTION, allow_abbrev=False)
    parser.add_argument("where", choices=("staged",), metavar="staged")
    parser.add_argument("--url", required=True, help="the folder of the bundle")
    parser.add_argument("--sha256", required=True, help="of its SHA256SUMS")
    parser.add_argument("--restarts", type=int, default=3, metavar="N", help="most restarts")
    parser.add_argument("--grace", type=float, default=300.0, metavar="S", help="seconds to save after SIGTERM")
    parser.add_argument("--secret", action="append", default=[], metavar="VARIABLE=NAME", help="of Secret Manager")
    args = parser.parse_args(list(own))
    check_verb(verb)
    from capibara.jobs import bundle, secret_manager, secrets
    from capibara.jobs.local import Supervisor

    for secret in map(secrets.parse, args.secret):
        os.environ[secret.variable] = secret_manager.read(secret.name)
    with tempfile.TemporaryDirectory(prefix="capibara-job-") as folder:
        bundle.unpack(args.url, args.sha256, pathlib.Path(folder))
        work = pathlib.Path(folder) / bundle.FOLDER / "0"
        work.mkdir(parents=True, exist_ok=True)
        os.chdir(work)
        try:
            return Supervisor(
                command=[sys.executable, "-m", f"capibara.{verb[0].replace('-', '_')}", *verb[1:]],
                restarts=args.restarts,
                grace_s=args.grace,
            ).run()
        finally:
            os.chdir("/")
