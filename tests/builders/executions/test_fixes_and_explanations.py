"""A fix is paired with its error; what is said of either rests on facts."""

from __future__ import annotations

import dataclasses
import time

import pytest

from capibara.builders.executions import chats, explanations
from capibara.builders.executions.chats import ChatKind, ExecutionChats
from capibara.builders.executions.fixes import Fix, FixPairs, Pairing, similarity
from capibara.builders.executions.reading import Execution, Failure, Form, Result
from capibara.builders.executions.runs import analysed
from capibara.core.types import UserError

pytest.importorskip("tree_sitter_sql")
WRONG = "values = [1, 2, 3]\nfor i in range(4):\n    print(values[i])\n"
RIGHT = "values = [1, 2, 3]\nfor i in range(3):\n    print(values[i])\n"


def traceback(code, line, name, value):
    """As IPython writes it."""
    text = code.split("\n")[line - 1]
    head = f"{name}        Traceback (most recent call last)\nCell In[1], line {line}\n"
    return f"{'-' * 75}\n{head}----> {line} {text}\n\n{name}: {value}"


def run(code, error=None, line=None, **fields):
    """A run; `error` is (name, value)."""
    failure = None
    if error is not None:
        trace = traceback(code, line, *error) if line else ""
        failure = Failure(name=error[0], value=error[1], traceback=trace)
    base = {"path": "a", "line": 1, "form": Form.EXECUTION, "code": code, "language": "python", "failure": failure}
    return analysed(Execution(**{**base, **fields}), "a:1")


def index_error(**fields):
    return run(WRONG, ("IndexError", "list index out of range"), 3, **fields)


def test_a_passing_run_after_a_failing_one_is_its_fix():
    pairing = Pairing(FixPairs())
    assert pairing.add(index_error(), "s") is None
    fix = pairing.add(run(RIGHT), "s")
    assert (fix.before.execution.code, fix.after.execution.code, fix.attempts) == (WRONG, RIGHT, 1)
    assert 0.9 < fix.similarity < 1
    assert pairing.add(run(RIGHT), "s") is None  # it is mended


def test_several_attempts_are_one_fix():
    pairing = Pairing(FixPairs())
    other = run(WRONG.replace("4", "5"), ("IndexError", "list index out of range"), 3)
    for one in (index_error(), run("x = 5"), other):
        assert pairing.add(one, "s") is None
    fix = pairing.add(run(RIGHT), "s")
    assert (fix.before, fix.attempts) == (other, 2)


@pytest.mark.parametrize(
    ("before", "after", "sessions"),
    [
        (index_error(), run(RIGHT), ("s", "t")),
        (index_error(), run("import os\nprint(os.listdir())\n"), ("s", "s")),
        (index_error(), run(RIGHT, language="javascript"), ("s", "s")),
        (index_error(time_s=20.0), run(RIGHT, time_s=10.0), ("s", "s")),
        (run("consume(it)", ("NameError", "name 'consume' is not defined"), 1), run("consume(other)"), ("s", "s")),
        (run("def f(x):\n    return x / 0\n", ("A", ""), 1), run("def g(x):\n    return x / 1\n"), ("s", "s")),
    ],
    ids=["another session", "other code", "another language", "earlier", "short code", "another function"],
)
def test_what_is_no_fix(before, after, sessions):
    pairing = Pairing(FixPairs())
    pairing.add(before, sessions[0])
    assert pairing.add(after, sessions[1]) is None


def test_the_same_code_that_passes_later_is_no_fix():
    pairing = Pairing(FixPairs())
    pairing.add(index_error(), "s")
    assert pairing.add(run(f"{WRONG}\n\n"), "s") is None
    assert pairing.unchanged == 1


def test_only_the_last_runs_are_remembered():
    pairing = Pairing(FixPairs(window=2, sessions=1))
    pairing.add(index_error(), "s")
    for _ in range(2):
        pairing.add(run("x = 5"), "s")
    assert pairing.add(run(RIGHT), "s") is None
    pairing.add(index_error(), "s")
    pairing.add(run("x = 5"), "s")
    assert pairing.add(run(RIGHT), "s") is not None  # two runs later
    pairing.add(index_error(), "s")
    pairing.add(run("x = 5"), "t")  # the session "s" is forgotten
    assert pairing.add(run(RIGHT), "s") is None


def test_similarity_is_that_of_words_and_signs():
    assert similarity("a = b + c", "a=b+c") == 1
    assert similarity("a = b + c", "a = b + d") == pytest.approx(0.8)
    assert similarity("a b", "c d", least=0.5) == 0
    long = "x = 1\n" * 3000
    assert similarity(long, long + "y = 2\n") == 0  # longer than is compared


def test_wrong_settings_are_refused():
    with pytest.raises(UserError, match=r"FixPairs.min_similarity \(0.0\)"):
        FixPairs(min_similarity=0.0)
    with pytest.raises(UserError, match=r"FixPairs.window \(0\)"):
        FixPairs(window=0)
    with pytest.raises(UserError, match=r"ExecutionChats.min_sentences \(0\)"):
        ExecutionChats(min_sentences=0)


def test_the_failing_line_is_named_if_the_traceback_shows_it():
    found = explanations.of_failure(index_error())
    assert found.text == (
        "The code fails with `IndexError: list index out of range` in line 3, `print(values[i])`. "
        "An index in this line is past the end of its sequence."
    )


def test_the_tracebacks_of_plain_python_are_read():
    plain = (
        'Traceback (most recent call last):\n  File "<stdin>", line 2, in <module>\nZeroDivisionError: division by zero'
    )
    library = '  File "/usr/lib/python3/json/decoder.py", line 1, in decode\n'
    for trace in (plain, plain.replace("ZeroDivisionError:", f"{library}ZeroDivisionError:")):
        one = run("x = 1\nx / 0", failure=Failure(name="ZeroDivisionError", value="division by zero", traceback=trace))
        assert explanations.locate(one.execution) == (2, "x / 0")


def test_a_line_that_the_code_does_not_have_is_not_named():
    one = index_error()
    other = dataclasses.replace(one.execution, code=WRONG.replace("print(values[i])", "print(values[i] + 1)"))
    assert explanations.locate(other) is None
    text = explanations.of_failure(dataclasses.replace(one, execution=other)).text
    assert text == "The code fails with `IndexError: list index out of range`."


def test_nothing_is_said_if_the_traceback_ends_with_another_error():
    one = run(WRONG, failure=Failure(name="KeyError", value="1", traceback=traceback(WRONG, 3, "IndexError", "x")))
    assert explanations.of_failure(one).sentences == ()
    assert explanations.of_failure(run("x")).sentences == ()


@pytest.mark.parametrize(
    ("code", "line", "error", "cause"),
    [
        ("import os\nprnt(1)", 2, ("NameError", "name 'prnt' is not defined"), "does not define it"),
        ("def f():\n    x += 1\n    x = 2\nf()", 2, ("UnboundLocalError", "cannot access local variable 'x'"), "before it has a value"),
        ("import pandas as pd", 1, ("ModuleNotFoundError", "No module named 'pandas'"), "`pandas` is imported, but"),
        ("f(1 / 0)", 1, ("ZeroDivisionError", "division by zero"), "A divisor in this line is zero."),
        ("d['a']", 1, ("KeyError", "'a'"), "The key 'a' is not in the mapping."),
        ("x.foo()", 1, ("AttributeError", "'int' object has no attribute 'foo'"), "type `int` has no attribute `foo`"),
        ("1 + 'a'", 1, ("TypeError", "unsupported operand type(s) for +: 'int' and 'str'"), "operator `+` was used on"),
        ("f(1)", 1, ("TypeError", "f() missing 1 required positional argument: 'b'"), "The call of `f` does not have"),
        ("x()", 1, ("TypeError", "'int' object is not callable"), "called as if it were a function"),
        ("int('a')", 1, ("ValueError", "invalid literal for int() with base 10: 'a'"), "The text 'a' is no whole number."),
        ("open('a')", 1, ("FileNotFoundError", "[Errno 2] No such file or directory: 'a'"), "The file 'a' does not exist"),
        ("assert x == 1", 1, ("AssertionError", ""), "The condition of this assertion does not hold."),
        ("print(", 1, ("SyntaxError", "'(' was never closed"), "The code does not parse."),
        ("def f(n):\n    return f(n)\nf(1)", 2, ("RecursionError", "maximum recursion depth exceeded"), "without an end"),
    ],
)  # fmt: skip
def test_causes_are_said_where_the_code_supports_them(code, line, error, cause):
    assert cause in explanations.of_failure(run(code, error, line)).text


@pytest.mark.parametrize(
    ("code", "line", "error"),
    [
        ("import os\nfoo(1)", 2, ("NameError", "name 'prnt' is not defined")),
        ("import numpy", 1, ("ModuleNotFoundError", "No module named 'pandas'")),
        ("f('a / b')", 1, ("ZeroDivisionError", "division by zero")),
        ("f(x)", 1, ("KeyError", "'a'")),
        ("x.bar()", 1, ("AttributeError", "'int' object has no attribute 'foo'")),
        ("g(1)", 1, ("TypeError", "f() missing 1 required positional argument: 'b'")),
        ("print(1)", 1, ("SyntaxError", "invalid syntax")),
        ("f(1)", 1, ("RecursionError", "maximum recursion depth exceeded")),
    ],
)
def test_causes_that_the_code_does_not_support_are_not_said(code, line, error):
    assert len(explanations.of_failure(run(code, error, line)).sentences) == 1


@pytest.mark.parametrize(
    ("code", "value", "cause"),
    [
        ("SELECT a FROM users", "no such table: users", "The table `users` does not exist"),
        ("SELECT a FROM users", "no such table: orders", None),
        ("SELECT age FROM users", 'column "age" does not exist', "No table of the query has a column `age`"),
    ],
)
def test_errors_of_databases_are_explained(code, value, cause):
    text = explanations.of_failure(run(code, ("OperationalError", value), language="sql")).text
    assert cause in text if cause else text.count(".") == 1


def test_code_is_explained_by_its_tree_and_output():
    code = "import json\ndef fib(n):\n    return n if n < 2 else fib(n - 1) + fib(n - 2)\nprint(fib(7))"
    assert explanations.of_code(run(code, stdout="13\n")).text == (
        "It defines the function `fib`. A function calls itself. It imports the module `json`. It uses a conditional. "
        "It prints `13`."
    )
    value = Result(texts={"text": "4"}, formats=("text",), is_main=True)
    assert explanations.of_code(run("2 + 2", results=(value,))).text == "Its value is `4`."
    assert explanations.of_code(run("2 + 2")).sentences == ()


def test_a_fix_is_explained_by_what_changed():
    fix = Fix(before=index_error(), after=run(RIGHT, stdout="1\n2\n3\n"), similarity=0.97, attempts=1)
    assert explanations.of_fix(fix).text == (
        "The fix changes line 2 from `for i in range(4):` to `for i in range(3):`. It then runs without an error. It prints "
        "3 lines, the first of which is `1`."
    )
    before = run("print(math.pi)", ("NameError", "name 'math' is not defined"), 1)
    fix = Fix(before=before, after=run("import math\nprint(math.pi)"), similarity=0.8, attempts=1)
    assert explanations.of_fix(fix).text == "The fix imports `math`. It then runs without an error."


def test_a_large_change_is_not_explained():
    other = "\n".join(f"y{i} = {i}" for i in range(5))
    fix = Fix(before=index_error(), after=run(other), similarity=0.7, attempts=1)
    assert explanations.of_fix(fix).sentences == ()


def kinds(one, **settings):
    return [chat["kind"] for chat in chats.of_run(one, ExecutionChats(**settings))]


def test_conversations_are_made():
    assert kinds(run(RIGHT, stdout="1\n2\n3\n", task="Print three numbers.")) == ["task", "explain", "predict"]
    assert kinds(index_error()) == ["diagnose"]
    assert kinds(run("x = 1")) == []
    chat = chats.of_fix(Fix(before=index_error(), after=run(RIGHT), similarity=0.9, attempts=1), ExecutionChats())
    question, answer = (message["content"] for message in chat["messages"])
    assert [message["role"] for message in chat["messages"]] == ["user", "assistant"]
    assert WRONG.strip() in question and "IndexError: list index out of range" in question
    assert answer.endswith(f"```python\n{RIGHT}```")


def test_only_wanted_conversations_are_made():
    one = run(RIGHT, stdout="1\n2\n3\n", task="Print three numbers.")
    assert kinds(one, kinds=(ChatKind.PREDICT,)) == ["predict"]
    assert kinds(one, min_sentences=9) == ["task", "predict"]
    assert kinds(one, max_characters=50) == []


@pytest.mark.parametrize(
    ("code", "stdout"),
    [
        ("print(total)", "42\n"),
        ("print(object())", "<object object at 0x7f31b2e17000>\n"),
        ("import random\nprint(random.random())", "0.5\n"),
        ("print('a')", "/home/<PERSONAL:user:1>/a\n"),
        ("x = 1", ""),
    ],
    ids=["another cell", "an address", "chance", "a placeholder", "nothing"],
)
def test_output_that_the_code_does_not_determine_is_not_asked_for(code, stdout):
    assert "predict" not in kinds(run(code, stdout=stdout))


@pytest.mark.parametrize(
    ("code", "is_whole"),
    [
        ("x = 1\nprint(x)", True),
        ("print(x)", False),
        ("def f(n):\n    return f(n - 1)\nprint([f(i) for i in range(3)])", True),
        ("def f(n):\n    return n + shift", False),
        ("from m import *\nf()", False),
        ("def f():\n    global x\n    x = 1\nf()\nx", True),
        ("x = (", False),
    ],
)
def test_code_that_needs_another_cell_is_recognised(code, is_whole):
    assert chats.is_self_contained(code) is is_whole


def test_a_fence_is_longer_than_those_within():
    question = chats.of_fix(
        Fix(before=run('s = """\n```\n"""\nx', ("NameError", "x"), 4), after=run("s"), similarity=1.0, attempts=1),
        ExecutionChats(),
    )["messages"][0]["content"]
    assert '````python\ns = """\n```\n"""\nx\n````' in question


def failing(value="v", trace="", name="KeyError"):
    one = Execution(
        path="a", line=1, form=Form.EXECUTION, code="x[0]", failure=Failure(name=name, value=value, traceback=trace)
    )
    return analysed(one, "a:1")


def test_a_line_number_without_end_is_none():
    for trace in (f"----> {'9' * 5000} x[0]\nKeyError: v", f'File "x", line {"9" * 5000}\nKeyError: v'):
        assert explanations.locate(failing(trace=trace).execution) is None


@pytest.mark.parametrize(
    "one",
    [
        {"value": "a" * 50_000, "name": "ReferenceError"},
        {"trace": "a" * 50_000 + " x\nKeyError: v"},
        {"trace": 'File "<x>", line 7\n' * 50_000 + "KeyError: v"},
    ],
    ids=["message", "name", "frames"],
)
def test_a_hostile_error_takes_no_longer(one):
    run = failing(**one)
    begin = time.process_time()
    explanations.of_failure(run)
    assert time.process_time() - begin < 3  # some 0.1 s; with quadratic patterns a minute
