"""transformers' models of family_cases.py and what they answer: the peer program of test_families.py.

    python tests/interop/families/peer.py write FOLDER [NAME ...]   FOLDER/NAME/theirs, the model; FOLDER/NAME/answers.npz
    python tests/interop/families/peer.py read FOLDER [NAME ...]    what transformers answers with FOLDER/NAME/ours: read.npz

answers.npz has `logits` of answers.tokens in float32, `exact` the same in float64, `greedy` (the tokens that follow the
first eight of each row), and `losses` of five steps of AdamW. Encoders have those of encoder_families.batch, and no
`greedy`; encoder-decoders read encdec_families.encoder_entries, too. Needs torch, transformers and safetensors.
"""

from __future__ import annotations

import json
import pathlib
import sys

import numpy as np
import safetensors.numpy
import torch
import transformers
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "models" / "golden")]

import answers  # noqa: E402
import encdec_families  # noqa: E402
import encoder_families  # noqa: E402
from family_cases import ANSWERING, CASES, CLASSES, CONSTANTS, IMPLEMENTATIONS, UNTRAINED  # noqa: E402

START, NEW_TOKENS, STEPS = 8, 32, 5


class Double(TorchFunctionMode):
    """float64 throughout: transformers computes norms, softmax, angles and losses in float32 whatever the model's dtype."""

    BYTES = (torch.asarray, torch.frombuffer, torch.Tensor.view)  # their dtype reinterprets existing bytes

    def __enter__(self):
        torch.set_default_dtype(torch.float64)
        return super().__enter__()

    def __exit__(self, *error):
        torch.set_default_dtype(torch.float32)
        return super().__exit__(*error)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in self.BYTES:
            return func(*args, **(kwargs or {}))
        wide = lambda x: torch.float64 if x is torch.float32 else x  # noqa: E731
        func = torch.Tensor.double if func is torch.Tensor.float else func
        return func(*map(wide, args), **{key: wide(value) for key, value in (kwargs or {}).items()})


def tokens() -> np.ndarray:
    return np.random.default_rng(0).integers(3, answers.VOCAB, (answers.ROWS, answers.LENGTH))


def of_encoder(model_type: str) -> bool:
    return model_type in encoder_families.TYPES


def kind_of(model_type: str) -> type:
    if of_encoder(model_type):
        return AutoModelForMaskedLM
    if model_type in encdec_families.TYPES:
        return AutoModelForSeq2SeqLM
    return getattr(transformers, CLASSES.get(model_type, "AutoModelForCausalLM"))


def encoded(model: torch.nn.Module, batch: dict[str, np.ndarray]) -> torch.Tensor:
    """An encoder's logits."""
    return model(**{name: torch.from_numpy(value) for name, value in encoder_families.arguments(batch).items()}).logits


def decoded(model: torch.nn.Module, ids: torch.Tensor, row: int | None = None) -> torch.Tensor:
    """Logits of the next tokens, for all rows or one."""
    if model.config.model_type not in encdec_families.TYPES:
        return model(ids, use_cache=False).logits
    read = {name: torch.from_numpy(value) for name, value in encdec_families.arguments(row).items()}
    return model(**read, decoder_input_ids=ids, use_cache=False).logits


def write(case: dict, where: pathlib.Path) -> None:
    """A folder as transformers writes it, whose tensors are drawn by their names there."""
    config = AutoConfig.for_model(**case)
    if config.model_type in CLASSES:
        model = kind_of(config.model_type)(config).float().eval()
    else:
        model = kind_of(config.model_type).from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(where / "theirs")
    path = where / "theirs" / "model.safetensors"
    stored = safetensors.numpy.load_file(path)
    constants = CONSTANTS.get(config.model_type, ())
    values = {name: answers.drawn(name, x.shape, case) for name, x in stored.items() if not name.endswith(constants)}
    safetensors.numpy.save_file(values, path, metadata={"format": "pt"})


def opened(folder: pathlib.Path, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    model_type = json.loads((folder / "config.json").read_text())["model_type"]
    constants = CONSTANTS.get(model_type, ())
    how = IMPLEMENTATIONS.get(model_type, "eager")
    eager = {} if of_encoder(model_type) else {"experts_implementation": "eager"}
    model, info = kind_of(model_type).from_pretrained(
        folder, attn_implementation=how, dtype=dtype, output_loading_info=True, **eager
    )
    info["missing_keys"] = [name for name in info["missing_keys"] if not name.endswith(constants)]
    strange = {key: sorted(map(str, value)) for key, value in info.items() if value and key != "error_msgs"}
    assert not strange, strange
    return model.get_submodule(ANSWERING.get(model_type, "")).eval()


def logits(model: torch.nn.Module) -> np.ndarray:
    with torch.no_grad():
        if of_encoder(model.config.model_type):
            return encoded(model, encoder_families.batch(types_of(model))).numpy()
        return decoded(model, torch.from_numpy(tokens())).numpy()


def types_of(model: torch.nn.Module) -> int:
    return getattr(model.config, "type_vocab_size", 0)


def greedy(model: torch.nn.Module) -> np.ndarray:
    start, found = torch.from_numpy(tokens())[:, :START], []
    if model.config.model_type in encdec_families.TYPES:
        start = torch.full((len(start), 1), model.config.decoder_start_token_id)
    with torch.no_grad():
        for row, ids in enumerate(start[:, None]):
            for _ in range(NEW_TOKENS):
                ids = torch.cat([ids, decoded(model, ids, row)[:, -1:].argmax(-1)], dim=1)
            found.append(ids.numpy()[0, start.shape[1] :])
    return np.stack(found)


def losses(model: torch.nn.Module) -> np.ndarray:
    ids, batch = torch.from_numpy(tokens()), encoder_families.masked(encoder_families.batch(types_of(model)))
    for name, parameter in model.named_parameters():  # transformers 5.24 forgets it as it loads them
        parameter.requires_grad_(not name.endswith(UNTRAINED.get(model.config.model_type, ())))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.0)
    found = []
    for _ in range(STEPS):
        if of_encoder(model.config.model_type):
            chosen = torch.from_numpy(batch["weights"]) > 0
            predicted, targets = encoded(model, batch)[chosen], torch.from_numpy(batch["targets"]).long()[chosen]
        else:  # their own loss shifts the labels, and ours are shifted already
            predicted, targets = decoded(model, ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()
        loss = torch.nn.functional.cross_entropy(predicted, targets)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found.append(loss.item())
    return np.array(found)


def main(what: str, folder: pathlib.Path, *names: str) -> None:
    torch.set_num_threads(1)
    for name in names or CASES:
        where = folder / name
        if what == "read":
            np.savez(where / "read.npz", logits=logits(opened(where / "ours")))
            continue
        write(CASES[name], where)
        with Double():
            exact = opened(where / "theirs", torch.float64)
            found = {"exact": logits(exact), "exact_losses": losses(exact)}
        model = opened(where / "theirs")
        if not of_encoder(CASES[name]["model_type"]):
            found["greedy"] = greedy(model)
        np.savez(where / "answers.npz", logits=logits(model), **found, losses=losses(model))
        print(name, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], pathlib.Path(sys.argv[2]), *sys.argv[3:])
