"""Maps adapters of our weights to those of PEFT's modules, and handles layers that differ.

Where Hugging Face has one tensor for several of our weights (query, key and value of GPT-2, GPT-NeoX and Phi-3, gate
and up of Phi-3), PEFT has one adapter for that tensor. On reading it becomes adapters of each of our weights that share
their `a` (Lora.fused). Adapters that do not share it are written as one whose rank is the sum of theirs, with zeros in
`lora_B` for the ranks of other weights.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from capibara.core.types import UserError
from capibara.interop.hf.layout.tensors import Shape, Tensor, own_letters
from capibara.interop.peft import experts as peft_experts
from capibara.models.api import Lora

PREFIX = "base_model.model."
PARTS = {"a": ".lora_A.weight", "b": ".lora_B.weight", "magnitude": ".lora_magnitude_vector"}
_RANK_AXIS = {"a": 0, "b": 1}

Values = dict[str, np.ndarray]


class Layer(NamedTuple):
    """Rank and alpha, as PEFT counts them, of a module's adapter in one layer; rank 0: it has none."""

    rank: int
    alpha: float


class Module(NamedTuple):
    """The adapter of one of PEFT's modules, or of that module in every layer.

    Attributes:
      row: the table's row of its weight.
      rank, alpha: as PEFT counts them; if layers differ, the largest rank and that layer's alpha.
      values: "a", "b" and optionally "magnitude" of each of our weights, by name; `a` is the same for all of them.
      layers: rank and alpha of each layer, if they differ.
    """

    row: Tensor
    rank: int
    alpha: float
    values: dict[str, Values]
    layers: tuple[Layer, ...] = ()

    @property
    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The parts, each as a row of a table."""
        inputs, outputs = groups(self.row)
        if peft_experts.is_stacked(self.row):
            yield from ((part, peft_experts.stacked(self.row, part, inputs, outputs)) for part in "ab")
            return
        numbered, letters = self.row.numbered, self.row.layout[len(self.row.numbered) :]
        ours_in = "".join(letter for letter in letters if letter in inputs)
        ours_out = "".join(letter for letter in letters if letter in outputs)
        yield (
            "a",
            dataclasses.replace(
                self.row, dims=f"r {inputs}", layout=f"{numbered}{ours_in}r", ours=self.row.ours[:1], along=""
            ),
        )
        yield "b", dataclasses.replace(self.row, dims=f"{outputs} r", layout=f"{numbered}r{ours_out}")
        yield "magnitude", dataclasses.replace(self.row, dims=outputs, layout=f"{numbered}{ours_out}")

    def written(self) -> Iterator[tuple[str, np.ndarray]]:
        """PEFT's names and tensors."""
        for part, tensor in self.tensors:
            values = {path: self.values[path][part] for path in tensor.ours if part in self.values[path]}
            shapes = {path: value.shape for path, value in values.items()}
            for name, at in tensor.names(shapes) if values else ():
                rank = self.layers[at[0]].rank if self.layers else self.rank
                if not rank:
                    continue
                joined = tensor.join({path: value[at] for path, value in values.items()}, shapes)
                if self.layers and part in _RANK_AXIS:
                    joined = np.ascontiguousarray(np.take(joined, range(rank), axis=_RANK_AXIS[part]))
                yield PREFIX + name.removesuffix(".weight") + PARTS[part], joined

    @property
    def everywhere(self) -> bool:
        """Whether every layer has an adapter."""
        return all(layer.rank for layer in self.layers)

    def names(self) -> Iterator[tuple[str, Layer]]:
        """If layers differ, the module's name in each layer that has an adapter, and its rank and alpha."""
        for number, layer in enumerate(self.layers):
            if layer.rank:
                yield self.row.name.format(l=number).removesuffix(".weight"), layer


def of_layers(row: Tensor, layers: Sequence[Layer], values: dict[str, Values]) -> Module:
    """A module whose layers may differ."""
    largest = max(layers)
    differ = tuple(layers) if len(set(layers)) > 1 else ()
    return Module(row, largest.rank, largest.alpha, values, differ)


def of_ours(row: Tensor, values: Mapping[str, object], shapes: Mapping[str, Shape], lora: Lora) -> Module:
    """Combines the adapters of our weights into one of PEFT's.

    Args:
      row: the table's row of the tensor that holds the weights.
      values: our parameters, by name.
      shapes: of the weights.
      lora: the adapters' configuration.

    Raises:
      UserError: PEFT's adapter of the tensor cannot represent them.
    """
    held = [path for path in row.ours if f"{path}_lora/b" in values]
    siblings = {path.rpartition("/")[2] for path in held}
    parts: dict[str, Values] = {path: {} for path in row.ours}
    for path in held:
        for part in PARTS:
            first = lora.first_of(path, siblings) if part == "a" else path.rpartition("/")[2]
            name = f"{path.rpartition('/')[0]}/{first}_lora/{part}"
            if name in values:
                parts[path][part] = np.asarray(values[name])
    ranks, scales = lora.of_layers(held[0], range(shapes[held[0]][0]))
    layers = [Layer(r, s * (r**0.5 if lora.rslora else r)) for r, s in zip(ranks, scales, strict=True)]
    same = all(np.array_equal(parts[path]["a"], parts[held[0]]["a"]) for path in held)
    alike = all(lora.of_layers(path, range(shapes[path][0])) == (ranks, scales) for path in held)
    if same and alike and (len(held) == len(row.ours) or not lora.dora):
        for path in set(row.ours) - set(held):
            parts[path] = {"a": parts[held[0]]["a"], "b": _zeros(path, parts[held[0]]["a"].shape[-1], row, shapes)}
        return of_layers(row, layers, parts)
    if lora.dora and len(held) < len(row.ours):
        raise UserError(
            f"PEFT has one adapter for {', '.join(row.ours)}, and with Lora.dora {held[0]} cannot have one of its own: "
            "write the merged model"
        )
    if any(len(set(lora.of_layers(path, range(shapes[path][0]))[1])) > 1 for path in held):
        raise UserError(
            f"PEFT has one adapter for {', '.join(row.ours)}, whose layers differ in Lora's patterns: name them together in "
            "Lora.fused, or write the merged model"
        )
    rank = sum(parts[path]["a"].shape[-1] for path in held)
    _widen(parts, held, rank, scales[0], row, shapes, lora)
    return Module(row, rank, scales[0] * (rank**0.5 if lora.rslora else rank), parts)


def _widen(
    parts: dict[str, Values],
    held: Sequence[str],
    rank: int,
    scale: float,
    row: Tensor,
    shapes: Mapping[str, Shape],
    lora: Lora,
) -> None:
    """Gives all weights of a row the same `a` with the ranks of all, and each weight a `b` that uses only its own."""
    a = np.concatenate([parts[path]["a"] for path in held], axis=-1)
    count, start = stacked(row), 0
    for path in row.ours:
        b = _zeros(path, rank, row, shapes)
        if path in held:
            bias = parts[path]["b"]
            end = start + bias.shape[count]
            b[(slice(None),) * count + (slice(start, end),)] = bias * (lora.of_layers(path, (0,))[1][0] / scale)
            start = end
        parts[path] |= {"a": a, "b": b}


def _zeros(path: str, rank: int, row: Tensor, shapes: Mapping[str, Shape]) -> np.ndarray:
    """A `b` without effect."""
    shape, count, outputs = shapes[path], stacked(row), len(own_letters(groups(row)[1]))
    return np.zeros((*shape[:count], rank, *shape[len(shape) - outputs :]), np.float32)


def groups(row: Tensor) -> tuple[str, str]:
    """The letters of a weight's inputs and of its outputs, in the checkpoint's order."""
    count = peft_experts.is_stacked(row)
    first = row.layout[stacked(row)]
    letters = sorted(row.dims.split()[count:], key=lambda group: first not in group)
    return letters[0], letters[1]


def is_outputs_first(row: Tensor) -> bool:
    """Whether the checkpoint's tensor has a weight's outputs before its inputs, unlike GPT-2's, or is no such weight."""
    return len(row.dims.split()) != 2 or "l" not in row.numbered or row.dims.split()[0] != groups(row)[0]


def stacked(row: Tensor) -> int:
    """Number of leading dimensions of our weights along which adapters are stacked: layers and experts."""
    return len(row.numbered) + peft_experts.is_stacked(row)


def layers_of(row: Tensor, stored: Mapping[str, Any], shapes: Mapping[str, Shape]) -> list[int]:
    """The rank of each layer's adapter among tensors with these names; 0: it has none.

    Raises:
      UserError: only some experts of a layer have adapters.
    """
    if set(row.numbered) - {
        "l",
        "e",
    }:  # without layer and expert, such as AltUp's projections: PEFT has no adapters of them
        return []
    shape, experts = shapes[row.ours[0]], "e" in row.numbered
    of_all = math.prod(shape[len(row.numbered) : stacked(row)])
    ranks = []
    for layer in range(shape[0]):
        value = stored.get(row.name.format(l=layer, e=0).removesuffix(".weight") + PARTS["a"])
        ranks.append(0 if value is None else -(-value.shape[0] // of_all))
    if (experts or of_all > 1) and len(set(ranks)) > 1:
        raise UserError(
            f"{row.name.format(l=ranks.index(min(ranks)), e=0).removesuffix('.weight')} has an adapter of rank {min(ranks)}, "
            "here experts must have the same adapters in all layers: merge it with PEFT first"
        )
    return ranks


def padded(value: np.ndarray, part: str, rank: int) -> np.ndarray:
    """A part, padded with zeros to this rank."""
    axis = _RANK_AXIS.get(part)
    if axis is None or value.shape[axis] >= rank:
        return value
    width = [(0, 0)] * value.ndim
    width[axis] = (0, rank - value.shape[axis])
    return np.pad(value, width)
