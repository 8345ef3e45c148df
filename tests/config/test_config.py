"""Gin files and command lines, right and wrong: what is built, and the one line that says what is amiss."""

from __future__ import annotations

import dataclasses
import enum
import errno
import gc
import importlib
import pathlib
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

import numpy as np
import pytest

from capibara import config
from capibara.cli.arguments import flags
from capibara.core import extras, fields
from capibara.core.types import UserError
from capibara.multihost import exits
from gin import config as gin_config

CHECKOUT = pathlib.Path(__file__).resolve().parents[2]


class Season(enum.StrEnum):
    DRY = "dry"
    WET = "wet"


class Singer(Protocol):
    def sing(self) -> None: ...


@config.configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Pond:
    depth: float = 1.5
    season: Season = Season.DRY
    corners: tuple[int, ...] = (1, 2)


@config.configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Herd:
    """A config with one of everything."""

    folder: str
    size: int = 4
    pond: Pond | None = None
    ponds: tuple[Pond, ...] = ()
    limit: int | float | None = None
    greet: Callable[[], str] | None = None
    mode: Literal["graze", "swim"] = "graze"
    shares: Mapping[str, float] = dataclasses.field(default_factory=dict)
    path: pathlib.Path | None = None
    night: bool = False
    pair: tuple[str, int] | None = None
    names: Sequence[str] = ()
    anything: Any = None
    singer: Singer | None = None

    def __post_init__(self):
        if self.size > 100:
            raise UserError(f"size ({self.size}) must be at most 100: try 100")


@config.configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class BigHerd(Herd):
    bonus: int = 0


@config.configurable
def whistle(tone: int = 1, *, loud: bool = False) -> str:
    return "whee" * tone


@config.configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class FullDisk:
    folder: str = "runs/x"

    def __post_init__(self):
        raise OSError(errno.ENOSPC, "No space left on device", self.folder)


@config.configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Broken:
    pond: Pond | None = None

    def __post_init__(self):
        Herd()  # a fault of ours, not the user's


@pytest.fixture
def parse(tmp_path, monkeypatch):
    """parse(text, *bindings) parses a file run.gin with that text."""
    monkeypatch.chdir(tmp_path)

    def parse_text(text: str, *bindings: str) -> None:
        pathlib.Path("run.gin").write_text(textwrap.dedent(text))
        config.parse(["run.gin"], bindings)

    return parse_text


@pytest.fixture
def mistake(parse):
    """mistake(text, *bindings) is the one line that parsing and building Herd ends with."""

    def message(text: str, *bindings: str) -> str:
        with pytest.raises(UserError) as caught:
            parse(text, *bindings)
            config.build(Herd)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    return message


class TestBuild:
    def test_files_references_macros_and_the_command_line(self, parse):
        text = """
            MODEL_DIR = "runs/a"
            N = 3
            Herd.folder = %MODEL_DIR
            Herd.size = %N
            Herd.pond = @Pond()
            Herd.ponds = [@Pond(), @deep/Pond()]
            deep/Pond.depth = 9
            Herd:
              greet = @whistle
              limit = 2
            whistle.tone = 2
        """
        parse(text, "MODEL_DIR = runs/b", "Pond.season = wet")
        herd = config.build(Herd)
        assert type(herd) is Herd and type(herd.pond) is Pond
        assert herd.folder == "runs/b" and herd.size == 3 and herd.limit == 2
        assert herd.pond.season is Season.WET
        assert [pond.depth for pond in herd.ponds] == [1.5, 9.0]
        assert herd.greet() == "wheewhee"

    def test_overrides_win_and_python_is_left_alone(self, parse):
        parse("Herd.folder = 'a'\nHerd.size = 7")
        assert config.build(Herd, size=8).size == 8
        assert Herd(folder="b").size == 4

    def test_a_second_parse_starts_anew(self, parse):
        parse("Herd.folder = 'a'\nHerd.size = 7")
        parse("Herd.folder = 'a'")
        assert config.build(Herd).size == 4

    @pytest.mark.parametrize(
        ("value", "meant"),
        [
            ("runs/x", "runs/x"),
            ('"runs/x"', "runs/x"),
            ("'a b'", "a b"),
            ("a=b", "a=b"),
            ("/tmp/2026-11/x", "/tmp/2026-11/x"),
            ("2026-11", "2026-11"),
            ("gs://bucket/x", "gs://bucket/x"),
            ("-1", -1),
            ("1e-3", 1e-3),
            ("None", None),
            ("[1, 2]", [1, 2]),
        ],
    )
    def test_command_line_values(self, parse, value, meant):
        parser = flags.ArgumentParser("x")
        args = flags.parse_arguments(parser, ["--gin.Herd.folder=a", f"--gin.Herd.anything={value}"])
        config.parse([], args.gin_bindings)
        assert config.build(Herd).anything == meant

    def test_module_registered_twice(self, tmp_path, monkeypatch):
        source = "import dataclasses\nfrom capibara.config import configurable\n@configurable\n@dataclasses.dataclass\n"
        (tmp_path / "burrow.py").write_text(source + "class Burrow:\n  n: int = 1\n")
        monkeypatch.syspath_prepend(tmp_path)
        burrow = importlib.import_module("burrow")
        importlib.reload(burrow)
        config.parse([], ["Burrow.n = 5"])
        assert config.build(burrow.Burrow).n == 5

    def test_names_of_capibara_need_no_import(self):
        code = """
            import sys
            from capibara import config
            config.parse([], ["Plan.batch_size = 8"])
            assert "capibara.sharding" in sys.modules and "capibara.optim" not in sys.modules
        """
        subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, cwd=CHECKOUT)

    def test_dynamic_registration(self, parse):
        parse("""
            from __gin__ import dynamic_registration
            from capibara import sharding
            sharding.Plan.batch_size = 16
        """)
        from capibara.sharding import Plan

        assert config.build(Plan).batch_size == 16
        with pytest.raises(UserError, match="^run.gin:3: sharding.Pln: .* no attribute Pln"):
            parse("from __gin__ import dynamic_registration\nfrom capibara import sharding\nsharding.Pln.x = 1")

    def test_a_fault_of_ours_is_not_the_users(self, parse):
        parse("Broken.pond = @Pond()")
        with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'folder'"):
            config.build(Broken)


class TestMistakes:
    """Each is one line with the place, the name, and the nearest right one."""

    def test_unknown_names(self, mistake):
        assert mistake("\nHerdd.size = 3") == "run.gin:2: no configurable named Herdd: did you mean Herd?"
        assert mistake("Herd.sise = 3") == "run.gin:1: Herd has no parameter sise: did you mean size?"
        assert "run.gin:2: Herd has no parameter sise" in mistake("Herd:\n  sise = 3")
        assert "run.gin:2: no configurable named @Pnd: did you mean Pond?" == mistake("X = 1\nHerd.pond = @Pnd()")
        assert "run.gin:3: no configurable named @Pnd" in mistake("Herd.ponds = [\n  @Pond(),\n  @Pnd()]")
        assert "whistle has no parameter lowd: did you mean loud?" in mistake("whistle.lowd = True")
        assert "command line: Herd.sise = 3: Herd has no parameter sise" in mistake("", "Herd.sise = 3")

    def test_macros(self, mistake):
        text = "TRAIN_STEPS = 3\nHerd.folder = 'a'\nHerd.size = %TRAIN_STEP"
        assert mistake(text) == "run.gin:3: %TRAIN_STEP has no value: did you mean TRAIN_STEPS?"
        text = "TRAIN_STEPS = 3\nHerd.folder = 'a'\nHerd.size = %TRAIN_STEPS"
        assert mistake(text, "TRAIN_STEP = 5") == (
            "--gin.TRAIN_STEP: no Gin file uses TRAIN_STEP: did you mean TRAIN_STEPS?"
        )
        assert "%DEPTH has no value" in mistake("Herd.ponds = (1, [%DEPTH])")

    def test_missing_values(self, mistake):
        assert mistake("Herd.size = 1") == (
            "Herd.folder has no value: bind it in a Gin file or with --gin.Herd.folder=VALUE"
        )
        text = "MODEL_DIR = %gin.REQUIRED\nHerd.folder = %MODEL_DIR"
        assert mistake(text) == "Herd.folder has no value: set it with --gin.MODEL_DIR=VALUE"
        assert "--gin.Herd.folder=VALUE" in mistake("Herd.folder = %gin.REQUIRED")

    @pytest.mark.parametrize(
        ("binding", "message"),
        [
            ("Herd.size = '3'", "Herd.size ('3') must be int, not str: leave out the quotes"),
            ("Herd.size = nan", "Herd.size ('nan') must be int, not str: give a finite number"),
            ("Herd.size = 1e4", "Herd.size (10000.0) must be int, not float: write 10000"),
            ("Herd.size = 1.5", "Herd.size (1.5) must be int, not float"),
            ("Herd.size = True", "Herd.size (True) must be int, not bool"),
            ("Herd.size = None", "Herd.size (None) must be int, not None"),
            ("Herd.night = 1", "Herd.night (1) must be bool, not int: True or False"),
            ("Herd.night = true", "Herd.night ('true') must be bool, not str: write True"),
            ("Herd.folder = 3", "Herd.folder (3) must be str, not int: quote it"),
            ("Herd.pond = @Pond", "the class was not called, write @Pond() with the brackets"),
            ("Herd.pond = 3", "Herd.pond (3) must be Pond | None, not int"),
            ("Herd.ponds = [3]", "Herd.ponds ([3]) must be tuple[Pond, ...], not list"),
            ("Herd.mode = 'swin'", "Herd.mode is 'swin': did you mean 'swim'? (one of 'graze', 'swim')"),
            ("Herd.mode = 'nap'", "Herd.mode is 'nap', must be one of 'graze', 'swim'"),
            ("Herd.names = 'abc'", "must be Sequence[str], not str: write ('abc',)"),
            ("Herd.pair = ('a', 1, 2)", "must be tuple[str, int] | None, not tuple: give 2 values, got 3"),
            ("Herd.greet = 3", "Herd.greet (3) must be a function | None, not int"),
            ("Pond.season = wett", "Pond.season is 'wett': did you mean 'wet'? (one of "),
            ("Pond.season = 3", "Pond.season (3) must be Season, not int: one of "),
            ("Pond.corners = '4'", "Pond.corners ('4') must be tuple[int, ...], not str: write (4,)"),
            ("Pond.corners = 'a'", "Pond.corners ('a') must be tuple[int, ...], not str: write ('a',)"),
            ("Pond.corners = (1, 'a')", "Pond.corners ((1, 'a')) must be tuple[int, ...], not tuple"),
            ("Herd.size = 101", "size (101) must be at most 100: try 100"),
        ],
    )
    def test_wrong_types(self, mistake, binding, message):
        assert message in mistake("Herd.folder = 'a'\nHerd.pond = @Pond()", binding)

    def test_where_a_wrong_value_was_bound(self, mistake):
        assert mistake("Herd.folder = 'a'\n\nHerd.size = 'x'").endswith("(run.gin:3)")
        assert mistake("N = 'x'\nHerd.folder = 'a'\nHerd.size = %N").endswith("(from N, run.gin:1)")
        assert mistake("N = 3\nHerd.folder = 'a'\nHerd.size = %N", "N = x").endswith("(from N, command line: N = 'x')")

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("X = 1\nHerd.size = ", "run.gin:2: Unable to parse value in: Herd.size ="),
            ("Herd.size = 3 4", "run.gin:1: Expected newline in: Herd.size = 3 4"),
            ("Herd.folder = runs", 'run.gin:1: runs is not a value; if it is a string, quote it: "runs"'),
            ("Herd.size = (1,\n2", "run.gin:"),
            ("Herd.folder = 'abc\nX = 1", "run.gin:1: "),
            ("Herd.size = $3", "run.gin:1: "),
            ("Herd size = 3", "run.gin:1: "),
            ("Herd:\n  size = 3\n limit = 4", "run.gin:3: unindent"),
            ("hello", "run.gin:1: Couldn't parse statement"),
        ],
    )
    def test_syntax(self, mistake, text, message):
        assert message in mistake(text)

    def test_modules(self, mistake):
        pathlib.Path("my_pasture.py").write_text("import no_such_thing_at_all")
        assert mistake("import my_pastur") == "run.gin:1: no module named my_pastur: did you mean my_pasture?"
        assert mistake("import json.decodr") == "run.gin:1: no module named json.decodr: did you mean json.decoder?"
        assert "importing my_pasture needs the module no_such_thing_at_all" in mistake("import my_pasture")

    def test_a_class_that_is_not_marked(self, mistake, monkeypatch):
        monkeypatch.syspath_prepend(pathlib.Path.cwd())
        pathlib.Path("my_marsh.py").write_text("class Marsh: pass")
        for name in ("Marsh", "my_marsh.Marsh"):
            assert mistake(f"import my_marsh\nHerd.pond = @{name}()").endswith(
                f"@{name} is in my_marsh.py: mark it with @capibara.config.configurable"
            )
        assert "no configurable named @other.Marsh" in mistake("import my_marsh\nHerd.pond = @other.Marsh()")

    def test_an_object_that_is_a_part_of_itself(self, mistake):
        assert mistake("Herd.folder = 'a'\nHerd.pond = @Herd()").startswith(
            "run.gin:2: Herd.pond is an object of its own"
        )

    def test_two_configurables_of_one_name(self, mistake):
        twin = dataclasses.make_dataclass("Pond", [("depth", int, 1)])
        twin.__module__ = "elsewhere"
        config.configurable(twin)
        try:
            message = mistake("Pond.depth = 2")
            assert "Pond may be any of elsewhere.Pond, " in message and "write the full name" in message
        finally:
            gin_config._REGISTRY.pop("elsewhere.Pond")
            gin_config._INVERSE_REGISTRY.pop(twin)


class TestFiles:
    def test_search_order_and_includes(self, tmp_path, monkeypatch):
        (tmp_path / "here").mkdir()
        (tmp_path / "other/models").mkdir(parents=True)
        monkeypatch.chdir(tmp_path / "here")
        (tmp_path / "other/run.gin").write_text("include 'models/small.gin'\nHerd.size = 5")
        (tmp_path / "other/models/small.gin").write_text("include 'beside.gin'\nHerd.folder = 'a'\nHerd.size = 1")
        (tmp_path / "other/models/beside.gin").write_text("Herd.limit = 6")
        config.parse(["run.gin"], search_paths=[tmp_path / "other"])
        assert (config.build(Herd).size, config.build(Herd).limit) == (5, 6)
        (tmp_path / "here/run.gin").write_text("Herd.folder = 'here'")
        config.parse(["run.gin"], search_paths=[tmp_path / "other"])
        assert config.build(Herd).folder == "here"
        config.parse([tmp_path / "other/run.gin"], search_paths=[tmp_path / "other"])
        assert config.build(Herd).size == 5

    def test_missing(self, tmp_path, monkeypatch, mistake):
        (tmp_path / "models").mkdir()
        (tmp_path / "models/small_llama.gin").touch()
        with pytest.raises(UserError) as caught:
            config.parse(["smal_llama.gin"], search_paths=["models"])
        message = str(caught.value)
        assert message.startswith(f"no Gin file smal_llama.gin in {tmp_path}, {tmp_path}/models, ")
        assert message.endswith(", did you mean small_llama.gin?")
        assert mistake("X = 1\ninclude 'runn.gin'").startswith("run.gin:2: no Gin file runn.gin in ")

    def test_including_each_other(self, tmp_path, mistake):
        (tmp_path / "other.gin").write_text("include 'run.gin'")
        assert mistake("include 'other.gin'") == (
            "other.gin:1: files include each other: run.gin -> other.gin -> run.gin"
        )

    def test_capibaras_own_are_found_anywhere(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        folder = config.search_folders()[-1]
        assert folder == CHECKOUT / "gin"


class TestMoved:
    """Classes that have moved are known by their old modules, in files and in records."""

    @pytest.mark.parametrize(
        "name",
        ["capibara.training.trainer.Trainer", "trainer.Trainer", "capibara.training.base.trainer.Trainer", "Trainer"],
    )
    @pytest.mark.parametrize("is_recorded", [False, True])
    def test_a_class_is_known_by_its_old_module(self, name, is_recorded):
        lines = [f"{name}.seed = 3", "qa/capibara.sharding.Plan.tensor = 2", f"Dataset.source = @x/{name}()"]
        recorded = config.Recorded("\n".join(lines) + "\n", "config.gin")
        config.parse((), *((), (), recorded) if is_recorded else (lines,))
        assert config.values_of("Trainer.seed") == [3] and config.scopes("Plan.tensor") == ["qa"]
        changes = config.changes("capibara.sharding.Plan.tensor = 2", "Plan.tensor = 2")
        assert changes == {}

    def test_a_class_that_moved_twice_is_known_by_both(self):
        for module in ("capibara.training.trainer", "base.trainer", "capibara.training.base.options"):
            config.parse((), [f"{module}.Evaluation.every = 7"])
            assert config.values_of("Evaluation.every") == [7]

    def test_others_are_not(self):
        with pytest.raises(UserError, match="no configurable named capibara.optim.Plan"):
            config.parse((), ["capibara.optim.Plan.tensor = 2"])


class TestOperative:
    TEXT = """
        N = 3
        Herd.folder = "runs/a"
        Herd.size = %N
        Herd.pond = @Pond()
    """

    def test_parses_back_to_the_same_object(self, parse, tmp_path):
        parse(self.TEXT, "Pond.corners = [3, 4]")
        herd = config.build(Herd)
        (tmp_path / "operative.gin").write_text(config.operative())
        config.parse([tmp_path / "operative.gin"])
        assert config.build(Herd) == herd

    def test_holds_defaults_enums_too(self, parse):
        parse(self.TEXT)
        config.build(Herd)
        lines = config.operative().splitlines()
        assert "Pond.season = 'dry'" in lines and "Pond.depth = 1.5" in lines and "Herd.size = %N" in lines

    def test_holds_what_functions_are_called_with_later(self, parse):
        text = "Herd.folder = 'a'\nHerd.greet = {}\nwhistle.tone = 2\nsad/whistle.tone = 5\nmad/whistle.loud = True"
        befores = []
        for reference, lines in (("@whistle", {"whistle.tone = 2", "whistle.loud = False"}),
                                 ("@sad/whistle", {"sad/whistle.tone = 5", "sad/whistle.loud = False"})):  # fmt: skip
            parse(text.format(reference))
            herd = config.build(Herd)
            told = {line for line in config.operative().splitlines() if "whistle." in line}
            assert told == lines
            befores.append(config.operative())
            herd.greet()  # Gin notes the same then
            assert config.operative() == befores[-1]
        parse(text.format("%GREET"), "GREET = @whistle", "whistle.loud = True")
        config.build(Herd)
        assert config.diff(befores[0], config.operative()) == ["whistle.loud: False -> True"]
        assert not any("sad/" in line or "mad/" in line for line in config.operative().splitlines())

    def test_diff_is_by_parameter(self, parse):
        parse(self.TEXT)
        config.build(Herd)
        before = config.operative()
        parse("Herd.pond = @Pond()\nHerd.size = 3\nHerd.folder = 'runs/a'")
        config.build(Herd)
        assert config.diff(before, config.operative()) == []
        parse(self.TEXT, "N = 5", "Pond.depth = 2.0", "Herd.limit = 1")
        config.build(Herd)
        assert config.diff(before, config.operative()) == [
            "Herd.limit: None -> 1",
            "Herd.size: 3 -> 5",
            "Pond.depth: 1.5 -> 2.0",
        ]
        assert config.diff("Herd.size = 3", "Herd.names = ['a']") == [
            "Herd.names: (not set) -> ['a']",
            "Herd.size: 3 -> (not set)",
        ]

    def test_a_field_that_is_new_is_no_change_at_its_default(self, parse):
        """A record of an older version does not have it."""
        parse(self.TEXT)
        config.build(Herd)
        now = config.operative()
        older = "".join(line for line in now.splitlines(keepends=True) if not line.startswith("Herd.limit"))
        assert older != now and config.diff(older, now) == []
        assert config.diff(older, now.replace("Herd.limit = None", "Herd.limit = 4")) == ["Herd.limit: (not set) -> 4"]
        assert config.diff(now, older) == ["Herd.limit: None -> (not set)"]
        assert config.diff(now.replace("Herd.limit = None", "Herd.limit = 4"), now) == ["Herd.limit: 4 -> None"]

    def test_a_field_that_must_still_be_given_is_not_bound(self, parse):
        parse("FOLDER = %gin.REQUIRED\nHerd.folder = %FOLDER\nsad/Herd.folder = 'a'")
        assert config.scopes("Herd.folder") == ["sad"] and config.macro("FOLDER") is config.REQUIRED
        parse("FOLDER = %gin.REQUIRED\nHerd.folder = %FOLDER", "FOLDER = 'a'")
        assert config.scopes("Herd.folder") == [""] and config.macro("FOLDER") == "a"

    def test_bindings_that_nothing_read(self, parse):
        parse("Herd.folder = 'a'\nPond.depth = 3.0")
        config.build(Herd)
        assert config.unused() == ["Pond.depth (run.gin:2)"]


class TestFields:
    def test_conversions(self):
        herd = Herd(folder="a", size=np.int64(3), limit=np.float32(2), path="x", shares={"a": 1}, names=["a"])
        assert type(herd.size) is int and type(herd.limit) is float and herd.path == pathlib.Path("x")
        assert type(herd.shares["a"]) is float and herd.names == ("a",)
        assert Pond(depth=2, corners=[1], season="wet") == Pond(depth=2.0, corners=(1,), season=Season.WET)
        assert type(Pond(depth=2).depth) is float

    def test_values_that_fit_are_kept_as_they_are(self):
        shares = {"a": 1.0}
        assert Herd(folder="a", shares=shares).shares is shares
        assert type(Herd(folder="a", limit=3).limit) is int

    def test_inherited_checks(self):
        assert BigHerd(folder="a", bonus=1).bonus == 1
        with pytest.raises(UserError, match=r"^BigHerd.bonus \('x'\) must be int, not str$"):
            BigHerd(folder="a", bonus="x")
        with pytest.raises(UserError, match="must be at most 100"):
            dataclasses.replace(BigHerd(folder="a"), size=101)

    def test_names_for_type_checkers_only(self):
        cls = dataclasses.make_dataclass("Loose", [("a", "NoSuchName", 1), ("b", "int", 2)])
        cls.__module__ = __name__
        fields.check(cls(a=object()))
        with pytest.raises(UserError, match="Loose.b"):
            fields.check(cls(b="x"))


class TestCommandLine:
    def parse(self, *argv: str):
        parser = flags.ArgumentParser("capibara train")
        parser.add_argument("--emulate", type=int)
        return flags.parse_arguments(parser, argv)

    def test_flags(self):
        args = self.parse(
            "--gin_file=a.gin,b.gin", "--gin_file", "c.gin", "--gin.X=-1", "--emulate=8", "--gin_bindings=Y = 2"
        )
        assert args.gin_file == ["a.gin", "b.gin", "c.gin"] and args.emulate == 8
        assert args.gin_bindings == ["X = -1", "Y = 2"] and args.gin_search_paths == []

    @pytest.mark.parametrize("metavar", ["NAME", "DIR", "FILE", "PATH", "NAME=PATH", "RUN", "MODEL"])
    def test_a_name_or_path_is_not_empty(self, metavar):
        parser = flags.ArgumentParser("capibara test", "A test.")
        parser.add_argument("--given", metavar=metavar)
        parser.add_argument("--prompt", metavar="TEXT")
        with pytest.raises(UserError, match="^--given is empty: give it a value, or leave it out$"):
            flags.parse_arguments(parser, ["--given="])
        assert flags.parse_arguments(parser, ["--prompt="]).prompt == ""
        parser.add_argument("several", metavar=metavar, nargs="*")
        with pytest.raises(UserError, match=f"^{metavar} is empty: give it a value$"):
            flags.parse_arguments(parser, ["one", ""])
        parser.add_argument("--needed", metavar=metavar, required=True)
        with pytest.raises(UserError, match="^--needed is empty: give it a value$"):
            flags.parse_arguments(parser, ["--needed="])
        with pytest.raises(UserError, match="^--gin_file is empty: give it a value, or leave it out$"):
            flags.parse_arguments(parser, ["--needed=a", "--gin_file=a.gin", "--gin_file="])

    @pytest.mark.parametrize(
        ("argv", "message"),
        [
            (["--gin_fle=x"], "unknown flag --gin_fle: did you mean --gin_file?"),
            (["--emulat=8"], "unknown flag --emulat: did you mean --emulate?"),
            (["--emulate=x"], "argument --emulate: invalid int value: 'x'"),
            (["--gin.TRAIN_STEPS", "5"], "--gin.TRAIN_STEPS needs a value after an equals sign"),
            (["more"], "unexpected argument 'more'"),
        ],
    )
    def test_mistakes(self, argv, message):
        with pytest.raises(UserError) as caught:
            self.parse(*argv)
        assert message in str(caught.value)

    def test_exit_codes_and_lines(self, capsys):
        def user_error(argv):
            config.parse([], ["Herd.size = 'x'", "Herd.folder = a"])
            config.build(Herd)

        assert exits.run_verb(lambda argv: None) == 0
        assert exits.run_verb(lambda argv: 3) == 3
        assert exits.run_verb(user_error) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: Herd.size ('x') must be int") and error.count("\n") == 1
        assert exits.run_verb(lambda argv: config.build(FullDisk)) == 2
        assert capsys.readouterr().err == (
            "error: disk full while writing runs/x: free some space, then run this again\n"
        )

        def interrupted(argv):
            raise KeyboardInterrupt

        assert exits.run_verb(interrupted) == 130

    def test_ctrl_c_in_a_callback_of_the_collector_is_not_lost(self, monkeypatch):
        """Python drops what is raised there."""

        def _xla_gc_callback(phase, info):
            gc.callbacks.remove(_xla_gc_callback)
            signal.raise_signal(signal.SIGINT)

        def main(argv):
            gc.callbacks.append(_xla_gc_callback)
            gc.collect(0)  # all of what other tests have left would take longer than the signal's second coming
            time.sleep(10)

        began_s, before = time.monotonic(), sys.unraisablehook
        assert exits.run_verb(main) == 130 and time.monotonic() < began_s + 5
        assert sys.unraisablehook is before

    def test_ctrl_c_in_a_destructor_is_not_lost(self):
        class Closed:
            def __del__(self):
                signal.raise_signal(signal.SIGINT)

        def main(argv):
            Closed()
            time.sleep(10)

        began_s = time.monotonic()
        assert exits.run_verb(main) == 130 and time.monotonic() < began_s + 5

    def test_faults_of_ours_keep_their_traceback(self):
        with pytest.raises(ZeroDivisionError):
            exits.run_verb(lambda argv: 1 / 0)

    def test_no_traceback_in_a_real_process(self, tmp_path):
        code = "import sys; from capibara import config; from capibara.multihost.exits import run_verb; sys.exit(run_verb(lambda argv: config.parse(['x.gin'])))"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=CHECKOUT)
        assert done.returncode == 2 and done.stdout == ""
        assert done.stderr.startswith("error: no Gin file x.gin in ") and done.stderr.count("\n") == 1


class TestExtras:
    def test_installed(self):
        assert extras.require("json.decoder").__name__ == "json.decoder"

    def test_missing(self):
        with pytest.raises(UserError) as caught:
            extras.require("no_such_package.part", extra="hf", why="a Hugging Face source")
        assert str(caught.value) == (
            f'no_such_package.part is not installed (needed for a Hugging Face source): pip install -e "{CHECKOUT}[hf]"'
        )

    def test_without_a_checkout_the_distribution_is_named(self, monkeypatch):
        """The name capibara on PyPI is a package of others."""
        monkeypatch.setattr(extras, "CHECKOUT", pathlib.Path("/usr/lib/site-packages"))
        assert extras.install_command("hf") == 'pip install "capibara-tpu[hf]"'

    def test_a_package_that_is_broken_keeps_its_error(self, tmp_path, monkeypatch):
        (tmp_path / "half_installed.py").write_text("import no_such_dependency")
        monkeypatch.syspath_prepend(tmp_path)
        with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
            extras.require("half_installed", extra="hf")
