"""The rooms keep to their import rules: proven by reading the code, and that `import capibara` stays light."""

from __future__ import annotations

import ast
import dataclasses
import functools
import pathlib
import resource
import subprocess
import sys

import pytest

PACKAGE = pathlib.Path(__file__).resolve().parent.parent / "capibara"

# Room -> the rooms it may import, itself apart. "models.api" is that one module of models.
_LOW = {"core", "multihost", "storage", "config"}
_BASE = _LOW | {
    "sharding",
    "kernels",
    "optim",
    "data",
    "builders",
    "consensus",
    "checkpoints",
    "objectives",
    "models.api",
}
RULES = {
    "core": set(),
    "multihost": {"core"},
    "storage": {"core"},
    "config": {"core", "storage"},
    "sharding": _LOW,
    "kernels": _LOW | {"sharding"},
    "optim": _LOW,
    "data": _LOW,
    "builders": _LOW | {"data"},
    "consensus": _LOW,
    "sandbox": {"core", "config"},
    "checkpoints": _LOW | {"sharding", "data"},
    "models": _LOW | {"sharding", "kernels"},
    "objectives": _LOW | {"sharding", "kernels", "data", "models.api"},
    **{name: _BASE for name in ("planner", "interop", "inference", "training")},
    "retrieval": _BASE | {"inference"},
    "loading": _BASE | {"training", "interop"},
    "strategies": _BASE | {"training", "inference", "retrieval", "sandbox"},
    "evaluation": _BASE | {"training", "interop", "inference", "retrieval", "sandbox"},
    "monitoring": _LOW | {"training.base.callbacks", "checkpoints.run_manifest", "builders.lineage"},
    "run": _BASE | {"planner", "training", "inference", "evaluation", "monitoring"},
    "api": _BASE
    | {"planner", "interop", "inference", "training", "loading", "strategies", "evaluation", "monitoring", "run"}
    | {"retrieval"}
    | {"jobs", "cli.composition", "cli.launching.trial_runs"},
    "jobs": _LOW | {"sharding", "planner", "builders.redaction"},
}
# Within a room: folders that a folder must not import.
WITHIN = {
    "inference.engine": ("inference.server", "inference.interactive", "inference.sample"),
    "inference.sampling": ("inference.engine", "inference.server", "inference.interactive", "inference.sample"),
}
# `python -m capibara.VERB` and `capibara VERB`; the verbs themselves are in cli/, with what only they share.
VERBS = {
    "train",
    "finetune",
    "doctor",
    "plan",
    "prove",
    "report",
    "compare",
    "evaluate",
    "infer",
    "serve",
    "convert",
    "convert_config",
    "coordinate",
    "merge",
    "experts",
    "prepare",
    "dashboard",
    "track",
    "launch",
}
# Verbs that use a model, whatever it came in: they open a LoadedModel, and know no run.
MODEL_VERBS = {"infer", "serve", "convert", "merge"}
ANYTHING = VERBS | {"cli", "__main__"}
# Third-party package -> where it may be imported.
ONLY_IN = {"flax": ("models",), "gin": ("config",), **dict.fromkeys(("fsspec", "gcsfs", "s3fs"), ("storage",))}
# Modules of these rooms are loaded before anybody knows whether JAX is needed; those that need it are named.
LIGHT = ("core", "multihost", "storage", "config", "cli")
# A room where nothing depends on what the program is for, and the names that would ask: kernels/ knows.
PLATFORM_FREE = "models"
PLATFORM_NAMES = {"platform", "device_kind", "default_backend", "get_backend", "devices", "local_devices", "backends"}
# What only verbs and config/ ask the parser: other rooms are given values.
PARSER, PARSER_ROOMS = {"build", "parse", "bind", "is_bound", "scopes"}, ("cli", "config")
OF_JAX = {"core.devices", "core.interrupt", "multihost.hosts", "multihost.joining"}
LONGEST_FILE, LONGEST_FUNCTION, LONGEST_VERB, LONGEST_INIT = 700, 60, 100, 40


@dataclasses.dataclass(frozen=True)
class Import:
    """`module`, absolute, imported by `importer` (both dotted, the package's name included for our own)."""

    importer: str
    module: str
    line: int
    deferred: bool  # in a function or for type checkers alone: not carried out when the importer is loaded


def modules_of(package: pathlib.Path) -> dict[str, pathlib.Path]:
    """Dotted module name -> file, of every module of a package folder."""
    modules = {}
    for path in sorted(package.rglob("*.py")):
        parts = [package.name, *path.relative_to(package).with_suffix("").parts]
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return modules


class Source:
    """A module's code, read and parsed once for all rules."""

    def __init__(self, path: pathlib.Path):
        self.path, self.text = path, path.read_text(encoding="utf-8")
        self.tree = ast.parse(self.text)

    @functools.cached_property
    def nodes(self) -> list[ast.AST]:
        return [*ast.walk(self.tree)]

    @functools.cached_property
    def functions(self) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
        return [node for node in self.nodes if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]


def imports_of(name: str, source: Source, modules: dict[str, pathlib.Path]) -> list[Import]:
    """All imports of a module, inside functions and TYPE_CHECKING blocks too, each resolved to a module."""
    found, path = [], source.path
    for_types = [
        node for node in source.nodes if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    lines = {line for node in (*source.functions, *for_types) for line in range(node.lineno, node.end_lineno + 1)}

    def add(module: str, node: ast.AST) -> None:
        found.append(Import(name, module, node.lineno, node.lineno in lines))

    for node in source.nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                add(alias.name, node)
        elif isinstance(node, ast.ImportFrom):
            parent = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
            base = ".".join([*parent[: len(parent) - node.level + 1], node.module or ""]).strip(".")
            outer = base if node.level else node.module
            for alias in node.names:
                inner = f"{outer}.{alias.name}"
                add(inner if inner in modules else outer, node)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "import_module" and node.args:
            if isinstance(node.args[0], ast.Constant):
                add(node.args[0].value, node)
    return found


def room_of(module: str, package: str) -> str:
    """The room of one of our modules: "training" for capibara.training.loop; "" for the package itself."""
    return module.removeprefix(package).lstrip(".").partition(".")[0]


def violations(package: pathlib.Path) -> list[str]:
    """Every broken import rule, cycle and length limit of a package folder, as "file:line: what" lines."""
    modules = modules_of(package)
    problems, edges = [], {}
    for name, path in modules.items():
        source = Source(path)
        for imported in imports_of(name, source, modules):
            reason = _forbidden(imported, package.name)
            if reason:
                problems.append(f"{path.relative_to(package.parent)}:{imported.line}: {reason}")
            if imported.module in modules and imported.module != name:
                edges.setdefault(name, set()).add(imported.module)
        problems += _too_long(source, package) + _asks_for_the_platform(name, source, package)
        problems += _writes_temporary_gin(source, package) + _asks_the_parser(name, source, package)
    hidden = [path for path in sorted(package.rglob("*.py")) if path.with_suffix("").is_dir()]
    problems += [f"{path.relative_to(package.parent)}:1: the folder of its name hides it" for path in hidden]
    problems += [f"import cycle: {' -> '.join(cycle)}" for cycle in cycles(edges)]
    problems += [f"circle of folders: {' -> '.join(cycle)}" for cycle in cycles(folders(edges, modules, package))]
    return problems


def _forbidden(imported: Import, package: str) -> str | None:
    room = room_of(imported.importer, package)
    top = imported.module.partition(".")[0]
    if top != package:
        if top in ONLY_IN and room not in ONLY_IN[top]:
            return f"only {', '.join(ONLY_IN[top])} may import {top}"
        inner = imported.importer.removeprefix(f"{package}.")
        if top in ("jax", "jaxlib") and (not room or room in LIGHT and not imported.deferred and inner not in OF_JAX):
            return f"{inner if room else 'the package'} must not import {top} when it is loaded"
        return None
    target = room_of(imported.module, package)
    inner = imported.module.removeprefix(f"{package}.")
    verb = inner.removeprefix("cli.").partition(".")[0]
    importer = imported.importer.removeprefix(f"{package}.cli.")
    if importer in MODEL_VERBS and target == "training":
        return f"{importer} opens a LoadedModel: it must not import {inner}"
    if verb in VERBS and target in ("cli", verb) and room not in ANYTHING:
        return f"nobody imports the verb {verb}"
    for folder, above in WITHIN.items():
        if imported.importer.startswith(f"{package}.{folder}.") and f"{inner}.".startswith(
            tuple(f"{a}." for a in above)
        ):
            return f"{folder} must not import {inner}"
    if room in ANYTHING or target == room or target == "":
        return None
    if room and room not in RULES:
        return f"room {room} has no import rule: add it to RULES"
    if not room:  # user_modules looks after sys.path before anything else is imported
        return None if inner == "core.user_modules" else f"the package itself must not import {inner}"
    allowed = RULES[room]
    if target in allowed or any(inner == rule or inner.startswith(f"{rule}.") for rule in allowed):
        return None
    return f"{room} must not import {inner}"


def _asks_for_the_platform(name: str, source: Source, package: pathlib.Path) -> list[str]:
    """Attributes and imported names of PLATFORM_NAMES in a room that does without."""
    if room_of(name, package.name) != PLATFORM_FREE:
        return []
    problems, path = [], source.path
    for node in source.nodes:
        names = [node.attr] if isinstance(node, ast.Attribute) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.ImportFrom) else []
        asked = [asked for asked in names if asked in PLATFORM_NAMES]
        line = f"{path.relative_to(package.parent)}:{getattr(node, 'lineno', 0)}"
        problems += [
            f"{line}: {PLATFORM_FREE} must not ask for the platform ({asked}): kernels does" for asked in asked
        ]
    return problems


def _writes_temporary_gin(source: Source, package: pathlib.Path) -> list[str]:
    """Temporary files that are to be parsed as Gin: text is parsed as it is."""
    calls = [node for node in source.nodes if isinstance(node, ast.Call)]
    return [
        f"{source.path.relative_to(package.parent)}:{call.lineno}: write no temporary Gin file: config.parse takes a Recorded"
        for call in calls
        for keyword in call.keywords
        if keyword.arg == "suffix" and getattr(keyword.value, "value", None) == ".gin"
    ]


def _asks_the_parser(name: str, source: Source, package: pathlib.Path) -> list[str]:
    """Uses of PARSER outside PARSER_ROOMS, under whatever names a module imports them."""
    if room_of(name, package.name) in PARSER_ROOMS:
        return []
    imports = [node for node in source.nodes if isinstance(node, ast.ImportFrom)]
    parsers = {
        alias.asname or alias.name
        for node in imports
        if node.module == package.name
        for alias in node.names
        if alias.name == "config"
    }
    used = [(node, alias.name) for node in imports if node.module == f"{package.name}.config" for alias in node.names]
    used += [
        (node, node.attr)
        for node in source.nodes
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in parsers
    ]
    return [
        f"{source.path.relative_to(package.parent)}:{node.lineno}: only {' and '.join(PARSER_ROOMS)} may use config.{asked}"
        for node, asked in used
        if asked in PARSER
    ]


def folders(edges: dict[str, set[str]], modules: dict[str, pathlib.Path], package: pathlib.Path) -> dict[str, set[str]]:
    """Folder -> the folders whose modules its own import; without the package's folder, in which the verbs' names are."""

    def folder(module: str) -> str:
        return modules[module].parent.relative_to(package.parent).as_posix()

    found: dict[str, set[str]] = {}
    for name, targets in edges.items():
        for target in targets:
            if package.name not in (folder(name), folder(target)) and folder(name) != folder(target):
                found.setdefault(folder(name), set()).add(folder(target))
    return found


def cycles(edges: dict[str, set[str]]) -> list[list[str]]:
    """The cycles met by a depth-first walk of a directed graph, each ending where it began."""
    found, done, path = [], set(), []

    def visit(node: str) -> None:
        if node in path:
            found.append([*path[path.index(node) :], node])
            return
        if node in done:
            return
        path.append(node)
        for target in sorted(edges.get(node, ())):
            visit(target)
        path.pop()
        done.add(node)

    for node in sorted(edges):
        visit(node)
    return found


def _too_long(source: Source, package: pathlib.Path) -> list[str]:
    path, text = source.path, source.text
    shown = path.relative_to(package.parent)
    lines = len(text.splitlines())
    problems = []
    if path.name == "__init__.py" and path.parent != package:  # the package's own imports names on their first use
        if lines > LONGEST_INIT:
            problems.append(f"{shown}: {lines} lines, an __init__ has at most {LONGEST_INIT}")
        kinds = (ast.FunctionDef, ast.ClassDef)
        defined = [node for node in source.tree.body if isinstance(node, kinds)]
        problems += [f"{shown}:{node.lineno}: an __init__ defines nothing: move {node.name}" for node in defined]
    if lines >= LONGEST_FILE:
        problems.append(f"{shown}: {lines} lines, must be under {LONGEST_FILE}")
    if path.parent == package / "cli" and path.stem in VERBS and lines > LONGEST_VERB:
        problems.append(f"{shown}: {lines} lines, a verb has at most {LONGEST_VERB}")
    for node in source.functions:
        length = node.end_lineno - node.lineno + 1
        if length >= LONGEST_FUNCTION:
            problems.append(f"{shown}:{node.lineno}: {node.name} has {length} lines, must be under 60")
    return problems


def test_the_rules_hold():
    problems = violations(PACKAGE)
    assert not problems, "\n" + "\n".join(problems)


def test_every_rule_names_rooms_of_the_plan():
    rooms = set(RULES) | ANYTHING
    for allowed in RULES.values():
        assert {name.partition(".")[0] for name in allowed} <= rooms


PLANTED = {
    "training/loop.py": ("def f():\n    from house.monitoring import log", "training must not import monitoring"),
    "training/step.py": ("from ..inference import sample", "training must not import inference"),
    "inference/engine/loop.py": ("from house.inference.server import http", "inference.engine must not import"),
    "inference/sampling/text.py": ("from house.inference.engine import loop", "inference.sampling must not import"),
    "inference/sample.py": ("import house.training.step", "inference must not import training.step"),
    "planner/cost.py": ("from house import interop", "planner must not import interop"),
    "planner/search.py": ("from house.models import decoder", "planner must not import models.decoder"),
    "optim/schedules.py": ("import flax.nnx", "only models may import flax"),
    "data/loader.py": ("from flax import nnx", "only models may import flax"),
    "sharding/mesh.py": ("import gin", "only config may import gin"),
    "core/tree.py": (
        "import jax",
        "core.tree must not import jax",
    ),
    "models/moe.py": (
        "from house import sharding\nx = sharding.platform()",
        "must not ask for the platform (platform)",
    ),
    "models/rope.py": ("import jax\ndef f():\n    return jax.default_backend()", "the platform (default_backend)"),
    "models/cache.py": ("from house.sharding import device_kind as kind", "the platform (device_kind)"),
    "models/layers.py": ("import jax\non = jax.devices()[0]", "the platform (devices)"),
    "models/decoder.py": ("from house.data import loader", "models must not import data.loader"),
    "consensus/merge.py": ("import house.optim.schedules", "consensus must not import optim.schedules"),
    "monitoring/log.py": ("from house.training import loop", "monitoring must not import training.loop"),
    "strategies/soup.py": ("from house.cli import train", "nobody imports the verb train"),
    "strategies/vote.py": ("from house import train", "nobody imports the verb train"),
    "checkpoints/manager.py": ("from house.training import step", "checkpoints must not import training.step"),
    "kernels/matmul.py": ("from house.models import api", "kernels must not import models.api"),
    "storage/local.py": ("from house.config import search", "storage must not import config.search"),
    "config/search.py": ("import house.sharding.mesh", "config must not import sharding.mesh"),
    "utils.py": ("import house.core.tree", "room utils has no import rule"),
    "__init__.py": ("from house import config", "the package itself must not import config"),
    "cli/infer.py": ("def f():\n    from house.training.trainer import Trainer", "infer opens a LoadedModel"),
    "interop/convert.py": ("import tempfile\nf = tempfile.mkstemp(suffix='.gin')", "write no temporary Gin file"),
    "builders/build.py": (
        "from house import config as c\nx = c.build(int)",
        "only cli and config may use config.build",
    ),
    "data/tasks.py": ("from house.config import parse\nparse(())", "only cli and config may use config.parse"),
    "optim/__init__.py": ("x = 1\n" * 41, "41 lines, an __init__ has at most 40"),
    "builders/__init__.py": ("def f():\n    pass", "an __init__ defines nothing: move f"),
    "cli/plan.py": ("x = 1\n" * 101, "101 lines, a verb has at most 100"),
    "interop/names.py": ("x = 1\n" * 700, "700 lines, must be under 700"),
    "jobs/local.py": ("def f():\n" + "    x = 1\n" * 59, "f has 60 lines"),
    "builders/logs.py": (
        "import importlib\nimportlib.import_module('house.models')",
        "builders must not import models",
    ),
}


@pytest.fixture
def house(tmp_path):
    """A package that keeps every rule."""
    package = tmp_path / "house"
    clean = {"train.py": "from house.cli.train import main", "training/base/callbacks.py": "import jax"}
    clean["cli/train.py"] = "import gin_tonic\nfrom house import config\ndef f():\n    import jax"
    clean["monitoring/tensorboard.py"] = (
        "from house.training.base import callbacks\nfrom house.training.base.callbacks import C"
    )
    clean["models/api.py"] = "import flax"
    clean["core/types.py"] = "import jaxtyping\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import jax"
    clean["inference/stream.py"] = "from house.models import api\nfrom . import sample"
    for file in (*PLANTED, *clean):
        path = package / file
        path.parent.mkdir(parents=True, exist_ok=True)
        (path.parent / "__init__.py").touch()
        path.write_text(clean.get(file, ""))
    return package


def test_a_clean_package_passes(house):
    assert violations(house) == []


def test_a_module_beside_a_folder_of_its_name_is_found(house):
    (house / "jobs.py").touch()
    assert violations(house) == ["house/jobs.py:1: the folder of its name hides it"]


@pytest.mark.parametrize("file", PLANTED)
def test_a_planted_violation_is_found(house, file):
    code, reason = PLANTED[file]
    (house / file).write_text(code)
    found = violations(house)
    assert len(found) == 1, found
    assert found[0].startswith(f"house/{file}:") and reason in found[0]


def test_a_planted_cycle_is_found(house):
    (house / "data/loader.py").write_text("def f():\n    from house.data import packing")
    (house / "data/packing.py").write_text("from house.data.loader import f")
    assert violations(house) == ["import cycle: house.data.loader -> house.data.packing -> house.data.loader"]


@pytest.mark.parametrize(
    "files",
    [
        {
            "data/text/files.py": "from house.data.rows import pack",
            "data/rows/shuffle.py": "from house.data.text import ids",
        },
        {"data/dataset.py": "from house.data.rows import pack", "data/rows/shuffle.py": "from house.data import kinds"},
    ],
    ids=["beside", "parent and child"],
)
def test_a_circle_of_folders_without_a_cycle_of_files_is_found(house, files):
    for file in ("data/rows/pack.py", "data/text/ids.py", "data/kinds.py", *files):
        (house / file).parent.mkdir(exist_ok=True)
        ((house / file).parent / "__init__.py").touch()
        (house / file).write_text(files.get(file, ""))
    (found,) = violations(house)
    assert found.startswith("circle of folders: house/data") and "house/data/rows" in found


def best_seconds(*command: str) -> float:
    """The fastest of three runs of a Python command, in CPU seconds: the other test workers hold the cores at times."""
    return min(_cpu_seconds(*command) for _ in range(3))


def _cpu_seconds(*command: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, cwd=PACKAGE.parent)
    assert done.returncode == 0, done.stderr
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_import_is_light():
    assert best_seconds("-c", "import capibara, capibara.config") < 0.3


@pytest.mark.parametrize("verb", sorted(path.stem for path in PACKAGE.glob("*.py") if path.stem in VERBS))
def test_help_is_quick(verb):
    # 0.15 and 0.18 s at most on a quiet machine, of which NumPy is most; twice that where other tests share the cores.
    assert best_seconds("-m", f"capibara.{verb}", "--help") < 0.5


def test_the_lowest_rooms_load_without_jax():
    light = [name for name in modules_of(PACKAGE) if room_of(name, "capibara") in LIGHT[:3]]
    names = ", ".join(name for name in light if name.removeprefix("capibara.") not in OF_JAX)
    code = f"import sys, {names}; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=PACKAGE.parent)
