"""What capibara.config uses of gin-config's private parts: their names, and what they hold.

A new version of gin-config that moves them fails here, by name, and not in the middle of a run file.
"""

from __future__ import annotations

import ast
import inspect
import pathlib

import pytest

import gin
from capibara import config
from gin import config as gin_config
from gin import config_parser

FOLDER = pathlib.Path(config.__file__).parent
MODULES = {"gin_config": gin_config, "config_parser": config_parser, "gin": gin}


@config.configurable
class Kettle:
    """Something to bind."""

    def __init__(self, litres: float = 1.0, label: str = "plain"):
        self.litres, self.label = litres, label


SELECTOR = f"{__name__}.Kettle"


def used() -> list[tuple[str, str]]:
    """Module and name of every `gin_config.x`, `config_parser.x` and `gin.x` of the room."""
    nodes = [node for path in FOLDER.glob("*.py") for node in ast.walk(ast.parse(path.read_text()))]
    return sorted(
        {
            (node.value.id, node.attr)
            for node in nodes
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in MODULES
        }
    )


def test_private_parts_are_used():
    assert {name for module, name in used() if module == "gin_config" and name[0] == "_" != name[1]} == {
        "_CONFIG",
        "_IMPORTS",
        "_INVERSE_REGISTRY",
        "_OPERATIVE_CONFIG",
        "_REGISTRY",
        "_SINGLETONS",
        "_find_class_construction_fn",
        "_get_bindings",
        "_get_default_configurable_parameter_values",
        "_parse_context",
        "_parse_scope",
    }


@pytest.mark.parametrize(("module", "name"), used())
def test_every_part_is_there(module, name):
    assert hasattr(MODULES[module], name) or name.startswith("__")


def test_bindings_are_held_by_scope_and_selector():
    config.parse([], ["Kettle.litres = 2", "big/Kettle.litres = 5"])
    assert gin_config._CONFIG[("", SELECTOR)] == {"litres": 2}
    assert gin_config._CONFIG[("big", SELECTOR)] == {"litres": 5}
    with config.in_scope("big"):
        assert gin_config._get_bindings(SELECTOR) == {"litres": 5}


def test_macros_are_bindings_of_gin_macro():
    config.parse([], ["LITRES = 3", "Kettle.litres = %LITRES"])
    assert gin_config._CONFIG[("LITRES", "gin.macro")] == {"value": 3}
    assert repr(gin_config._CONFIG[("", SELECTOR)]["litres"]) == "%LITRES"
    assert config.build(Kettle).litres == 3


def test_the_registry_finds_by_the_end_of_a_name():
    found = gin_config._REGISTRY[SELECTOR]
    assert found.wrapped is Kettle and found.selector == SELECTOR
    assert gin_config._REGISTRY.matching_selectors("Kettle") == [SELECTOR]
    assert gin_config._REGISTRY.minimal_selector(SELECTOR) == "Kettle"
    assert gin_config._INVERSE_REGISTRY[Kettle] is found
    assert dict(gin_config._REGISTRY.items())[SELECTOR] is found


def test_what_was_built_is_in_the_operative_configuration():
    config.parse([], ["Kettle.litres = 2"])
    assert ("", SELECTOR) not in gin_config._OPERATIVE_CONFIG
    config.build(Kettle)
    assert gin_config._OPERATIVE_CONFIG[("", SELECTOR)]["litres"] == 2
    construct = gin_config._find_class_construction_fn(Kettle)
    assert "label" in inspect.signature(construct).parameters
    defaults = gin_config._get_default_configurable_parameter_values(construct, None, None)
    assert defaults == {"litres": 1.0, "label": "plain"}


def test_a_parse_has_a_context_that_knows_imports():
    with gin_config._parse_scope() as context:
        assert gin_config._parse_context() is context and set(context.imports) == set()
        assert context.get_configurable("Kettle").wrapped is Kettle


def test_the_parser_yields_statements_with_their_parts():
    class Plain(config_parser.ParserDelegate):
        def configurable_reference(self, name, evaluate):
            return name, evaluate

        def macro(self, name):
            return name

    text = "import os\ninclude 'a.gin'\nbig/Kettle.litres = @Kettle()\nKettle.label = %NAME\n"
    imported, included, bound, macro = config_parser.ConfigParser(text, Plain())
    assert isinstance(imported, config_parser.ImportStatement) and imported.module == "os"
    assert isinstance(included, config_parser.IncludeStatement) and included.filename == "a.gin"
    assert (bound.scope, bound.selector, bound.arg_name, bound.value) == ("big", "Kettle", "litres", ("Kettle", True))
    assert isinstance(macro, config_parser.BindingStatement) and macro.value == "NAME"
