"""What tests/heavy_cases.txt leaves out of the short suite is there, and only a part of its subject."""

import ast
import pathlib

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
