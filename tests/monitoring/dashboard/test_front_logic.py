"""What the scripts of the dashboard's pages compute, run by node where it is installed; a browser is not needed."""

from __future__ import annotations

import pathlib
import re
import shutil
import subprocess

import pytest

HERE = pathlib.Path(__file__).resolve().parent
STATIC = HERE.parents[2] / "capibara/monitoring/dashboard/static"
BROWSER = HERE.parents[1] / "browser"
CHECKS = re.findall(r"^  \"([^\"]+)\"\(\) \{$", (HERE / "front_logic.mjs").read_text(encoding="utf-8"), re.MULTILINE)
needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")


@pytest.fixture(scope="module")
def answers(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("modules")
    for path in STATIC.glob("*.js"):
        shutil.copy(path, folder)
    (folder / "package.json").write_text('{"type": "module"}')  # which a browser reads in the page
    argv = ["node", str(HERE / "front_logic.mjs"), str(folder)]
    done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60)
    return done.stdout


@needs_node
@pytest.mark.parametrize("name", CHECKS)
def test_the_pages_compute_this(name, answers):
    assert f"ok {name}" in answers.splitlines(), answers


@needs_node
@pytest.mark.parametrize(
    "path", [*sorted(STATIC.glob("*.js")), *sorted(BROWSER.glob("*.mjs"))], ids=lambda path: path.name
)
def test_a_script_can_be_parsed(path):
    argv = ["node", "--check", "--input-type=module"]
    done = subprocess.run(argv, input=path.read_text(), capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
