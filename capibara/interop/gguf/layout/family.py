"""What a family of GGUF files is, as llama.cpp computes it: its tensors and metadata.

The names and shapes of a checkpoint's tensors, and what a config.json means, are those of interop.hf.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from capibara.core import tree
from capibara.core.types import UserError
from capibara.interop.gguf.layout.tensors import Change, Factor, Shape, Take, Tensor, package
from capibara.interop.hf import config as hf_config
from capibara.interop.hf import families as hf_families
from capibara.interop.hf import tables
from capibara.interop.hf.layout.family import Family as HfFamily
from capibara.interop.hf.layout.tensors import Tensor as Row
from capibara.models import api
from capibara.models.api import DecoderConfig, Mixer

Fields = Mapping[str, Any]
Metadata = Mapping[str, Any]
Shapes = Mapping[str, Shape]

# Parts of tensors' names in a checkpoint -> those that the gguf package knows, in all families.
_RENAMED = {"e_score_correction_bias": "e_score_correction.bias"}


def windowed(fields: Fields, values: Metadata, shapes: Shapes) -> dict[str, Any]:
    """A `read` of families that llama.cpp computes with windows alone."""
    if not fields.get("window"):
        raise UserError(
            "sliding_window is missing, llama.cpp computes no model of the family without: it has no GGUF form"
        )
    return {}


class Window(enum.StrEnum):
    """What llama.cpp makes of layers with a window.

    none: they have none. listed: the file lists the layers that have one. ignored: it computes them without, and the file
    only records the length.
    """

    NONE = "none"
    LISTED = "listed"
    IGNORED = "ignored"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """One model_type.

    Attributes:
      model_type: its name in config.json.
      arch: its name in GGUF.
      when: the metadata that files of this family have, of several families with one architecture; "": the others have some.
      applies: whether it is that of a config.json, where others have the model_type too; None: it is.
      keys: fields of our configuration that are metadata of this family, beside sizes and norms -> key.
      moe_keys: the same for fields of our Moe.
      mixer: of recurrent layers; None: there are none.
      mixer_keys: metadata that are fields of the mixer.
      recurrent_key: metadata that list which layers are recurrent; "": those are without key and value heads.
      inverse: fields whose inverse is stored.
      fixed: fields of our configuration of which llama.cpp has one value, beside those that interop.hf fixes.
      moe: the same for fields of our Moe.
      biases: projections that may have biases: those of "qkv", "out" and "mlp".
      square: whether heads are as wide as the model together.
      latent: whether it has multi-head latent attention.
      window: what it makes of windows.
      period: every how many layers one has no window, where a file does not list them.
      rope_switch: metadata that say whether positions are rotary; "": they always are, if they are in interop.hf.
      factors: whether it reads factors of rotary frequencies (llama3).
      nextn: whether files may have further layers that predict several tokens, which are left out.
      longest: the longest row of models whose config.json has none; None: it must have one.
      changes: parts of tensors' names -> how GGUF stores them.
      renamed: parts of tensors' names -> those that the gguf package knows.
      places: parts of "name of a tensor, names of our parameters in it" -> names of the tensors that GGUF stores its parts
        in, within a layer; where the gguf package has none.
      padded: parts of names of tensors that have a row for every token in a file, and may have fewer.
      unused: tensors that llama.cpp wants and does not use, for a configuration: shapes, and fill values.
      listed: parts of names of tensors, each one number -> the metadata that list those of all layers.
      takes: what files have of tensors, for a configuration: parts of tensors' names -> what each of the file's has.
      fold: factors that GGUF files have in the weights: the configuration without them, and parts of tensors' names -> what
        their rows are multiplied by; None: there are none.
      constants: metadata that all its files have.
      ignored: further metadata that change nothing.
      read: further fields, from the other ones, the metadata and the shapes of the file's tensors.
      write: further metadata of a configuration.
    """

    model_type: str
    arch: str
    when: str = ""
    applies: Callable[[Fields], bool] | None = None
    keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    moe_keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    mixer: type[Mixer] | None = None
    mixer_keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    recurrent_key: str = ""
    inverse: tuple[str, ...] = ()
    fixed: Fields = dataclasses.field(default_factory=dict)
    moe: Fields = dataclasses.field(default_factory=dict)
    biases: frozenset[str] = frozenset({"qkv"})
    square: bool = False
    latent: bool = False
    window: Window = Window.NONE
    period: int = 4
    rope_switch: str = ""
    factors: bool = False
    nextn: bool = False
    longest: int | None = None
    changes: Mapping[str, Change] = dataclasses.field(default_factory=dict)
    renamed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    places: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    padded: tuple[str, ...] = ()
    unused: Callable[[DecoderConfig], dict[str, tuple[Shape, float]]] | None = None
    listed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    takes: Callable[[DecoderConfig], Mapping[str, tuple[Take, ...]]] | None = None
    fold: Callable[[DecoderConfig], tuple[DecoderConfig, Mapping[str, Factor]]] | None = None
    constants: Metadata = dataclasses.field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    read: Callable[[Fields, Metadata, Shapes], dict[str, Any]] | None = None
    write: Callable[[DecoderConfig], dict[str, Any]] | None = None

    @property
    def hf(self) -> HfFamily:
        """Its declaration as a family of Hugging Face models."""
        return hf_families.FAMILIES[self.model_type]

    def model(self, config: Fields) -> DecoderConfig:
        """Our configuration of a config.json."""
        result = hf_config.from_hf(config)
        assert isinstance(result, DecoderConfig), "families of decoders are declared here"
        return result

    def heads(self, config: Fields) -> tuple[int, int]:
        """Numbers of query heads, and of key and value heads."""
        model = self.model(config)
        return model.num_heads, model.kv_heads

    def rotary_size(self, config: Fields) -> int:
        """The part of a head that may have rotary positions."""
        return self.model(config).rotary_size

    def layers(self, config: Fields) -> int:
        """Number of layers."""
        return self.model(config).num_layers

    def experts(self, config: Fields) -> int:
        """Number of experts in a layer; 0: there are none."""
        moe = self.model(config).moe
        return 0 if moe is None else moe.num_experts

    def unread(self, config: Fields) -> dict[str, tuple[Shape, float]]:
        """Tensors that only the file has, by name: shapes, and fill values."""
        return {} if self.unused is None else self.unused(self.model(config))

    def tensors(self, config: Fields) -> list[Tensor]:
        """All tensors of a model with this configuration."""
        model = self.model(config)
        abstract = api.build(model).abstract_params
        leaves = (tuple(leaf.shape) for leaf in jax.tree.leaves(abstract))
        shapes = dict(zip(tree.path_names(abstract), leaves, strict=True))
        gguf = package()
        arch = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == self.arch)
        names = gguf.get_tensor_name_map(arch, model.num_layers)
        rows = tables.of(self.model_type, shapes, model.module_layers)
        groups = model.num_heads if self.latent else getattr(model.mixer, "groups", 1)
        takes = {} if self.takes is None else self.takes(model)
        _, factors = (model, {}) if self.fold is None else self.fold(model)
        tensors = (tensor for row in rows for tensor in self._of_row(row, shapes, names, takes))
        return [
            dataclasses.replace(
                tensor,
                groups=groups,
                rows=model.vocab_size if any(part in tensor.name for part in self.padded) else None,
                factor=next((factor for part, factor in factors.items() if part in tensor.name), 1.0),
            )
            for tensor in tensors
        ]

    def _of_row(
        self, row: Row, shapes: Shapes, names: object, takes: Mapping[str, tuple[Take, ...]]
    ) -> Iterator[Tensor]:
        shape, stacked = row.shape(shapes), row.numbered.strip("l")
        stack = shapes[row.ours[0]][row.numbered.index(stacked)] if stacked else 0
        single = dataclasses.replace(row, name=row.name.replace(f".{{{stacked}}}", "")) if stacked else row
        change = next((change for part, change in self.changes.items() if part in row.name), Change.NONE)
        parts = next((parts for part, parts in takes.items() if part in row.name), self._placed(row, shape))
        key = next((key for part, key in self.listed.items() if part in row.name), None)
        for name, at in row.names(shapes):
            if key is not None:
                yield Tensor(name, shape, key, index=at[0], stack=shapes[row.ours[0]][0], listed=True)
                continue
            of_map = single.named(tuple(i for i, letter in zip(at, row.numbered) if letter != stacked))
            index = at[row.numbered.index(stacked)] if stacked else None
            for take in parts:
                if take.place:
                    layer = next(part for part in of_map.split(".") if part.isdecimal())
                    stored = f"blk.{layer}.{take.place}"
                else:
                    stored = self._stored(of_map, names)
                yield Tensor(name, shape, stored, take.change or change, index, stack, take=take)

    def _placed(self, row: Row, shape: Shape) -> tuple[Take, ...]:
        """What each of the file's tensors has of one that is there in equal parts, or under another name."""
        whole = f"{row.name} {' '.join(row.ours)}"
        places = next((places for part, places in self.places.items() if part in whole), ("",))
        if len(places) == 1:
            return (Take(places[0]),)
        axis = row.dims.split().index(row.along)
        indices = np.split(np.arange(shape[axis]), len(places))
        return tuple(Take(place, part, axis) for place, part in zip(places, indices, strict=True))

    def _stored(self, name: str, names: Any) -> str:
        """The name in a file of a checkpoint's tensor, or of a stack of them."""
        for old, new in (_RENAMED | dict(self.renamed)).items():
            name = name.replace(old, new)
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if stored is None:
            raise UserError(
                f"{name} of the {self.model_type} model has no place in {self.arch} files: it has no GGUF form"
            )
        return stored
