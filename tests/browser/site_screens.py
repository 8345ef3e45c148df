"""The site in headless Chromium: eight pages at two widths and in two themes, axe-core, what is cut, and the search.

    python tests/browser/site_screens.py SITE OUT [--modules=FOLDER] [--chromium=PATH] [--pages=index,tutorial]

Serves the folder SITE, as `make site` builds it, and writes PNG files and findings.json into OUT. The exit code is 1 if
anything serious was found: by axe-core, an error of a script, a page wider than its window, words or pictures that are cut,
or a search that finds nothing. Needs what dashboard_screens.py needs.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import http.server
import json
import pathlib
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator

import dashboard_screens

HERE = pathlib.Path(__file__).resolve().parent
PAGES = "index,tutorial,python,examples,concepts,benchmarks,migrating_from_trl,reference/training"
LOOK_S = 900


class Handler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments: object) -> None:
        pass


@contextlib.contextmanager
def served(site: pathlib.Path) -> Iterator[str]:
    """The address of a server of a folder."""
    handler = functools.partial(Handler, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def main(argv: list[str] | None = None) -> int:
    """Looks at the site; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("site", type=pathlib.Path)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--modules", type=pathlib.Path, default=dashboard_screens.MODULES)
    parser.add_argument("--chromium", default=shutil.which("chromium") or shutil.which("chromium-browser"))
    parser.add_argument("--pages", default=PAGES)
    args = parser.parse_args(argv)
    lacking = dashboard_screens.missing(args.modules, args.chromium)
    pages = args.pages.split(",")
    lacking += [f"{name}.html of the site: make site" for name in pages if not (args.site / f"{name}.html").is_file()]
    if lacking:
        print("error: not here:", *lacking, sep="\n  ", file=sys.stderr)
        return 2
    with served(args.site) as address:
        settings = {"address": address, "out": str(args.out.resolve()), "modules": str(args.modules.resolve())}
        settings |= {"chromium": args.chromium, "pages": pages}
        look = ["node", str(HERE / "site_screens.mjs"), json.dumps(settings)]
        return subprocess.run(look, timeout=LOOK_S).returncode


if __name__ == "__main__":
    sys.exit(main())
