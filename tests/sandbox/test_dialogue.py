"""Tests and program in two processes: what crosses, what stays, and what neither may do to the other."""

from __future__ import annotations

import pytest

from capibara.sandbox import sandbox
from capibara.sandbox.sandbox import Holder, Program, Sandbox

LIMITS = Sandbox(seconds=5, holder=Holder.NAMESPACES)
CODE = '''
import asyncio, collections, dataclasses, datetime, decimal, enum, fractions
LIMIT = 10**40
def same(x): return x
def grow(x):
    x.append(4)
    return x
def deep(x): x["a"][0].append(1)
def fails(x): raise ValueError("no", x)
class Own(KeyError): pass
def fails_by_own(x): raise Own(x)
def numbers(n):
    for i in range(n): yield i
def adder(n): return lambda m: n + m
def apply(f, x): return [f(one) for one in x]
async def later(x):
    await asyncio.sleep(0)
    return x
@dataclasses.dataclass
class Point:
    x: int
    y: int = 0
    def move(self, by): return Point(self.x + by, self.y)
class Stack:
    def __init__(self): self.items = []
    def push(self, x): self.items.append(x)
    def pop(self): return self.items.pop()
    def __len__(self): return len(self.items)
def total(node): return 0 if node is None else node.value + total(node.next)
def link(node): node.next = None
def length(x, *, by=1): return len(x) * by
class Colour(enum.IntEnum):
    RED = 1
def red(): return Colour.RED
def tally(x): return collections.Counter(x)
def pair(): return collections.namedtuple("Pair", "a b")(1, 2)
'''  # fmt: skip
GOOD = [
    "for x in (None, True, -1, 2**80, -(2**80), 1.5, float('inf'), 'a\\ud800', b'\\xff', bytearray(b'x'), 1+2j, (1, [2, {3}]),"
    " {1: {(2,): 'x'}}, frozenset({1}), range(1, 9, 2), int, ..., {}, [], set(), ''):\n"
    "    y = same(x)\n    assert y == x and type(y) is type(x), (x, y)",
    "import fractions, decimal, datetime\nfor x in (fractions.Fraction(1, 3), decimal.Decimal('1.10'), datetime.date(2020, 1, 2),"
    " datetime.datetime(2020, 1, 2, 3), datetime.timedelta(1, 2)):\n    assert same(x) == x",
    "nan = same(float('nan'))\nassert nan != nan",
    "x = [1]\nassert grow(x) is x and x == [1, 4]",
    "x = {'a': [[]]}\ny = x['a'][0]\ndeep(x)\nassert y == [1] and x == {'a': [[1]]}",
    "try: fails(3)\nexcept ValueError as error: assert error.args == ('no', 3)\nelse: assert False",
    "try: fails_by_own(3)\nexcept Own as error: assert error.args == (3,)\nelse: assert False",
    "try: fails_by_own(3)\nexcept KeyError: pass\nelse: assert False",
    "assert list(numbers(3)) == [0, 1, 2] and sum(numbers(4)) == 6",
    "assert adder(2)(3) == 5",
    "assert apply(lambda x: x * 2, [1, 2]) == [2, 4] and apply(str, (1,)) == ['1']",
    "import asyncio\nassert asyncio.run(later(3)) == 3",
    "p = Point(1)\nassert p.move(2).x == 3 and p == Point(1) and p != Point(2) and isinstance(p, Point)",
    "s = Stack()\ns.push(5)\nassert len(s) == 1 and s.pop() == 5 and not len(s)",
    "class Node:\n    def __init__(self, value, next=None): self.value, self.next = value, next\n"
    "n = Node(1, Node(2))\nassert total(n) == 3\nlink(n)\nassert n.next is None",
    "assert length([1, 2], by=3) == 6 and LIMIT == 10**40 and red() == 1 and pair() == (1, 2)",
    "assert tally('aab') == {'a': 2, 'b': 1}",
    "assert dataclasses.__name__ == 'dataclasses' and decimal.Decimal(1) == same(1)",
]  # fmt: skip


def test_what_crosses():
    found = sandbox.run_all([Program(code=CODE, tests=tests) for tests in GOOD], LIMITS)
    assert {tests: one.reason for tests, one in zip(GOOD, found) if not one.passed} == {}


def test_wrong_answers_are_wrong():
    for tests, why in {
        "assert same(1) == 2, 'not that'": "AssertionError: not that",
        "fails(1)": "ValueError",
        "assert same_(1)": "NameError",
        "same(1, 2)": "TypeError",
        "assert (": "SyntaxError",
        "import sys; sys.exit(0)": "SystemExit: 0",
        "while True: pass": "out of time",
        "import pathlib\nsame(pathlib.Path())": "the tests hand over PosixPath, which cannot cross",
    }.items():
        assert why in sandbox.run(Program(code=CODE, tests=tests), Sandbox(seconds=2, holder=Holder.NAMESPACES)).reason


def test_names_are_the_tasks_own_before_they_are_the_programs():
    prompt = "import math\ndef helper(x): return x + 1\ndef f(x):\n"
    code = prompt + "    return 7\ndef helper(x): return x\nclass math:\n    pi = 0\ndef abs(x): return 0\n"
    tests = "assert helper(1) == 2 and math.pi > 3 and abs(-1) == 1 and f(0) == 7"
    assert sandbox.run(Program(code=code, tests=tests, prompt=prompt, entry="f"), LIMITS).reason == ""
    own = Program(code="def sum(a, b): return 6\ndef abs(x): return 0", tests="assert sum(10, 15) == 6")
    assert sandbox.run(own, LIMITS).reason == ""  # a task may want what Python has too
    assert not sandbox.run(
        Program(code="def all(x): return True\ndef f(x): return 0", tests="assert all([f(1)])"), LIMITS
    ).passed


def test_the_program_sees_of_the_tests_only_what_it_is_given():
    tests = "class Box:\n    secret = 42\n    def __init__(self): self.open = 1\nassert peek(Box()) == 42"
    for peek in ("__init__", "__class__", "__dict__", "_x"):
        code = f"def peek(box):\n    return box._side.do('get', box, {peek!r}).__globals__['secret']"
        assert not sandbox.run(Program(code=code, tests=tests), LIMITS).passed
    replaced = "def put(box):\n    box.right = lambda *_: True"
    tests = "class Box:\n    def right(self): return False\nb = Box()\nput(b)\nassert b.right()"
    assert not sandbox.run(Program(code=replaced, tests=tests), LIMITS).passed


@pytest.mark.parametrize(
    "text, tests",
    {
        "def f(): return 1\nassert f() == 1\n": "assert f() == 1\n",
        "def f(): pass\ndef g(h): pass\n\ndef check(c):\n    assert c\n\ncheck(f)": "def check(c):\n    assert c\n\ncheck(f)",
        "def check(c): pass\ndef f(): pass\ndef check(c):\n    assert c\nX = 1\ncheck(f)": "def check(c):\n    assert c\nX = 1\ncheck(f)",
        "import os\nassert os.getpid()": "",
        "def f(): pass\nf()": "",
        "def (": "",
        "": "",
        "x = 1; assert x": "",
    }.items(),
    ids=repr,
)  # fmt: skip
def test_a_text_is_parted_where_its_tests_begin(text, tests):
    found = sandbox.parted(text)
    assert found.tests == tests and found.code + found.tests == text
