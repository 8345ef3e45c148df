"""The dashboard in headless Chromium: screenshots at two widths and in two themes, axe-core, and a walk by Tab alone.

    python tests/browser/dashboard_screens.py OUT [--modules=FOLDER] [--chromium=PATH] [--address=URL]
        [--only=run,compare]

Starts the dashboard on demo runs, one of which is live, and writes PNG files and findings.json into OUT. The exit code
is 1 if anything serious was found: by axe-core, by the walk, an error of a script, a page wider than its window, or
text of a run that was taken for a script. Needs Debian's chromium, node, and FOLDER/node_modules with puppeteer-core
and axe-core.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
DEMO = ROOT / "tests/monitoring/dashboard/demo.py"
MODULES = ROOT / "build/browser"
PACKAGES = ("puppeteer-core", "axe-core")
START_S, END_S, LOOK_S = 90, 15, 1_500


def missing(modules: pathlib.Path, chromium: str | None) -> list[str]:
    """What is not installed, each with the command that installs it."""
    found = []
    if chromium is None:
        found.append("Chromium: apt-get install -y chromium, or --chromium=PATH")
    if shutil.which("node") is None:
        found.append("node, 20 or newer: apt-get install -y nodejs npm")
    if not all((modules / "node_modules" / name).is_dir() for name in PACKAGES):
        found.append(f"npm modules: npm install --prefix {modules} {' '.join(PACKAGES)}")
    return found


@contextlib.contextmanager
def process(*argv: str) -> Iterator[subprocess.Popen[str]]:
    """A Python process of the repository, stopped at the end."""
    started = subprocess.Popen([sys.executable, *argv], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        yield started
    finally:
        started.send_signal(signal.SIGTERM)
        try:
            started.wait(END_S)
        except subprocess.TimeoutExpired:
            started.kill()


@contextlib.contextmanager
def served() -> Iterator[str]:
    """The address of a dashboard on demo runs, one of them live."""
    with tempfile.TemporaryDirectory() as folder:
        with process(str(DEMO), folder, "--live"), process("-m", "capibara.dashboard", folder, "--port=0") as server:
            watchdog = threading.Timer(START_S, server.kill)
            watchdog.start()
            assert server.stdout is not None
            line = next((line for line in server.stdout if "http://" in line), None)
            watchdog.cancel()
            if line is None:
                raise SystemExit(f"error: the dashboard did not start within {START_S} s")
            yield line[line.index("http://") :].split()[0].rstrip("/")


def main(argv: list[str] | None = None) -> int:
    """Looks at the dashboard; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--modules", type=pathlib.Path, default=MODULES)
    parser.add_argument("--chromium", default=shutil.which("chromium") or shutil.which("chromium-browser"))
    parser.add_argument("--address", help="of a dashboard that runs already, on such demo runs")
    parser.add_argument("--only", default="", help="pages, such as run,compare; default: all")
    args = parser.parse_args(argv)
    if lacking := missing(args.modules, args.chromium):
        print("error: not installed:", *lacking, sep="\n  ", file=sys.stderr)
        return 2
    with contextlib.nullcontext(args.address) if args.address else served() as address:
        settings = {"address": address, "out": str(args.out.resolve()), "modules": str(args.modules.resolve())}
        settings |= {"chromium": args.chromium, "only": [name for name in args.only.split(",") if name]}
        look = ["node", str(HERE / "dashboard_screens.mjs"), json.dumps(settings)]
        return subprocess.run(look, timeout=LOOK_S).returncode


if __name__ == "__main__":
    sys.exit(main())
