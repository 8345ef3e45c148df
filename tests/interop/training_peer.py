"""Five steps of AdamW in transformers and PEFT: the peer program of test_transformers_training.py.

Run by that test in an environment with torch, transformers, peft and safetensors:
    python tests/interop/training_peer.py make FOLDER      every model saved in FOLDER/NAME/base
        python tests/interop/training_peer.py train FOLDER     trains every FOLDER/NAME/HOW/case.json; the results lie
        beside it python tests/interop/training_peer.py record FILE      trains RECORDED, as JSON, for
        test_peft_training.py

A case.json names the folder that it begins from ("base") and the arguments of PEFT's LoraConfig ("lora"; null: all
parameters train). The results are: `before`, the initial adapter; `after`, the adapter or the model after the steps;
and found.npz: the logits and the gradient's norm before the first step, and the losses of the steps, all in float64,
and under own_* the differences of the same in float32; own_grad_norm is the gradient's own, relative to its norm.
"""

from __future__ import annotations

import json
import pathlib
import sys

import numpy as np
import peft
import torch
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "models" / "golden")]

import answers  # noqa: E402
import make  # noqa: E402
import make_encoders  # noqa: E402
import peer  # noqa: E402

KINDS = {"t5": AutoModelForSeq2SeqLM, "bert": AutoModelForMaskedLM}
TASKS = {"t5": "SEQ_2_SEQ_LM", "bert": None}
LEARNING_RATE, DECAY, STEPS = 1e-4, 0.1, 5
# Above the rounding of gradients that are mathematically zero, such as key biases': AdamW would turn them into steps.
EPS = 1e-6
TIED = ("gpt_neox", "llama", "mistral", "qwen3", "phi3", *peer.MIXTURES)  # untied in the other tests

FIELDS = ("peft_type", "r", "lora_alpha", "target_modules", "rank_pattern", "alpha_pattern", "bias", "fan_in_fan_out")
FIELDS += ("trainable_token_indices",)
RECORDED = {
    "fused": ("phi3", dict(r=4, lora_alpha=8, target_modules=["qkv_proj", "gate_up_proj"])),
    "fused_biases": ("gpt2", dict(r=4, lora_alpha=8, target_modules=["c_attn"], bias="all", fan_in_fan_out=True)),
    "layers": (
        "llama",
        dict(
            r=4,
            lora_alpha=8,
            target_modules=r"model\.layers\.(0\.self_attn\.[qk]_proj|\d\.mlp\.up_proj)",
            rank_pattern={"layers.1.mlp.up_proj": 2},
            alpha_pattern={"q_proj": 1},
        ),
    ),
    "tokens": (
        "qwen2",  # its head is tied
        dict(
            r=4,
            lora_alpha=8,
            target_modules=["q_proj", "down_proj"],
            trainable_token_indices={"embed_tokens": [7, 90, 3]},
        ),
    ),
    "tokens_untied": ("llama", dict(r=4, lora_alpha=8, target_modules=["q_proj"], trainable_token_indices=[5, 64])),
    "gpt_oss": ("gpt_oss", None),  # all of it is trained
}


def make_all(folder: pathlib.Path) -> None:
    for name, model in peer.models():
        model.save_pretrained(folder / name / "base")
        np.savez(folder / name / "labelled.npz", **{key: value.numpy() for key, value in peer.labelled(name).items()})
    for name in TIED:
        case = dict(peer.DECODERS[name], tie_word_embeddings=True)
        make.model_of(case).save_pretrained(folder / name / "tied_base")


class Double(TorchFunctionMode):
    """float64 throughout: transformers always computes norms, softmax, angles and losses in float32."""

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


def logits_of(name: str, model: torch.nn.Module) -> np.ndarray:
    if name not in peer.DECODERS:
        return make_encoders.logits(make_encoders.CASES[name], model)
    with torch.no_grad():
        return model(torch.from_numpy(make.tokens()), use_cache=False).logits.numpy()


def opened(name: str, base: pathlib.Path, dtype: torch.dtype) -> torch.nn.Module:
    kind = KINDS.get(name.partition("_")[0], AutoModelForCausalLM)
    eager = {"experts_implementation": "eager"} if name in peer.MIXTURES else {}
    return kind.from_pretrained(base, attn_implementation="eager", dtype=dtype, **eager).eval()


def adapted(name: str, model: torch.nn.Module, options: dict) -> torch.nn.Module:
    """The model with adapters that all change its results."""
    config = peft.LoraConfig(task_type=TASKS.get(name.partition("_")[0], "CAUSAL_LM"), **options)
    torch.manual_seed(0)
    model = peft.get_peft_model(model, config).eval()
    with torch.no_grad():
        for part, value in model.named_parameters():
            if ".lora_B" in part or ".lora_embedding_B" in part:
                value.normal_(0, 0.1)
    return model


def loss_of(name: str, model: torch.nn.Module, given: dict[str, torch.Tensor]) -> torch.Tensor:
    if name not in peer.DECODERS:
        return model(**given).loss
    # Their own loss shifts the labels, and ours are shifted already.
    logits = model(given["input_ids"], use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), given["labels"].flatten())


def steps(name: str, model: torch.nn.Module) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The losses of the steps, and the gradient before the first with its norm; the model is trained afterwards."""
    peer.forgetful(model)
    named = {part: value for part, value in model.named_parameters() if value.requires_grad}
    trained = [*named.values()]
    # As here: biases, including the experts', and scales of norms do not decay.
    wide = [x for part, x in named.items() if x.ndim > 1 and not part.endswith("bias")]
    narrow = [x for part, x in named.items() if x.ndim == 1 or part.endswith("bias")]
    kinds = [{"params": wide, "weight_decay": DECAY}, {"params": narrow, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(kinds, lr=LEARNING_RATE, betas=(0.9, 0.95), eps=EPS)
    given, losses, gradients = peer.labelled(name), [], []
    for _ in range(STEPS):
        loss = loss_of(name, model, given)
        optimizer.zero_grad()
        loss.backward()
        gradients.append(np.concatenate([x.grad.double().numpy().ravel() for x in trained if x.grad is not None]))
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        losses.append(loss.item())
    return {"losses": np.array(losses), "grad_norm": np.linalg.norm(gradients[0])}, gradients[0]


def learned(case: dict, path: pathlib.Path, dtype: torch.dtype) -> tuple[torch.nn.Module, dict, np.ndarray]:
    """The model after the steps, the numbers of found.npz, and the first gradient. float32 runs first, and saves `before`."""
    name = path.parent.name
    model = opened(name, path / case["base"], dtype)
    if name not in peer.DECODERS and name != "bert":
        model.config.decoder_start_token_id = model.config.pad_token_id  # as in every published T5
    if case["lora"] is not None and dtype is torch.float32:
        model = adapted(name, model, case["lora"])
        model.save_pretrained(path / "before")
    elif case["lora"] is not None:
        model = peft.PeftModel.from_pretrained(model, path / "before", is_trainable=True).eval().to(dtype)
    peer.forgetful(model)
    logits = logits_of(name, model)
    numbers, gradient = steps(name, model)
    return model, {"logits": logits} | numbers, gradient


def train(path: pathlib.Path) -> None:
    """Trains in float64, whose result is saved, and in float32, to measure the effect of its rounding."""
    case = json.loads((path / "case.json").read_text())
    rounded, theirs, gradient = learned(case, path, torch.float32)
    with Double():
        model, found, exact = learned(case, path, torch.float64)
    own = {f"own_{key}": np.abs(value - found[key]).max() for key, value in theirs.items()}
    pairs = zip(rounded.parameters(), model.parameters(), strict=True)
    own["own_parameters"] = max((a.detach().double() - b.detach()).abs().max().item() for a, b in pairs)
    # The gradient's error, not its norm's, where rounding errors can cancel.
    own["own_grad_norm"] = np.linalg.norm(gradient - exact) / found["grad_norm"]
    model.float().save_pretrained(path / "after")
    np.savez(path / "found.npz", **found, **own)


def record(file: pathlib.Path) -> None:
    """Adapters or models with drawn weights, in float64: tensor shapes, losses, and how far each tensor moves."""
    found = {}
    for case, (name, options) in RECORDED.items():
        model, settings = make.model_of(peer.DECODERS[name]), None
        if options is None:
            model.set_experts_implementation("eager")  # it supports float64
        else:
            config = peft.LoraConfig(task_type="CAUSAL_LM", **options)
            model = peft.get_peft_model(model, config).eval()
            settings = {key: value for key, value in config.to_dict().items() if key in FIELDS}
            settings = {key: sorted(x) if isinstance(x, set) else x for key, x in settings.items()}
        parts = {part.replace(".default", ""): value for part, value in model.named_parameters() if value.requires_grad}
        for part, value in parts.items():
            value.data.copy_(torch.from_numpy(answers.draw(part, tuple(value.shape))))
        model.double()
        before = {part: value.detach().clone() for part, value in parts.items()}
        numbers = {key: value.tolist() for key, value in steps(name, model)[0].items()}
        moved = {part: (value.detach() - before[part]).norm().item() for part, value in parts.items()}
        shapes = {part: list(value.shape) for part, value in parts.items()}
        found[case] = {"name": name, "config": settings, "tensors": shapes, "moved": moved} | numbers
    lines = [f"{json.dumps(case)}: {json.dumps(values)}" for case, values in found.items()]
    file.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def main() -> None:
    what, folder = sys.argv[1], pathlib.Path(sys.argv[2])
    torch.set_num_threads(1)
    if what != "train":
        return {"make": make_all, "record": record}[what](folder)
    for case in sorted(folder.glob("*/*/case.json")):
        train(case.parent)


if __name__ == "__main__":
    main()
