"""The tensors of modules that predict further tokens (multi-token prediction). Needs only numpy."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence

from capibara.interop.hf.layout.tensors import Shape, Tensor

PREFIX = "mtp/"
_LAYER, _BLOCK = "model.layers.{l}.", f"{PREFIX}block/"
_BOTH = f"{PREFIX}from_embedding {PREFIX}from_hidden"  # side by side, the embedding first


@dataclasses.dataclass(frozen=True, kw_only=True)
class MtpNames:
    """How a family calls the modules' tensors.

    Attributes:
      embedding_norm, hidden_norm, projection, norm: tensors of a module; norm "": it has none. {l} is its number.
      layer: what the names of its layer begin with; "model.layers.{l}.": modules are numbered after the model's layers.
      pattern: pattern of all of these names, with {l} for the numbers where they are numbered after the model's layers.
      dense: whether a module has an MLP in models with experts.
      copies: tensors that a module has of the model's, and the parameters that these are.
    """

    embedding_norm: str
    hidden_norm: str
    projection: str
    norm: str
    layer: str
    pattern: str
    dense: bool = False
    copies: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def after_layers(self) -> bool:
        """Whether modules are numbered after the model's layers."""
        return self.layer == _LAYER

    @property
    def most(self) -> int:
        """The most modules that there are names for."""
        return 8 if "{l}" in self.projection else 1

    def first_number(self, num_layers: int) -> int:
        """The number of the first module."""
        return num_layers if self.after_layers else 0

    def pattern_of(self, num_layers: int) -> str:
        """The pattern of the tensors of a model's modules."""
        first = self.first_number(num_layers)
        return self.pattern.replace("{l}", f"(?:{'|'.join(str(first + n) for n in range(self.most))})")

    def rows(self, rows: Sequence[Tensor], shapes: Mapping[str, Shape]) -> tuple[Tensor, ...]:
        """The rows of the modules' tensors.

        Args:
          rows: of the model.
          shapes: of its parameters, by name.
        """
        if not any(path.startswith(PREFIX) for path in shapes):
            return ()
        ends = [row for row in self._ends() if row.ours[0] in shapes]
        every = [*self._of_layer(rows), *ends]
        depth = max(shape[0] for path, shape in shapes.items() if path.startswith("layers/"))
        first, count = self.first_number(depth), shapes[ends[0].ours[0]][0]
        numbers = tuple(range(first, first + count))
        every = [dataclasses.replace(row, layers=numbers if self.after_layers else None) for row in every]
        for number, (name, ours) in itertools.product(numbers, self.copies.items()):
            every.append(Tensor(name.format(l=number), "v d", (ours,), "", "vd"))
        return tuple(row for row in every if row.ours[0] in shapes)

    def _ends(self) -> Iterable[Tensor]:
        """The rows of what a module has beside its layer."""
        single = "" if "{l}" in self.projection else "l"
        yield Tensor(self.projection, f"o {single}d", tuple(_BOTH.split()), "d", "ldo")
        norms = (self.embedding_norm, "embedding_norm"), (self.hidden_norm, "hidden_norm"), (self.norm, "norm")
        for name, ours in norms:
            if name:
                yield Tensor(name, f"{single}d", (f"{PREFIX}{ours}/scale",), "", "ld")

    def _of_layer(self, rows: Sequence[Tensor]) -> Iterable[Tensor]:
        """The rows of the modules' layers, from those of the model's."""
        skipped, mlp = ("layers/mlp/", "layers/first_mlp/") if self.dense else ("layers/first_mlp/", "layers/mlp/")
        has_experts = any(row.ours[0].startswith("layers/first_mlp/") for row in rows)
        for row in rows:
            paths = row.ours
            if not paths[0].startswith("layers/") or (has_experts and paths[0].startswith(skipped)):
                continue
            ours = tuple(_BLOCK + path.replace(mlp, "layers/mlp/").removeprefix("layers/") for path in paths)
            yield dataclasses.replace(row, name=row.name.replace(_LAYER, self.layer), ours=ours, layers=None)


# DeepSeek-V3, GLM 4.5: layers after the last one, with copies of the embedding and of the head.
DEEPSEEK = MtpNames(
    embedding_norm=_LAYER + "enorm.weight",
    hidden_norm=_LAYER + "hnorm.weight",
    projection=_LAYER + "eh_proj.weight",
    norm=_LAYER + "shared_head.norm.weight",
    layer=_LAYER,
    pattern=r"^model\.layers\.{l}\.",
    copies={_LAYER + "embed_tokens.weight": "embedding", _LAYER + "shared_head.head.weight": "output"},
)
# Qwen3-Next, Qwen 3.5.
QWEN = MtpNames(
    embedding_norm="mtp.pre_fc_norm_embedding.weight",
    hidden_norm="mtp.pre_fc_norm_hidden.weight",
    projection="mtp.fc.weight",
    norm="mtp.norm.weight",
    layer="mtp.layers.{l}.",
    pattern=r"^mtp\.",
)
EXAONE = dataclasses.replace(QWEN, dense=True)
ERNIE = MtpNames(
    embedding_norm="model.mtp_emb_norm.{l}.weight",
    hidden_norm="model.mtp_hidden_norm.{l}.weight",
    projection="model.mtp_linear_proj.{l}.weight",
    norm="",
    layer="model.mtp_block.{l}.",
    pattern=r"(?:^|\.)mtp_",
    dense=True,
)
