"""No name that is not there, used before it is set, or never used; one layout: `make format` mends it."""

import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("command", ["check", "format --check"], ids=lambda command: command.split()[0])
def test_ruff_has_nothing_to_say(command):
    folders = ["capibara", "benchmarks", "tests", "examples"]
    argv = [sys.executable, "-m", "ruff", *command.split(), "--no-cache", *folders]
    done = subprocess.run(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


# Words that were given up, as patterns, and what is said instead (docs/glossary.md).
GIVEN_UP = {
    r"carr(y|ies|ied|ying)[ _]on\b": "resume",
    r"\bAttentionKind\b": "AttentionSpec",
    r"(?<![-.])\bdamaged\b": "corrupted",  # --damaged and STEP.damaged are still known
    r"--objective=": "--goal",
    r"config\.objective\b": "data_kind",
    r"\bmoved aside\b": "quarantined",
    r"(?-i:\bHolds\.[A-Z]|import .*\bHolds\b)": "DataFormat, RecordFormat",
    r"(?-i:\bHeld\(|import .*\bHeld\b)": "ResidentArrays",
    r"(?-i:\bSupply\b)": "BatchProvider",
}


@pytest.mark.parametrize("pattern", GIVEN_UP)
def test_a_word_that_was_given_up_is_said_nowhere(pattern):
    files = [
        path
        for folder in ("capibara", "tests", "benchmarks", "docs", "examples", "gin")
        for path in (ROOT / folder).rglob("*")
    ]
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in [*files, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
        if path.suffix in (".py", ".md", ".gin") and path != pathlib.Path(__file__).resolve()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if re.search(pattern, line, re.IGNORECASE)
    ]
    assert not found, f"say {GIVEN_UP[pattern]}: {', '.join(found)}"


def test_the_glossary_names_places_that_are_there():
    terms = re.findall(
        r"^\| (?!term\b|-)([^|]+) \|[^|]+\|([^|]+)\|$", (ROOT / "docs/glossary.md").read_text(), re.MULTILINE
    )
    assert len(terms) > 40
    gone = [f"{term}: {place}" for term, places in terms for place in re.findall(r"`([^`]+)`", places)
            if not (ROOT / place).exists()]  # fmt: skip
    assert not gone, gone
    each = [name.strip() for term, _ in terms for name in term.split(",")]
    assert len(each) == len({*each}), "a term is there twice"
