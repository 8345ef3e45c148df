"""What tests/heavy_cases.txt leaves out of the short suite is there, and only a part of its subject."""

import ast
import pathlib
import subprocess
import sys

TESTS = pathlib.Path(__file__).parent
CASES = [line for line in (TESTS / "heavy_cases.txt").read_text().splitlines() if not line.startswith("#")]


def test_every_heavy_case_is_a_test(heavy_cases_without_a_test):
    """With its parameters, in the files that this run has collected; without them, in all files."""
    assert not heavy_cases_without_a_test, "no such test: remove the lines from tests/heavy_cases.txt"
    assert len(CASES) == len({*CASES})
    known = {}
    for case in CASES:
        path, *names = case.partition("[")[0].split("::")
        if path not in known:
            tree = ast.parse((TESTS / path).read_text())
            known[path] = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        assert known[path] >= {*names}, f"{case} is no test: remove its line from tests/heavy_cases.txt"


def test_each_file_is_in_one_part():
    """tests/storage has several files: each part has some, and together they are all that have tests."""

    def collected(part):
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-n",
            "0",
            "--collect-only",
            f"--part={part}",
            "tests/storage",
        ]
        done = subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        return {line.partition("::")[0] for line in done.stdout.splitlines() if "::" in line}

    first, second = map(collected, ("1/2", "2/2"))
    files = {str(path.relative_to(TESTS.parent)) for path in (TESTS / "storage").rglob("test_*.py")}
    assert first and second and not first & second and first | second == files
