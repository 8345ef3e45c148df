"""How the tensors of a foreign checkpoint hold our parameters: declared in tables, split and joined here.

Needs only numpy: the scripts that make reference answers run in environments without JAX.

Dimensions are letters: l layers, e experts, v vocabulary, p positions, t token types, r relative positions, d embed,
o another embed, n heads, h head_dim, f hidden width of an MLP, i an index of interleaved parameters, which has no
dimension in ours. "nh d" is a tensor of two dimensions, the first of which runs over heads and, within each, over its
own. A tensor of one layer or expert has that letter in its name: "{l}". Heads that are fused by groups are "gnh": g stands for
the key/value heads, each with its queries, its key and its value; a digit in its place for that number of groups.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from capibara.core import tree
from capibara.core.projections import Axes

Shape = tuple[int, ...]
_BESIDE = "i"


# The letter of a parameter's logical axis.
_LETTERS = {
    "embed": "d", "expert_embed": "d", "heads": "n", "kv_heads": "n", "head_dim": "h", "mlp": "f", "experts": "e",
}  # fmt: skip


def letters(axes: Axes) -> str:
    """Those of logical axes: "dnh" for ("embed", "heads", "head_dim")."""
    return "".join(_LETTERS[axis] for axis in axes if axis is not None)


def own_letters(group: str) -> str:
    """The letters of a tensor's dimension that our parameters have too."""
    return "".join(letter for letter in group if letter != _BESIDE and not _is_groups(letter))


def _is_groups(letter: str) -> bool:
    return letter == "g" or letter.isdigit()


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One row of a table: a tensor of a checkpoint, or one for each layer or expert.

    Attributes:
      name: its name, with {l} and {e} for the numbers of layer and expert.
      dims: its dimensions.
      ours: the parameters that it holds, by the names of core.tree.
      along: the letter of the dimension that concatenates several parameters.
      layout: the dimensions of our parameters; those in `name` come first.
    """

    name: str
    dims: str
    ours: tuple[str, ...]
    along: str
    layout: str

    @property
    def numbered(self) -> str:
        """The letters that its name has as numbers."""
        return "".join(letter for letter in self.layout if f"{{{letter}}}" in self.name)

    def names(self, shapes: Mapping[str, Shape]) -> Iterator[tuple[str, tuple[int, ...]]]:
        """All names that the row stands for, each with its numbers.

        Args:
          shapes: of our parameters.
        """
        letters = self.numbered
        first = tree.first_layer(self.ours[0], shapes) if "l" in letters else 0
        for at in np.ndindex(*shapes[self.ours[0]][: len(letters)]):
            numbers = dict(zip(letters, at))
            yield self.name.format(**numbers | ({"l": numbers["l"] + first} if "l" in numbers else {})), at

    def shape(self, shapes: Mapping[str, Shape]) -> Shape:
        """Its shape in the checkpoint, from those of our parameters."""
        sizes = self._sizes(shapes)
        return tuple(math.prod(sizes[letter] for letter in group) for group in self.dims.split())

    def split(self, value: np.ndarray, shapes: Mapping[str, Shape]) -> dict[str, np.ndarray]:
        """The parts of our parameters that a tensor holds, as views, by name."""
        letters, sizes = self.dims.replace(" ", ""), self._sizes(shapes)
        value = value.reshape([sizes[letter] for letter in letters])
        parts: Sequence[np.ndarray] = [value]
        if self.along:
            ends = np.cumsum([self._size(path, shapes) for path in self.ours])[:-1]
            parts = np.split(value, ends, axis=letters.index(self.along))
        if self.along == _BESIDE:
            at = letters.index(_BESIDE)
            letters, parts = letters.replace(_BESIDE, ""), [part.squeeze(at) for part in parts]
        order = [letters.index(letter) for letter in self._inner]
        parts = [part.transpose(order) for part in parts]
        if self._groups:
            at = self._inner.index("n")
            parts = [part.reshape(*part.shape[: at - 1], -1, *part.shape[at + 1 :]) for part in parts]
        return dict(zip(self.ours, parts, strict=True))

    def join(self, parts: Mapping[str, np.ndarray], shapes: Mapping[str, Shape]) -> np.ndarray:
        """The way back: a tensor of the parts that `split` gives."""
        letters, layout = self.dims.replace(" ", ""), self._inner
        order = [layout.index(letter) for letter in letters if letter != _BESIDE]
        values = [parts[path] for path in self.ours]
        if self._groups:
            at, count = layout.index("n") - 1, self._sizes(shapes)[self._groups]
            values = [value.reshape(*value.shape[:at], count, -1, *value.shape[at + 1 :]) for value in values]
        values = [value.transpose(order) for value in values]
        if self.along == _BESIDE:
            values = [np.expand_dims(value, letters.index(_BESIDE)) for value in values]
        value = values[0] if len(values) == 1 else np.concatenate(values, axis=letters.index(self.along))
        return np.ascontiguousarray(value).reshape(self.shape(shapes))

    def _sizes(self, shapes: Mapping[str, Shape]) -> dict[str, int]:
        sizes = dict(zip(self.layout, shapes[self.ours[0]], strict=True))
        if self._groups:
            sizes |= {self._groups: self._count(shapes), "n": sizes["n"] // self._count(shapes)}
        return sizes | ({self.along: sum(self._size(path, shapes) for path in self.ours)} if self.along else {})

    def _size(self, path: str, shapes: Mapping[str, Shape]) -> int:
        return 1 if self.along == _BESIDE else shapes[path][self.layout.index(self.along)] // self._count(shapes)

    @property
    def _groups(self) -> str:
        """The letter of the groups of heads; "": they are not in groups."""
        return next(filter(_is_groups, self.dims), "")

    @property
    def _inner(self) -> str:
        """The dimensions of our parameters within a tensor, those of heads by groups."""
        return self.layout[len(self.numbered) :].replace("n", f"{self._groups}n")

    def _count(self, shapes: Mapping[str, Shape]) -> int:
        """The number of groups of heads."""
        if self._groups != "g":
            return int(self._groups or 1)
        return shapes[self.ours[-1]][self.layout.index("n")]


def read(
    table: Sequence[Tensor], shapes: Mapping[str, Shape], value: Callable[[str, Shape], np.ndarray]
) -> dict[str, np.ndarray]:
    """All parameters of a small model, on the host.

    Args:
      table: of the model (tables.of).
      shapes: of our parameters, by name.
      value: (name, shape) -> that tensor of the checkpoint.
    """
    params: dict[str, np.ndarray] = {}
    for tensor in table:
        for name, at in tensor.names(shapes):
            for path, part in tensor.split(value(name, tensor.shape(shapes)), shapes).items():
                if path not in params:
                    params[path] = np.empty(shapes[path], part.dtype)
                params[path][at] = part
    return params
