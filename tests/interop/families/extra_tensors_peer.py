"""Which tensors transformers' models have beside those of their files, and which of them it computes with.

    python tests/interop/families/extra_tensors_peer.py list FOLDER    FOLDER/names.json: names and shapes, by family
    python tests/interop/families/extra_tensors_peer.py draw FOLDER    FOLDER/used.json: those of FOLDER/some.json that change logits

Files may have such tensors: weights under the names of others that are tied to them, and tables that follow from config.json.
Other values of them are other models. The peer program of test_extra_tensors.py; needs torch, transformers and safetensors.
"""

from __future__ import annotations

import json
import pathlib
import sys
from collections.abc import Mapping

import numpy as np
import safetensors.numpy
import torch
import transformers

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "models" / "golden")]

import answers  # noqa: E402
import peer  # noqa: E402
from family_cases import ANSWERING, CASES, IMPLEMENTATIONS  # noqa: E402

# What older files have in a module, if its name ends so.
OLDER = {
    "attn": ("bias", "masked_bias", "causal_mask", "rotary_emb.inv_freq"),
    "attention": ("bias", "masked_bias", "rotary_emb.inv_freq"),
    "self": ("rotary_embeddings.inv_freq", "distance_embedding.weight"),
    "self_attn": ("rotary_emb.inv_freq", "bias"),
    "EncDecAttention": ("relative_attention_bias.weight",),
    "embeddings": ("position_ids", "token_type_ids"),
    **dict.fromkeys(("encoder", "decoder", "model"), ("version", "embed_positions.weight", "embed_positions.weights")),
    **dict.fromkeys(("lm_head", "predictions"), ("bias", "decoder.bias", "decoder.weight")),
}


def write(folder: pathlib.Path, name: str, more: Mapping[str, np.ndarray]) -> None:
    """The folder of a family as it was recorded, and more tensors."""
    recorded = json.loads((HERE / "recorded" / f"{name}.json").read_text())
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(recorded["config"]))
    tensors = {key: answers.drawn(key, tuple(shape), recorded["config"]) for key, shape in recorded["tensors"].items()}
    safetensors.numpy.save_file(tensors | more, folder / "model.safetensors", metadata={"format": "pt"})


def loaded(folder: pathlib.Path) -> torch.nn.Module:
    model_type = json.loads((folder / "config.json").read_text())["model_type"]
    how = {"attn_implementation": IMPLEMENTATIONS.get(model_type, "eager"), "dtype": torch.float32}
    if not peer.of_encoder(model_type):
        how["experts_implementation"] = "eager"
    return peer.kind_of(model_type).from_pretrained(folder, **how).eval()


def logits(model: torch.nn.Module) -> np.ndarray:
    return peer.logits(model.get_submodule(ANSWERING.get(model.config.model_type, "")))


def tensors_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return dict(model.named_buffers()) | model.state_dict()


def extra(model: torch.nn.Module) -> dict[str, list[int]]:
    """Names and shapes of a model's tensors, and of those that older files have in its modules."""
    shapes = {name: list(tensor.shape) for name, tensor in tensors_of(model).items()}
    for module, _ in model.named_modules():
        for leaf in OLDER.get(module.rpartition(".")[2], ()):
            shapes.setdefault(f"{module}.{leaf}", [4])
    return shapes


def other(name: str, shape: list[int], tensors: Mapping[str, torch.Tensor]) -> np.ndarray:
    """A tensor with other values than a model's, or drawn."""
    if name not in tensors:
        return answers.draw(name, tuple(shape))
    value = tensors[name].detach().numpy()
    return np.ascontiguousarray(value * 1.3 + 0.2 if value.dtype.kind == "f" else value + 1).astype(value.dtype)


def used(folder: pathlib.Path, name: str, some: Mapping[str, list[int]]) -> dict[str, list[int]]:
    """Those of some tensors whose values change the logits of a family."""
    write(folder, name, {})
    model = loaded(folder)
    usual, tensors = logits(model), tensors_of(model)

    def changes(names: Mapping[str, list[int]]) -> bool:
        write(folder, name, {key: other(key, shape, tensors) for key, shape in names.items()})
        return not np.array_equal(logits(loaded(folder)), usual)

    return {key: shape for key, shape in some.items() if changes({key: shape})} if changes(some) else {}


def main(what: str, folder: pathlib.Path) -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if what == "list":
        result = {}
        for name in CASES:
            write(folder / name, name, {})
            result[name] = extra(loaded(folder / name))
        (folder / "names.json").write_text(json.dumps(result))
        return
    some = json.loads((folder / "some.json").read_text())
    result = {name: used(folder / name, name, shapes) for name, shapes in some.items()}
    (folder / "used.json").write_text(json.dumps({name: shapes for name, shapes in result.items() if shapes}))


if __name__ == "__main__":
    main(sys.argv[1], pathlib.Path(sys.argv[2]))
