"""Parses Gin files, builds the configured objects, and saves and compares configurations.

Only this package imports gin.

A Gin file binds the fields of config dataclasses (`Trainer.seed = 1`), builds objects by reference
(`Trainer.optimizer = @Optimizer()`) and names values once with macros (`TRAIN_STEPS = 500`, then `%TRAIN_STEPS`).
Files come first, the command line last, so that `--gin.TRAIN_STEPS=1000` wins over a file.
"""

from capibara.config.bound import REQUIRED, given_at, is_bound, is_given, macro, scopes, values_of
from capibara.config.comparison import changes, diff
from capibara.config.parsing import Recorded, Statement, bind, load_modules, parse, statements_of
from capibara.config.registry import MODULE, build, configurable, in_scope, is_scope, isolated, reset
from capibara.config.search import ENDINGS, find_file, search_folders
from capibara.config.used import check_used, imported_modules, operative, origins, unused

__all__ = [
    "ENDINGS", "MODULE", "REQUIRED", "Recorded", "Statement", "isolated", "bind", "build", "changes",
    "check_used", "configurable", "diff", "find_file", "given_at", "imported_modules",
    "in_scope", "is_bound", "is_given", "is_scope", "load_modules", "macro", "operative", "origins", "parse", "reset",
    "scopes", "search_folders", "statements_of", "unused", "values_of",
]  # fmt: skip
