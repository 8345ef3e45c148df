"""Runs a program and its tests in two processes: the tests call the program's functions by remote procedure calls.

    tests (`judge`)      run the text of the tests; names that only the program defines are `Remote` objects
    program (`serve`)    runs the program's text, then serves the calls of the tests

The tests' process decides the verdict, so a program that writes to file descriptors, exits early, walks frames or replaces
builtins only changes its own answers. Plain data is copied. Anything else (an object, a generator, a function) stays in its
process, and the other side gets a `Remote` for it. A Remote of the program is never equal to plain data and supports no
operators with it: otherwise an object that claims to equal everything would pass all tests.
"""

from __future__ import annotations

import builtins
import collections
import json
import operator
import os
import socket
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping

TYPE_CHECKING = False  # importing typing for it would be slow
if TYPE_CHECKING:
    from typing import NoReturn

    from capibara.sandbox import wire
else:
    import wire  # in the same folder; `jail` loads it

_BINARY = ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "and", "or", "xor")
_COMPARED = ("eq", "lt", "le", "gt", "ge")
_DONE_TO: dict[str, Callable[..., object]] = {
    "call": lambda target, *args, **kwargs: target(*args, **kwargs),
    "get": getattr, "set": setattr, "len": len, "iter": iter, "next": next, "str": str, "repr": repr, "bool": bool,
    "hash": hash, "item": operator.getitem, "set item": operator.setitem, "delete item": operator.delitem,
    "isinstance": lambda target, value: isinstance(value, target),
    "enter": lambda target: type(target).__enter__(target),
    "exit": lambda target: type(target).__exit__(target, None, None, None),
    **{name: getattr(operator, f"{name}_" if name in ("and", "or") else name) for name in (*_BINARY, *_COMPARED)},
}  # fmt: skip
# Methods of plain data: a test that calls one on an answer expects plain data, not an object of the program.
_PLAIN_METHODS = frozenset().union(*(dir(kind) for kind in wire.TYPES.values()))
_MUTABLE = (list, dict, set, bytearray, collections.deque)
_ALIASES = {"np": "numpy", "pd": "pandas"}
_ROUTINES = (types.FunctionType, types.BuiltinFunctionType, types.MethodType)
_COROUTINE = 0x80  # inspect.CO_COROUTINE; importing inspect is slow
_NEVER_RAISED = (StopIteration, StopAsyncIteration)  # they would end a test's loop instead of failing the test
_CANNOT_BE_READ = (ValueError, LookupError, TypeError, ArithmeticError, AttributeError, RecursionError, MemoryError)


class Remote:
    """A reference to an object of the other process."""

    __slots__ = ("_side", "_number", "_name", "_named")

    def __init__(self, side: Side, number: int, name: str, named: bool = False):
        self._side, self._number, self._name = side, number, name
        self._named = named  # whether it is a class that the tests refer to by a capitalised name, or an instance of it

    def __call__(self, *args: object, **kwargs: object) -> object:
        result = self._side.do("call", self, *args, **kwargs)
        if isinstance(result, Remote):
            result._named = result._named or self._named
        return result

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        if self._side.careful and not self._named and name in _PLAIN_METHODS:
            raise AttributeError(f"the program gave {self._name}, an object of its own, where .{name} was asked for")
        return self._side.do("get", self, name)

    def __setattr__(self, name: str, value: object) -> None:
        if name in Remote.__slots__:
            object.__setattr__(self, name, value)
        else:
            self._side.do("set", self, name, value)

    # Python itself raises if the other side's result is not an iterator or a length.
    def __iter__(self) -> object:
        return self._side.do("iter", self)

    def __exit__(self, *_: object) -> None:
        self._side.do("exit", self)

    def __bool__(self) -> bool:
        return self._side.do("bool", self) is True

    def __len__(self) -> object:
        return self._side.do("len", self)

    def __instancecheck__(self, value: object) -> bool:
        return isinstance(value, Remote) and self._side.do("isinstance", self, value) is True

    def __dir__(self) -> list[str]:
        return []


def _forward(op: str, method: str) -> None:
    def forwarded(self: Remote, *args: object) -> object:
        return self._side.do(op, self, *args)

    def with_another(self: Remote, other: object) -> object:
        if self._side.careful and not isinstance(other, Remote):
            return NotImplemented
        return self._side.do(op, self, other)

    setattr(Remote, method, with_another if op in (*_BINARY, *_COMPARED) else forwarded)


for _op, _method in {
    "next": "next", "str": "str", "repr": "repr", "hash": "hash", "enter": "enter", "item": "getitem",
    "set item": "setitem", "delete item": "delitem", **{name: name for name in (*_BINARY, *_COMPARED)},
}.items():  # fmt: skip
    _forward(_op, f"__{_method}__")


class Side:
    """One end of the connection: sends requests, and serves the other side's requests while it waits.

    Args:
      channel: the socket to the other process.
      careful: whether the other side may be hostile.
      lost: called with the reason when the connection has ended, or with "" if the exit status of the other process is
        the reason; must not return.
    """

    def __init__(self, channel: socket.socket, careful: bool, lost: Callable[[str], NoReturn]):
        self.careful, self._channel, self._lost = careful, channel, lost
        self._exported: list[object] = []
        self._numbers: dict[int, int] = {}
        self._raised: dict[type, int] = {}  # local classes that stand for the other side's exceptions
        self._lock = threading.RLock()

    def refer(self, value: object) -> wire.Json:
        """The JSON reference to a value that is not plain data."""
        if isinstance(value, Remote):
            return ["yours", value._number]
        if isinstance(value, type) and value in self._raised:
            return ["yours", self._raised[value]]
        if (number := getattr(value, "__remote_number__", None)) is not None and isinstance(value, types.FunctionType):
            return ["yours", number]
        if self.careful and not _offered(value):
            self._lost(f"the tests hand over {type(value).__name__}, {wire.CANNOT_CROSS}")
        number = self._numbers.setdefault(id(value), len(self._exported))
        if number == len(self._exported):
            self._exported.append(value)  # keeps it alive, so that its id is not reused
        return ["mine", [number, *_described(value)]]

    def resolve(self, tag: str, part: wire.Json) -> object:
        """The object of a JSON reference."""
        if tag == "yours":
            if not isinstance(part, int) or part < 0:
                raise LookupError(part)
            return self._exported[part]
        if tag != "mine":
            raise ValueError(f"no tag {str(tag)[:20]}")
        number, kind, name, base = wire.as_list(part)
        if not (isinstance(number, int) and isinstance(name, str)):
            raise ValueError("no reference")
        if kind == "exception":
            return self._exception(number, name, base)
        remote = Remote(self, number, name)
        if kind == "function":
            return _function(remote, name)
        return _coroutine_function(remote, name) if kind == "coroutine function" else remote

    def _exception(self, number: int, name: str, base: wire.Json) -> type:
        for known, held in self._raised.items():
            if held == number:
                return known
        created = type(name, (_builtin_exception(base),), {})
        self._raised[created] = number
        return created

    def do(self, op: str, target: object, *args: object, **kwargs: object) -> object:
        """Makes the other side execute an operation; returns the result."""
        parts = [wire.encode(item, self.refer) for item in (target, args, kwargs)]
        with self._lock:
            kind, *result = self.ask(["do", op, *parts])
        if kind == "stop" and op == "next":
            raise StopIteration
        try:
            return self._result(wire.as_text(kind), result, args)
        except _CANNOT_BE_READ as error:
            if getattr(error, "__of_program__", False):
                raise
            self._lost(f"what the program answered cannot be read ({type(error).__name__})")

    def _result(self, kind: str, described: list[wire.Json], args: tuple[object, ...]) -> object:
        if kind == "error":
            raise self._error(*described)
        if kind != "ok":
            raise ValueError(kind)
        value, changed = described
        for number, new in map(wire.as_list, wire.as_list(changed)):
            _merge(args[wire.as_int(number)], wire.decode(new, self.resolve))
        if isinstance(value, list) and value[0] == "argument":
            return args[wire.as_int(value[1])]
        return wire.decode(value, self.resolve)

    def _error(self, kind: wire.Json, args: wire.Json) -> Exception:
        of = wire.as_list(kind)
        created = _builtin_exception(of[1]) if of[0] == "builtin" else wire.decode(kind, self.resolve)
        arguments = wire.decode(args, self.resolve)
        if not (isinstance(created, type) and issubclass(created, Exception) and isinstance(arguments, (tuple, list))):
            raise TypeError("no error")
        error: Exception
        try:
            error = created(*arguments)
        except TypeError:  # some built-in exceptions need more arguments than were sent
            error = RuntimeError(*arguments)
        vars(error)["__of_program__"] = True
        return error

    def ask(self, message: list[wire.Json]) -> list[wire.Json]:
        """Sends a request and returns its answer."""
        try:
            wire.write_message(self._channel, message)
            while True:
                result = wire.read_message(self._channel)
                if result[0] in ("ok", "stop", "error"):
                    return result
                self.answer(result)
        except wire.Broken:
            self._lost("")
        except _CANNOT_BE_READ as error:
            self._lost(f"the dialogue with the program broke ({type(error).__name__})")

    def answer(self, message: list[wire.Json]) -> None:
        """Serves a request."""
        op = ""
        try:
            _, operation, *sent = message
            op = wire.as_text(operation)
            before = [json.dumps(item) for item in wire.as_list(wire.as_list(sent[1])[1])]
            target, args, kwargs = (wire.decode(item, self.resolve) for item in sent)
            if not isinstance(args, tuple) or not isinstance(kwargs, dict):
                raise TypeError("no arguments")
            if self.careful and not _permitted(op, target, args):
                raise TypeError(f"the tests' {type(target).__name__} does not offer that")
            value = _DONE_TO[op](target, *args, **kwargs)
            if op == "call" and isinstance(value, types.CoroutineType):
                import asyncio  # slow to import, and rarely needed

                value = asyncio.run(value)
            answered = self._answered(value, args, before)
        except StopIteration as error:
            answered = ["stop"] if op == "next" else self._described(RuntimeError(f"StopIteration: {error.value}"))
        except wire.Broken:
            raise
        except Exception as error:
            answered = self._described(error)
        wire.write_message(self._channel, answered)

    def _answered(self, value: object, args: tuple[object, ...], before: list[str]) -> list[wire.Json]:
        changed: list[wire.Json] = []
        for number, item in enumerate(args):
            if isinstance(item, _MUTABLE) and json.dumps(new := wire.encode(item, self.refer)) != before[number]:
                changed.append([number, new])
        for number, item in enumerate(args):
            if value is item and isinstance(item, _MUTABLE):
                return ["ok", ["argument", number], changed]
        return ["ok", wire.encode(value, self.refer), changed]

    def _described(self, error: Exception) -> list[wire.Json]:
        kind: type = type(error)
        mine = None if getattr(builtins, kind.__name__, None) is kind or self.careful else self.refer(kind)
        base = next(item for item in kind.__mro__ if item.__module__ == "builtins")
        try:
            arguments = wire.encode(error.args, self.refer)
        except (wire.NotPlain, RecursionError):
            arguments = ["tuple", [str(error)]]
        return ["error", mine or ["builtin", base.__name__], arguments]


def _described(value: object) -> tuple[str, str, str]:
    """The kind of a value, its name, and, for an exception, its built-in base class."""
    name = str(getattr(value, "__name__", None) or type(value).__name__)
    if isinstance(value, type):
        if issubclass(value, Exception):
            return "exception", name, next(item.__name__ for item in value.__mro__ if item.__module__ == "builtins")
        return "class", name, ""
    if isinstance(value, types.FunctionType) and value.__code__.co_flags & _COROUTINE:
        return "coroutine function", name, ""
    if isinstance(value, _ROUTINES):
        return "function", name, ""
    return ("module" if isinstance(value, types.ModuleType) else "object"), name, ""


def _function(remote: Remote, name: str) -> Callable[..., object]:
    def called(*args: object, **kwargs: object) -> object:
        return remote(*args, **kwargs)

    called.__name__ = called.__qualname__ = name
    vars(called)["__remote_number__"] = remote._number
    return called


def _coroutine_function(remote: Remote, name: str) -> Callable[..., object]:
    async def called(*args: object, **kwargs: object) -> object:
        return remote(*args, **kwargs)

    called.__name__ = called.__qualname__ = name
    vars(called)["__remote_number__"] = remote._number
    return called


def _builtin_exception(name: wire.Json) -> type[Exception]:
    kind = getattr(builtins, name, None) if isinstance(name, str) else None
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, _NEVER_RAISED):
        return kind
    return RuntimeError


def _offered(value: object) -> bool:
    """Whether the tests may pass a reference to a value to the program, which can use it as `_permitted` allows."""
    of_tests = getattr(type(value), "__module__", "") == "__main__"
    own_class = isinstance(value, type) and value.__module__ == "__main__"
    return of_tests or own_class or isinstance(value, (*_ROUTINES, Iterator))


def _permitted(op: str, target: object, args: tuple[object, ...]) -> bool:
    """Whether the program may execute an operation on an object of the tests: calls, and public names of their classes."""
    if op == "call":
        return isinstance(target, (type, *_ROUTINES)) or type(target).__module__ == "__main__"
    if op in ("iter", "next"):
        return isinstance(target, Iterator) or type(target).__module__ == "__main__"
    if isinstance(target, type) or type(target).__module__ != "__main__":
        return op in ("bool", "hash", "repr", "str", "eq")
    if op in ("get", "set"):
        name = args[0]
        if not isinstance(name, str) or name.startswith("_"):
            return False
        return op == "get" or not callable(getattr(type(target), name, None))
    return op in _DONE_TO


def _merge(old: object, new: object) -> object:
    """Updates a container in place to equal a new one; elements of the same kind are updated in place, too."""
    if type(old) is not type(new) or not isinstance(old, _MUTABLE):
        return new
    if isinstance(old, dict) and isinstance(new, dict):
        merged = {key: _merge(old[key], item) if key in old else item for key, item in new.items()}
        old.clear()
        old.update(merged)
    elif isinstance(old, set) and isinstance(new, set):
        old.clear()
        old.update(new)
    elif isinstance(old, bytearray) and isinstance(new, bytearray):
        old[:] = new
    elif isinstance(old, (list, collections.deque)) and isinstance(new, (list, collections.deque)):
        retained = [_merge(item, other) for item, other in zip(old, new)]
        rest = list(new)[len(retained) :]
        old.clear()
        old.extend([*retained, *rest])
    return old


def serve(channel: socket.socket, run: Callable[[str], dict[str, object]], ended: Callable[[str], NoReturn]) -> None:
    """The program's side: runs its text with `run`, then serves the tests' requests. Does not return."""
    side = Side(channel, careful=False, lost=ended)
    names = run(wire.as_text(wire.read_message(channel)[1]))
    while True:
        message = wire.read_message(channel)
        if message[0] == "ready":
            wire.write_message(channel, message)
        elif message[0] == "look":
            result = [name for name in map(wire.as_text, wire.as_list(message[1])) if name in names]
            wire.write_message(channel, ["ok", {name: wire.encode(names[name], side.refer) for name in result}])
        else:
            side.answer(message)


def judge(channel: socket.socket, job: Mapping[str, str], failed: Callable[[str], NoReturn]) -> None:
    """The tests' side: returns if the tests pass, and calls `failed` if the connection ends before.

    Args:
      channel: the socket to the program's process.
      job: the attributes of a `sandbox.Program`.
      failed: as `lost` of a Side.

    Raises:
      Exception: whatever the tests raise.
    """
    side = Side(channel, careful=True, lost=failed)
    nonce = os.urandom(16).hex()
    try:
        wire.write_message(channel, ["code", job["code"]])
        wire.write_message(channel, ["ready", nonce])
        if wire.read_message(channel) != ["ready", nonce]:
            failed("the program sent an answer in place of its runner")
    except wire.Broken:
        failed("")
    if not job["tests"]:
        return
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    names = module.__dict__
    _give(job, names)
    names.update(_looked_up(side, sorted(_wanted(job, names)), failed))
    exec(compile(job["tests"], "tests.py", "exec", dont_inherit=True), names)


def _give(job: Mapping[str, str], names: dict[str, object]) -> None:
    """Defines the names of the task's prompt (imports, functions, classes, values), except the entry point."""
    import ast

    exec(compile(job["setup"], "setup.py", "exec", dont_inherit=True), names)
    names.pop(job["entry"], None)
    for text in (job["prompt"], job["prompt"] + "\n    pass\n"):  # a prompt may end before a function's body
        try:
            body = ast.parse(text).body
            break
        except (SyntaxError, ValueError):
            body = []
    kinds = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)
    for statement in body:
        if isinstance(statement, kinds) and getattr(statement, "name", None) != job["entry"]:
            try:
                exec(compile(ast.Module([statement], []), "task.py", "exec", dont_inherit=True), names)
            except (ImportError, NameError):  # prose may look like Python; the tests fail if a name is missing
                continue


def _wanted(job: Mapping[str, str], names: Mapping[str, object]) -> set[str]:
    """The names that the tests use from the program: those that neither the task nor Python defines.

    If there are none, names of Python's builtins: a task may ask for a function named sum.
    """
    free = _free_names(job["tests"])
    missing = {name for name in free if name not in names and not hasattr(builtins, name)} | ({job["entry"]} - {""})
    return missing or {name for name in free if name not in names}


def _free_names(text: str) -> set[str]:
    import symtable

    used, defined = set(), set()
    scopes = [symtable.symtable(text, "tests.py", "exec")]
    while scopes:
        scope = scopes.pop()
        scopes += scope.get_children()
        outermost = scope.get_type() == "module"
        for symbol in scope.get_symbols():
            if outermost and (symbol.is_assigned() or symbol.is_imported()):
                defined.add(symbol.get_name())
            elif symbol.is_referenced() and (outermost or symbol.is_global()):
                used.add(symbol.get_name())
    return used - defined


def _looked_up(side: Side, names: list[str], failed: Callable[[str], NoReturn]) -> dict[str, object]:
    """Looks up these names in the program."""
    kind, *result = side.ask(["look", [*names]])
    held: dict[str, object] = {}
    try:
        values = result[0] if kind == "ok" else {}
        if not isinstance(values, dict):
            raise TypeError("no names")
        for name in filter(values.__contains__, names):
            value = wire.decode(values[name], side.resolve)
            if isinstance(value, Remote):
                value._named = name[:1].isupper()
                value = _module(name, wire.as_list(wire.as_list(values[name])[1])) or value
            held[name] = value
    except _CANNOT_BE_READ as error:
        failed(f"the program's names cannot be read ({type(error).__name__})")
    return held


def _module(name: str, described: list[wire.Json]) -> types.ModuleType | None:
    """This process's own module if the name is a module that the program has imported under its usual name."""
    canonical = _ALIASES.get(name, name)
    if described[1:3] != ["module", canonical] or (
        canonical not in sys.stdlib_module_names and canonical not in _ALIASES.values()
    ):
        return None
    return __import__(canonical)
