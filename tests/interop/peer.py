"""transformers' results with the models of tests/models/golden: the peer program of test_transformers.py.

Run by that test in an environment with torch, transformers, peft and safetensors:
        python tests/interop/peer.py write FOLDER    saves every model in FOLDER/NAME/theirs, its results in answers.npz
        python tests/interop/peer.py read FOLDER     transformers' results with FOLDER/NAME/state_dict, in read.npz, and
        its
                                                     differences from FOLDER/NAME/ours; PEFT's results with
                                                     FOLDER/NAME/adapter in adapted.npz, likewise with adapter_fused
        python tests/interop/peer.py record FILE     config.json and the tensors' names and shapes of every model, as
        JSON
"""

from __future__ import annotations

import json
import pathlib
import sys
import tempfile

import numpy as np
import peft
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "models" / "golden"))

import make  # noqa: E402
import make_encoders  # noqa: E402
import make_moe  # noqa: E402

DECODERS = make.CASES | make_moe.CASES
NEW_TOKENS, ANSWER_TOKENS, STEPS = 8, 16, 5
EXPERTS = ("mixtral", "qwen3_moe")
MIXTURES = (*EXPERTS, "gpt_oss")
RENAMED = ("gpt_neox", "mixtral", "qwen3_moe")  # their names in memory differ from those in files since transformers 5
KINDS = {"t5": AutoModelForSeq2SeqLM, "bert": AutoModelForMaskedLM}


def answer(name: str, model: torch.nn.Module) -> dict[str, np.ndarray]:
    """Logits of the golden tokens; a decoder's continuation of the first positions, or an encoder-decoder's answer."""
    if name not in DECODERS:
        found = {"logits": make_encoders.logits(make_encoders.CASES[name], model)}
        return found | ({} if name == "bert" else generated(model))
    tokens = torch.from_numpy(make.tokens())
    with torch.no_grad():
        logits, ids = model(tokens, use_cache=False).logits.numpy(), tokens[:, :8]
        for _ in range(NEW_TOKENS):
            ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    return {"logits": logits, "greedy": ids.numpy()}


def encoder_inputs(draw_tokens: str) -> dict[str, torch.Tensor]:
    """Golden tokens as an encoder's text, the last row shorter than the others."""
    tokens = torch.from_numpy(make_encoders.batch()[draw_tokens].clip(1))
    mask = torch.ones_like(tokens)
    mask[-1, -make_encoders.PADDING :] = 0
    return {"input_ids": tokens * mask, "attention_mask": mask}


def generated(model: torch.nn.Module) -> dict[str, np.ndarray]:
    """An encoder-decoder's greedy answer, padded after its end, behind the padding that it begins with.

    With random weights the answer repeats one token, so there is a second answer with a repetition penalty.
    """
    options = dict(do_sample=False, num_beams=1, max_new_tokens=ANSWER_TOKENS, decoder_start_token_id=0)
    penalties = {"greedy": 1.0, "penalized": 4.0}
    inputs = encoder_inputs("encoder_tokens")
    return {key: model.generate(**inputs, **options, repetition_penalty=x).numpy() for key, x in penalties.items()}


def labelled(name: str) -> dict[str, torch.Tensor]:
    """A model's training batch in transformers' form: a label of -100 is ignored.

    T5's targets are shorter than a row in the last row. BERT predicts every fifth token, and reads one fixed token in
    its place.
    """
    if name in DECODERS:
        tokens = torch.from_numpy(make.tokens().clip(1))
        return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}
    inputs = encoder_inputs("tokens" if name == "bert" else "encoder_tokens")
    if name == "bert":
        tokens, hidden = inputs["input_ids"], inputs["attention_mask"].bool()
        hidden = hidden & (torch.arange(tokens.shape[1]) % 5 == 1)
        types = torch.from_numpy(make_encoders.batch()["token_types"])
        given = {"input_ids": tokens.where(~hidden, 2), "token_type_ids": types, "labels": tokens.where(hidden, -100)}
        return inputs | given
    labels = encoder_inputs("tokens")["input_ids"]
    return inputs | {"labels": labels.where(labels != 0, -100)}


def forgetful(model: torch.nn.Module) -> torch.nn.Module:
    """The model without the longest row length so far, from which transformers computes dynamic RoPE's angles."""
    for module in model.modules():
        if getattr(module, "rope_type", None) == "dynamic":
            module.max_seq_len_cached = module.original_max_seq_len
            module.inv_freq = module.original_inv_freq.clone()
    return model


def losses(name: str, model: torch.nn.Module) -> np.ndarray:
    """The losses of the first steps of AdamW, without dropout.

    Token 0 is left out: it is Phi 3's padding, whose embedding torch does not train. At ten times the learning rate the
    rounding of float32 alone moves the losses of the deepest model by more than 1e-4.
    """
    given, model = labelled(name), forgetful(model)
    if name in DECODERS:
        labels, given = given["labels"], {"input_ids": given["input_ids"], "use_cache": False}
    else:
        model.config.decoder_start_token_id = model.config.pad_token_id  # as in every published T5
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    found = []
    for _ in range(STEPS):
        answered = model(**given)
        if name in DECODERS:  # their own loss shifts the labels, and ours are shifted already
            loss = torch.nn.functional.cross_entropy(answered.logits.flatten(0, 1), labels.flatten())
        else:
            loss = answered.loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found.append(loss.item())
    return np.array(found)


def models():
    for name, case in DECODERS.items():
        yield name, make.model_of(case)
    for name, case in make_encoders.CASES.items():
        yield name, make_encoders.model_of(case)


def write(folder: pathlib.Path) -> None:
    for name, model in models():
        model.save_pretrained(folder / name / "theirs")
        (folder / name / "pickled").mkdir()
        model.config.save_pretrained(folder / name / "pickled")
        torch.save(model.state_dict(), folder / name / "pickled" / "pytorch_model.bin")
        np.savez(folder / name / "answers.npz", **answer(name, model), losses=losses(name, model))
        np.savez(folder / name / "labelled.npz", **{key: value.numpy() for key, value in labelled(name).items()})
        if name in EXPERTS:
            write_adapter(folder / name / "theirs", folder / name / "of_peft")
        print(name, flush=True)


def write_adapter(base: pathlib.Path, folder: pathlib.Path) -> None:
    """An adapter of all layers that PEFT counts as linear, saved by PEFT, and the logits with it, in FOLDER.npz."""
    model = AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager", dtype=torch.float32)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=3, lora_alpha=6, target_modules="all-linear")
    model = peft.get_peft_model(model, config).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if ".lora_" in name:
                value.normal_(0, 0.25)
        logits = model(torch.from_numpy(make.tokens()), use_cache=False).logits.numpy()
    model.save_pretrained(folder)
    np.savez(folder.with_suffix(".npz"), logits=logits)


def read(folder: pathlib.Path) -> None:
    for path in sorted(folder.glob("*/ours")):
        name = path.parent.name
        kind = KINDS.get(name.partition("_")[0], AutoModelForCausalLM)
        options = dict(attn_implementation="eager", dtype=torch.float32, output_loading_info=True)
        model, info = kind.from_pretrained(path, **options)
        strange = {key: sorted(map(str, value)) for key, value in info.items() if value}
        of_folder = model.state_dict()
        model, info = kind.from_pretrained(path.parent / "state_dict", **options, use_safetensors=False)
        strange |= {f"{key} of it": sorted(map(str, value)) for key, value in info.items() if value}
        strange |= {
            key: "another" for key, value in model.state_dict().items() if not torch.equal(value, of_folder[key])
        }
        state = torch.load(path.parent / "state_dict" / "pytorch_model.bin", weights_only=True)
        if not name.startswith(RENAMED):
            model.load_state_dict(state, strict=True)
        np.savez(path.parent / "read.npz", **answer(name, model.eval()), strange=json.dumps(strange))
        print(name, flush=True)
    adapted(folder)


def adapted(folder: pathlib.Path) -> None:
    """Logits of the golden tokens with each FOLDER/NAME/adapter* on top of FOLDER/NAME/theirs, in adapted*.npz."""
    tokens, options = torch.from_numpy(make.tokens()), dict(attn_implementation="eager", dtype=torch.float32)
    for path in sorted(folder.glob("*/adapter*")):
        eager = {"experts_implementation": "eager"} if path.parent.name in MIXTURES else {}  # it supports float64
        base = AutoModelForCausalLM.from_pretrained(path.parent / "theirs", **options, **eager)
        model = peft.PeftModel.from_pretrained(base, path, torch_device="cpu").eval()
        with torch.no_grad():
            found = {"float32": model(tokens, use_cache=False).logits.numpy()}
            found["float64"] = model.double()(tokens, use_cache=False).logits.numpy()
        np.savez(path.parent / f"{path.name.replace('adapter', 'adapted')}.npz", **found)


def record(file: pathlib.Path) -> None:
    """Writes the configuration and shapes from a folder that save_pretrained writes of every model."""
    lines = []
    for name, model in models():
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            values = json.loads((pathlib.Path(folder) / "config.json").read_text())
            with safe_open(pathlib.Path(folder) / "model.safetensors", framework="numpy") as stored:
                shapes = {key: stored.get_slice(key).get_shape() for key in sorted(stored.keys())}
        lines.append(f"{json.dumps(name)}: {json.dumps({'config': values, 'shapes': shapes})}")
    file.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    {"write": write, "read": read, "record": record}[sys.argv[1]](pathlib.Path(sys.argv[2]))
