"""The user's own modules: an error in them, or of a call that does not fit them, is one line that says where."""

from __future__ import annotations

import sys
import textwrap

import pytest

from capibara import config
from capibara.core import user_modules
from capibara.core.types import UserError
from capibara.multihost import exits


@pytest.fixture
def load(tmp_path, monkeypatch):
    """(name, code) -> the user's module of this name."""
    monkeypatch.setattr(user_modules, "_roots", {})
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)

    def load(name, code):
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(code))
        loaded.append(name)
        return user_modules.load(name)

    loaded = []
    yield load
    for name in loaded:
        del sys.modules[name]


@pytest.fixture
def ends(capsys):
    """(call) -> exit code and stderr of a verb that makes this call."""

    def ends(call):
        code = exits.run_verb(lambda argv: call() and 0, [])
        return code, capsys.readouterr().err

    return ends


def test_an_error_in_them_names_the_line(load, ends):
    mine = load("raising", "class Mine:\n    def rule(self):\n        return {}['nosuch']\n")
    code, line = ends(lambda: mine.Mine().rule())
    assert code == 2 and line.startswith("error: raising.py:3, Mine.rule: KeyError: 'nosuch': ")
    assert line.count("\n") == 1


def test_they_do_not_end_a_verb_silently(load, ends):
    mine = load("leaving", "import sys\ndef log():\n    sys.exit(3)\n")
    code, line = ends(mine.log)
    assert code == 2 and line.startswith("error: leaving.py:3, log: SystemExit: 3: ")
    with pytest.raises(SystemExit, match="0"):  # argparse's, after --help
        exits.run_verb(lambda argv: sys.exit(0), [])


def test_what_is_no_exception_ends_all_processes_with_a_line(load, ends, monkeypatch):
    reports = []
    monkeypatch.setattr(exits, "_leaving_peers", lambda code, message: reports.append(message) or code)
    mine = load("cancelled", "import asyncio\ndef tool():\n    raise asyncio.CancelledError('late')\n")
    code, line = ends(mine.tool)
    assert code == 2 and line.startswith("error: cancelled.py:3, tool: CancelledError: late: ")
    assert [f"error: {message}\n" for message in reports] == [line]


def test_nor_when_they_are_imported(tmp_path, ends):
    (tmp_path / "a_script.py").write_text("import sys\n\nsys.exit(0)\n")
    (tmp_path / "of_a_script.gin").write_text("import a_script\n")
    user_modules.search(tmp_path)
    code, line = ends(lambda: user_modules.load("a_script"))
    assert code == 2 and "a_script cannot be imported: " in line and "a_script.py:3: SystemExit: 0: mend it" in line
    code, line = ends(lambda: config.parse([str(tmp_path / "of_a_script.gin")], [], []))
    assert code == 2 and "of_a_script.gin:1: a_script cannot be imported: " in line and "SystemExit: 0" in line


def test_a_library_that_they_call_is_not_to_blame(load, ends):
    mine = load("calling", "import json\ndef parse():\n    return json.loads('{')\n")
    code, line = ends(mine.parse)
    assert code == 2 and line.startswith("error: calling.py:3, parse: JSONDecodeError: ")


@pytest.mark.parametrize(
    "call, where",
    [
        (lambda mine: mine.Mine().rule(1), "misfit.py:4, Mine.rule: TypeError: "),
        (lambda mine: mine.metric(), "misfit.py:8, metric: TypeError: "),
        (lambda mine: mine.Abstract(), "misfit.py:11, Abstract: TypeError: "),
    ],
)
def test_a_call_that_does_not_fit_names_what_was_called(load, ends, call, where):
    mine = load(
        "misfit",
        """\
        import abc

        class Mine:
            def rule(self):
                return 1


        def metric(targets):
            return targets

        class Abstract(abc.ABC):
            @abc.abstractmethod
            def rule(self): ...
        """,
    )
    code, line = ends(lambda: call(mine))
    assert code == 2 and line.startswith(f"error: {where}") and line.count("\n") == 1


def test_faults_of_capibara_keep_their_traceback(load, ends):
    load("innocent", "def rule():\n    return 1\n")
    with pytest.raises(ZeroDivisionError):
        ends(lambda: user_modules.is_own(1 / 0))


def test_a_server_that_is_gone_is_worth_another_try(load, ends):
    mine = load("remote", "def send():\n    raise ConnectionError('no answer')\ndef read():\n    open('nosuch')\n")
    assert ends(mine.send)[0] == 75 and ends(mine.read)[0] == 2


def test_the_traceback_is_there_on_demand(load, ends, monkeypatch):
    mine = load("shown", "def rule():\n    return 1 / 0\n")
    monkeypatch.setenv(user_modules.TRACEBACK, "1")
    assert "Traceback" in ends(mine.rule)[1]
    mine = load("shown_exit", "import sys\ndef rule():\n    sys.exit(3)\n")
    assert "Traceback" in ends(mine.rule)[1]


@pytest.mark.parametrize(
    "code, said",
    [
        ("x = 1\n1 / 0\n", r"broken.py:2: ZeroDivisionError"),
        ("def f(:\n", r"broken.py:1: SyntaxError"),
        ("undefined\n", r"broken.py:1: NameError"),
    ],
)
def test_a_module_that_cannot_be_imported(tmp_path, monkeypatch, code, said):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "broken.py").write_text(code)
    (tmp_path / "run.gin").write_text("# a run\nimport broken\n")
    with pytest.raises(UserError, match=f"run.gin:2: broken cannot be imported: {said}"):
        config.parse(["run.gin"])
