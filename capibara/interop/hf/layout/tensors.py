"""How the tensors of a foreign checkpoint hold our parameters: declared in tables, split and joined here.

Needs only numpy: the scripts that make reference answers run in environments without JAX.

Dimensions are letters: l layers, e experts, v vocabulary, p positions, t token types, r relative positions, d embed,
o another embed, n heads, h head_dim, f hidden width of an MLP, i an index of interleaved parameters, which has no
dimension in ours. "nh d" is a tensor of two dimensions, the first of which runs over heads and, within each, over its
own; a "u" has the size 1 and no dimension in ours. A tensor of one layer or expert has that letter in its name: "{l}". Heads that are fused by groups are "gnh": g stands for
the key/value heads, each with its queries, its key and its value; a digit in its place for that number of groups.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from capibara.core.projections import Axes

Shape = tuple[int, ...]
_BESIDE = "i"
_UNIT = "u"


# The letter of a parameter's logical axis.
_LETTERS = {
    "embed": "d", "expert_embed": "d", "heads": "n", "kv_heads": "n", "head_dim": "h", "mlp": "f", "experts": "e",
}  # fmt: skip


def letters(axes: Axes) -> str:
    """Those of logical axes: "dnh" for ("embed", "heads", "head_dim")."""
    return "".join(_LETTERS[axis] for axis in axes if axis is not None)


def own_letters(group: str) -> str:
    """The letters of a tensor's dimension that our parameters have too."""
    return "".join(letter for letter in group if letter not in (_BESIDE, _UNIT) and not _is_groups(letter))


def _is_groups(letter: str) -> bool:
    return letter == "g" or letter.isdigit()


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One row of a table: a tensor of a checkpoint, or one for each layer or expert.

    Attributes:
      name: its name, with {l} and {e} for the numbers of layer and expert.
      dims: its dimensions.
      ours: the parameters that it holds, by the names of core.tree.
      along: the letter of the dimension that concatenates several parameters; or the letters of one that runs over
        several of theirs ("nh"), which are concatenated whole.
      layout: the dimensions of our parameters; those in `name` come first.
      layers: the numbers of the layers that have it; None: all of them.
      of_layers: its names in these, where `name` does not say them; None: it does.
    """

    name: str
    dims: str
    ours: tuple[str, ...]
    along: str
    layout: str
    layers: tuple[int, ...] | None = None
    of_layers: tuple[str, ...] | None = None

    @property
    def numbered(self) -> str:
        """The letters that its name has as numbers."""
        return "".join(letter for letter in self.layout if f"{{{letter}}}" in self.name)

    def names(self, shapes: Mapping[str, Shape]) -> Iterator[tuple[str, tuple[int, ...]]]:
        """All names that the row stands for, each with its numbers.

        Args:
          shapes: of our parameters.
        """
        for at in np.ndindex(*shapes[self.ours[0]][: len(self.numbered)]):
            yield self.named(at), at

    def named(self, at: tuple[int, ...]) -> str:
        """The name of one tensor, by its indices in our parameters."""
        numbers = dict(zip(self.numbered, at))
        if self.of_layers is not None:
            return self.of_layers[numbers["l"]]
        if self.layers is not None:
            numbers["l"] = self.layers[numbers["l"]]
        return self.name.format(**numbers)

    def shape(self, shapes: Mapping[str, Shape]) -> Shape:
        """Its shape in the checkpoint, from those of our parameters."""
        if len(self.along) > 1:
            each = [self._alone(path).shape(shapes) for path in self.ours]
            axis = self.dims.split().index(self.along)
            return (*each[0][:axis], sum(shape[axis] for shape in each), *each[0][axis + 1 :])
        sizes = self._sizes(shapes)
        return tuple(math.prod(sizes[letter] for letter in group) for group in self.dims.split())

    def split(self, value: np.ndarray, shapes: Mapping[str, Shape]) -> dict[str, np.ndarray]:
        """The parts of our parameters that a tensor holds, as views, by name."""
        if len(self.along) > 1:
            return self._split_whole(value, shapes)
        letters, sizes = self.dims.replace(" ", ""), self._sizes(shapes)
        value = value.reshape([sizes[letter] for letter in letters])
        parts: Sequence[np.ndarray] = [value]
        if self.along:
            ends = np.cumsum([self._size(path, shapes) for path in self.ours])[:-1]
            parts = np.split(value, ends, axis=letters.index(self.along))
        if self.along == _BESIDE:
            at = letters.index(_BESIDE)
            letters, parts = letters.replace(_BESIDE, ""), [part.squeeze(at) for part in parts]
        if _UNIT in letters:
            units = tuple(at for at, letter in enumerate(letters) if letter == _UNIT)
            letters, parts = letters.replace(_UNIT, ""), [part.squeeze(units) for part in parts]
        order = [letters.index(letter) for letter in self._inner]
        parts = [part.transpose(order) for part in parts]
        if self._groups:
            at = self._inner.index("n")
            parts = [part.reshape(*part.shape[: at - 1], -1, *part.shape[at + 1 :]) for part in parts]
        return dict(zip(self.ours, parts, strict=True))

    def join(self, parts: Mapping[str, np.ndarray], shapes: Mapping[str, Shape]) -> np.ndarray:
        """The way back: a tensor of the parts that `split` gives."""
        if len(self.along) > 1:
            return self._join_whole(parts, shapes)
        letters, layout = self.dims.replace(" ", ""), self._inner
        order = [layout.index(letter) for letter in letters if letter not in (_BESIDE, _UNIT)]
        values = [parts[path] for path in self.ours]
        if self._groups:
            at, count = layout.index("n") - 1, self._sizes(shapes)[self._groups]
            values = [value.reshape(*value.shape[:at], count, -1, *value.shape[at + 1 :]) for value in values]
        values = [value.transpose(order) for value in values]
        for letter in (_BESIDE, _UNIT):
            if letter in letters and (letter == _UNIT or self.along == _BESIDE):
                places = tuple(at for at, other in enumerate(letters) if other == letter)
                values = [np.expand_dims(value, places) for value in values]
        value = values[0] if len(values) == 1 else np.concatenate(values, axis=letters.index(self.along))
        return np.ascontiguousarray(value).reshape(self.shape(shapes))

    def _alone(self, path: str) -> Tensor:
        """The row as if it held one of its parameters."""
        return dataclasses.replace(self, ours=(path,), along="")

    def _split_whole(self, value: np.ndarray, shapes: Mapping[str, Shape]) -> dict[str, np.ndarray]:
        """`split` for a dimension of several letters."""
        rows, axis = [self._alone(path) for path in self.ours], self.dims.split().index(self.along)
        parts = np.split(value, np.cumsum([row.shape(shapes)[axis] for row in rows])[:-1], axis)
        return {row.ours[0]: row.split(part, shapes)[row.ours[0]] for row, part in zip(rows, parts, strict=True)}

    def _join_whole(self, parts: Mapping[str, np.ndarray], shapes: Mapping[str, Shape]) -> np.ndarray:
        """`join` for a dimension of several letters."""
        axis = self.dims.split().index(self.along)
        return np.concatenate([self._alone(path).join(parts, shapes) for path in self.ours], axis)

    def _sizes(self, shapes: Mapping[str, Shape]) -> dict[str, int]:
        sizes = dict(zip(self.layout, shapes[self.ours[0]], strict=True)) | {_UNIT: 1}
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
