"""How a model's experts were used on data, by layer and by domain; and the file that holds it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from capibara.core import limits
from capibara.core.fields import did_you_mean
from capibara.core.types import UserError
from capibara.storage import outputs

if TYPE_CHECKING:
    from capibara.models.api import TransformerConfig

FORMAT = 1
ALL = "all"
"""What the tokens of all domains together are called."""
_MEANS = ("gate", "norm", "activation")
_MOST_VALUES = 20_000_000  # pairs of 384 experts in 60 layers (Kimi K2) are 9 million


@dataclasses.dataclass(frozen=True)
class Use:
    """How the experts of one layer were used; arrays [E] in float64.

    Attributes:
      routed: tokens that chose each expert.
      gate, norm, activation: means over these tokens of the gate, of the norm of the unweighted output, and of their
        product; 0 of an expert that no token chose.
      outputs: [E, P] mean output, projected (models.parts.usage).
      pairs: [E, E] tokens that chose both, of all domains.
    """

    routed: np.ndarray
    gate: np.ndarray
    norm: np.ndarray
    activation: np.ndarray
    outputs: np.ndarray
    pairs: np.ndarray


@dataclasses.dataclass(frozen=True)
class DomainUse:
    """How the tokens of one domain used the experts.

    Attributes:
      tokens: number of tokens.
      routed, gate, norm, activation: [L, E], as in Use.
    """

    tokens: int
    routed: np.ndarray
    gate: np.ndarray
    norm: np.ndarray
    activation: np.ndarray

    @property
    def share(self) -> np.ndarray:
        """[L, E] share of the tokens that chose each expert; a layer's shares sum to its experts per token."""
        return self.routed / max(self.tokens, 1)


@dataclasses.dataclass(frozen=True)
class Statistics:
    """How the experts of a model were used.

    Attributes:
      model: path of the model.
      layers: numbers of the layers that have experts.
      top_k: experts per token.
      domains: ALL first; then those of the data, and "unknown" for tokens of none, as far as they have tokens.
      outputs: [L, E, P], as in Use.
      pairs: [L, E, E], as in Use.
    """

    model: str
    layers: tuple[int, ...]
    top_k: int
    domains: Mapping[str, DomainUse]
    outputs: np.ndarray
    pairs: np.ndarray

    @property
    def num_experts(self) -> int:
        """Experts of a layer."""
        return self.pairs.shape[-1]

    def use(self, index: int, domain: str = ALL) -> Use:
        """The use of a layer's experts.

        Args:
          index: of the layer in `layers`.
          domain: whose tokens count.

        Raises:
          UserError: there is no such domain.
        """
        if domain not in self.domains:
            raise UserError(
                f"domain is {domain!r}, must be one of the statistics of {self.model}: {', '.join(self.domains)}"
                f"{did_you_mean(domain, self.domains)}"
            )
        of = self.domains[domain]
        arrays = (of.routed, of.gate, of.norm, of.activation, self.outputs, self.pairs)
        return Use(*(np.asarray(array[index], np.float64) for array in arrays))

    def check(self, config: TransformerConfig, where: str) -> None:
        """Raises UserError if these are not statistics of such a model; `where` names its file."""
        layers = config.module_layers.get("mlp", tuple(range(config.num_layers)))
        assert config.moe is not None, "it is checked before"
        ours, theirs = (layers, config.moe.num_experts), (self.layers, self.num_experts)
        if ours != theirs:
            raise UserError(
                f"{where} has statistics of {theirs[1]} experts in each of {len(theirs[0])} layers, the model has {ours[1]} in each "
                f"of {len(ours[0])}: measure it with `capibara experts stats`"
            )

    def write(self, path: str) -> None:
        """Writes the statistics as JSON.

        Raises:
          UserError: the file cannot be written.
        """
        domains = {
            name: {"tokens": of.tokens, "routed": of.routed.tolist(), "share": np.round(of.share, 6).tolist()}
            | {mean: getattr(of, mean).tolist() for mean in _MEANS}
            for name, of in self.domains.items()
        }
        values = {"format": FORMAT, "model": self.model, "layers": self.layers, "top_k": self.top_k}
        values |= {"domains": domains, "outputs": self.outputs.tolist(), "pairs": self.pairs.astype(int).tolist()}
        outputs.save(path, json.dumps(values) + "\n")


def read(path: str) -> Statistics:
    """Reads what `Statistics.write` wrote.

    Raises:
      UserError: the file does not exist, or is another.
    """
    try:
        values = limits.read_json(path, values=_MOST_VALUES)
    except FileNotFoundError:
        raise UserError(f"{path} does not exist: write it with `capibara experts stats MODEL --out={path}`") from None
    try:
        if values["format"] != FORMAT:
            raise ValueError(f"its format is {values['format']}, must be {FORMAT}")
        result = _of_values(values)
        _check_shapes(result)
    except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        raise UserError(
            f"{path} has no statistics of experts ({limits.cause(error)}): write it with `capibara experts stats`"
        ) from None
    return result


def _of_values(values: Mapping[str, Any]) -> Statistics:
    array = lambda item: np.asarray(item, np.float64)  # noqa: E731
    domains = {
        str(name): DomainUse(int(of["tokens"]), *(array(of[key]) for key in ("routed", *_MEANS)))
        for name, of in values["domains"].items()
    }
    layers = tuple(map(int, values["layers"]))
    return Statistics(
        str(values["model"]), layers, int(values["top_k"]), domains, array(values["outputs"]), array(values["pairs"])
    )


def _check_shapes(statistics: Statistics) -> None:
    L, E = len(statistics.layers), statistics.num_experts
    if ALL not in statistics.domains:
        raise ValueError(f"there is no domain {ALL!r}")
    shapes = {"pairs": (statistics.pairs, (L, E, E)), "outputs": (statistics.outputs[..., 0], (L, E))}
    for name, of in statistics.domains.items():
        shapes |= {f"{key} of {name}": (getattr(of, key), (L, E)) for key in ("routed", *_MEANS)}
    for name, (value, shape) in shapes.items():
        if value.shape != shape or not np.isfinite(value).all():
            raise ValueError(f"{name} must be finite numbers of the shape {list(shape)}")


def of_sums(sums: Mapping[str, np.ndarray], model: str, config: TransformerConfig, names: Sequence[str]) -> Statistics:
    """Statistics from what models.parts.usage sums.

    Args:
      sums: over all batches, [L, ...], without the prefix.
      model: path of the model.
      config: of the model.
      names: of the domains, from number 1.
    """
    assert config.moe is not None
    routed = sums["routed"]
    tokens = sums["tokens"][0]
    parts = {name: slice(number, number + 1) for number, name in enumerate(("unknown", *names))}
    present = {name: at for name, at in parts.items() if tokens[at].sum() > 0 and len(parts) > 1}
    domains = {}
    for name, at in ({ALL: slice(None)} | present).items():
        of = {key: sums[key][:, at].sum(1) for key in ("routed", "gates", "norms", "activations")}
        means = [of[key] / np.maximum(of["routed"], 1) for key in ("gates", "norms", "activations")]
        domains[name] = DomainUse(int(tokens[at].sum()), of["routed"], *means)
    projected = sums["outputs"] / np.maximum(routed.sum(1), 1)[..., None]
    layers = config.module_layers.get("mlp", tuple(range(config.num_layers)))
    return Statistics(model, layers, config.moe.top_k, domains, projected, sums["pairs"])
