#!/usr/bin/env bash
# In gin-config 0.5.0 a macro's value is built in a scope of the macro's name.
#
# `%MODEL` reads as "the value of MODEL". It is a call of a function in the scope MODEL, and what the value refers to is called
# in there: bindings of that scope count before those without one, and one object has other fields than another of the
# same text that is referred to directly. Scopes do not add up: in a scope that is open, or behind another macro, only the last
# macro's name counts, and the outer scope's own bindings are lost.
#
# Expected: `train.model = %MODEL` with `MODEL = @Model()` builds what `train.model = @Model()` builds.
# Seen: with `Model.size = 2` and `MODEL/Model.size = 3` the first has size 3, the second size 2; with `OUTER = %MODEL` and
# `OUTER/Model.size = 4` it is 3 still; in the scope `outer`, with `outer/Model.size = 5`, it is 3 by the macro and 5 without.
# The operative configuration names the object MODEL/Model. A tool that writes a value into the section of "Model" changes
# nothing.
#
# Ends with 0 if that is so, 1 if it has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check gin-config==0.5.0 2> "$folder/pip.log" || {
  cat "$folder/pip.log" >&2; exit 2; }
"$folder/env/bin/python" - << 'PYTHON'
import importlib.metadata
import sys

import gin


@gin.configurable
class Model:
    def __init__(self, size=1):
        self.size = size


@gin.configurable
def train(model):
    return model.size


def size(model, *bindings, scope=None):
    gin.clear_config()
    gin.parse_config(["Model.size = 2", "MODEL/Model.size = 3", *bindings, f"train.model = {model}"])
    with gin.config_scope(scope):
        return train()


MODEL = "MODEL = @Model()"
seen = {
    "@Model()": size("@Model()"),
    "%MODEL": size("%MODEL", MODEL),
    "%OUTER of %MODEL": size("%OUTER", MODEL, "OUTER = %MODEL", "OUTER/Model.size = 4"),
    "@Model() in the scope outer": size("@Model()", "outer/Model.size = 5", scope="outer"),
    "%MODEL in the scope outer": size("%MODEL", MODEL, "outer/Model.size = 5", scope="outer"),
}
names_scope = "MODEL/Model.size = 3" in (size("%MODEL", MODEL) and gin.operative_config_str())
print("gin-config", importlib.metadata.version("gin-config"))
for name, value in seen.items():
    print(f"train.model = {name}: size {value}")
print(f"the operative configuration has MODEL/Model.size: {names_scope}")
sys.exit(not (list(seen.values()) == [2, 3, 3, 5, 3] and names_scope))
PYTHON
