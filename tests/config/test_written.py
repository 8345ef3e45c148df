"""Objects written as Gin text, and read again."""

from __future__ import annotations

import dataclasses
import enum
import math
import pathlib
import sys

import numpy as np
import pytest

from capibara import config
from capibara.config import written
from capibara.core.types import UserError
from capibara.training.trainer import Trainer


class Season(enum.StrEnum):
    DRY = "dry"
    WET = "wet"


@config.configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Puddle:
    depth: float = 1.5
    season: Season = Season.DRY


@config.configurable
def hello() -> str:
    return "hello"


@config.configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Flock:
    name: str
    size: int | None = 4
    limit: float = 1.0
    home: Puddle = Puddle()
    away: Puddle | None = None
    puddles: tuple[Puddle, ...] = ()
    shares: dict[str, float] = dataclasses.field(default_factory=dict)
    path: pathlib.Path | None = None
    greet: object = None
    others: tuple[object, ...] = ()
    puddles2: Puddle | None = None
    note: str = dataclasses.field(default="", compare=False)


@config.configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Growing:
    size: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", self.size + 1)


def again(*objects):
    """What the written text builds; the first object of it."""
    text = written.text_of(*objects)
    config.parse([], text.splitlines())
    return config.build(type(objects[0])), text


@pytest.mark.parametrize(
    "value",
    [
        Flock(name="one"),
        Flock(name='"quoted" \\ é 🦫 \n\t%x @y', size=None, limit=-math.inf),
        Flock(name="", limit=math.inf, path=pathlib.Path("a/b"), shares={"a": 0.5, "b": 1e-30}),
        Flock(name="one pond", home=Puddle(season="wet"), puddles=(Puddle(season="wet"), Puddle(season="wet"))),
        Flock(name="ponds", home=Puddle(depth=2.0), away=Puddle(depth=3.0), puddles=(Puddle(), Puddle(depth=2.0))),
        Flock(name="nested", others=((1, "a"), (), {"x": (Puddle(depth=0.25), None, True)})),
        Flock(name="lines \u2028 \x85 \x0b \x00 \u00e9", limit=-0.0, note="kept"),
        Flock(name="zeros", puddles=(Puddle(depth=0.0), Puddle(depth=-0.0))),
        Flock(name="scopes", puddles=(Puddle(depth=1.0), Puddle(depth=2.0)), puddles2=Puddle(depth=3.0)),
        Flock(name="functions", greet=hello, others=(hello, Puddle(depth=9.0))),
    ],
    ids=lambda flock: flock.name[:9],
)
def test_what_is_written_builds_an_equal_object(value):
    config.reset()
    got, text = again(value)
    written.check_same(got, value)
    assert hello in value.others or repr(got) == repr(value), text
    assert got.greet is None or got.greet() == "hello"
    config.reset()
    assert written.text_of(got) == text


def test_equal_objects_are_one_and_others_have_scopes():
    value = Flock(
        name="x", home=Puddle(depth=2.0), away=Puddle(depth=3.0), puddles=(Puddle(depth=2.0), Puddle(depth=4.0))
    )
    lines = written.bindings(value)
    assert lines == [
        'Flock.name = "x"',
        "Flock.home = @home/Puddle()",
        "Flock.away = @away/Puddle()",
        "Flock.puddles = (@home/Puddle(), @puddles/Puddle())",
        "",
        "home/Puddle.depth = 2.0",
        "",
        "away/Puddle.depth = 3.0",
        "",
        "puddles/Puddle.depth = 4.0",
    ]


def test_fields_of_one_name_have_numbered_scopes():
    value = Flock(name="x", puddles=tuple(Puddle(depth=float(n)) for n in range(3)))
    assert "Flock.puddles = (@puddles/Puddle(), @puddles2/Puddle(), @puddles3/Puddle())" in written.bindings(value)
    assert again(value)[0] == value


def test_users_modules_are_imported(tmp_path, monkeypatch):
    (tmp_path / "my_flock.py").write_text(
        "import dataclasses\nfrom capibara.config import configurable\n"
        "@configurable\n@dataclasses.dataclass(frozen=True)\nclass Drove:\n    size: int = 1\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_flock", raising=False)
    import my_flock

    assert written.text_of(my_flock.Drove(size=3)) == "import my_flock\nDrove.size = 3\n"
    assert again(my_flock.Drove(size=3))[0] == my_flock.Drove(size=3)


def test_infinities_are_in_what_a_run_records():
    again(Flock(name="x", limit=math.inf, others=((-math.inf, 1.0),), shares={"a": math.inf}))
    text = config.operative()
    assert "Flock.limit = 1e999" in text
    config.parse([], [line for line in text.splitlines() if line.startswith("Flock.") and "greet" not in line])
    got = config.build(Flock)
    assert (got.limit, got.others, got.shares) == (math.inf, ((-math.inf, 1.0),), {"a": math.inf})


def test_names_of_functions_and_scripts_are_told(tmp_path):
    @config.configurable
    @dataclasses.dataclass(frozen=True)
    class Inner:
        size: int = 1

    assert written.unnamed(Flock(name="x", others=(Inner(), hello))) == ["Inner"]
    assert "import" not in written.text_of(Inner(size=2))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (Growing(size=1), "Growing.size is 2, and Gin text makes 3 of it"),
        (Flock(name="x", others=(Season.WET,)), "Flock.others is "),
        (Flock(name="x", others=(pathlib.Path("a"),)), "Flock.others is "),
        (Flock(name="x", home=Puddle(depth=2.0), others=(Growing(size=1),)), "Flock.others is "),
    ],
)
def test_what_is_not_the_same_again_is_refused(value, words):
    got, _ = again(value)
    with pytest.raises(UserError, match=words):
        written.check_same(got, value)


def test_numbers_of_numpy_are_numbers():
    value = Flock(name="x", limit=np.float64(0.25), size=4, others=(np.float64(0.1),))
    got, text = again(value)
    written.check_same(got, value)
    assert "np." not in text and got.others == (0.1,)


@dataclasses.dataclass(frozen=True)
class Unmarked:
    size: int = 1


def unmarked() -> None: ...


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (
            Flock(name="x", others=(Unmarked(),)),
            "Flock.others has Unmarked of tests.config.test_written, which Gin does not know: mark it",
        ),
        (
            Flock(name="x", greet=unmarked),
            "Flock.greet has unmarked of tests.config.test_written, which Gin does not know",
        ),
        (Flock(name="a\ud800"), "Flock.name is 'a"),
        (Flock(name="x", limit=math.nan), "Flock.limit is nan, which Gin text cannot hold"),
        (Flock(name="x", others=({1, 2},)), "Flock.others is {1, 2}, which Gin text cannot hold"),
    ],
)
def test_what_cannot_be_written_is_named(value, words):
    with pytest.raises(UserError, match="^" + words.replace("{", "\\{").replace(".", "\\.")):
        written.text_of(value)


def test_a_function_that_gin_has_bound_is_refused(tmp_path):
    config.parse([], ["Flock.name = 'x'", "Flock.others = (@numeric_answer,)", "numeric_answer.field = 'result'"])
    with pytest.raises(UserError, match="Flock.others has numeric_answer, whose parameters Gin has bound"):
        written.text_of(config.build(Flock))


def test_two_objects_of_a_class_are_refused():
    with pytest.raises(UserError, match="Puddle is there several times"):
        written.text_of(Puddle(depth=2.0), Flock(name="x", home=Puddle(depth=3.0)))


MODEL = ["models/tiny.gin", "tasks/stdlib.gin"]


@pytest.mark.parametrize(
    ("files", "given"),
    [
        (["quickstart.gin"], []),
        (["base_v5e64.gin"], []),
        ([*MODEL, "runs/lora.gin"], ["INIT_FROM=runs/base"]),
        ([*MODEL, "runs/integrated.gin"], []),
        ([*MODEL, "runs/group_node.gin"], ["NAME=a", "EXCHANGE=there"]),
        (["models/moe_tiny.gin", "tasks/stdlib.gin", "runs/pretrain.gin"], []),
        (["models/t5_small.gin", "tasks/stdlib.gin", "runs/pretrain_t5.gin"], []),
    ],
    ids=lambda value: "-".join(pathlib.Path(one).stem for one in value[-1:]),
)
def test_the_run_of_a_gin_file_is_written_and_built_again(files, given):
    config.parse(files, ["MODEL_DIR=runs/new", "TRAIN_STEPS=100", *given] if len(files) > 1 else given)
    run = config.build(Trainer)
    assert again(run)[0] == run
