"""TRL's distillation: the peer program of test_transformers_distillation.py.

Run by that test in an environment with torch, transformers, trl and datasets:
        python tests/interop/distillation_peer.py FOLDER    trains FOLDER/base with each of FOLDER/cases.json on the lines of
                                                            FOLDER/chats.jsonl, into FOLDER/steps.json and FOLDER/NAME
"""

from __future__ import annotations

import functools
import json
import pathlib
import sys

import datasets
import torch
import transformers
from trl.experimental import gkd

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "models" / "golden")]

import make  # noqa: E402
import trl_peer  # noqa: E402


def train(folder: pathlib.Path) -> None:
    make.model_of(make.CASES["llama"] | {"vocab_size": trl_peer.VOCAB}).save_pretrained(folder / "base")
    tokenizer = trl_peer.padded(trl_peer.tokenizer_of(folder / "tokenizer"))
    load = dict(attn_implementation="eager", dtype=torch.float32)
    lines = map(json.loads, (folder / "chats.jsonl").read_text().splitlines())
    chats = [trl_peer.turn("user", line["prompt"]) + trl_peer.turn("assistant", line["completion"]) for line in lines]
    data = datasets.Dataset.from_list([{"messages": chat} for chat in chats])
    result = {}
    for name, (beta, temperature, scale) in json.loads((folder / "cases.json").read_text()).items():
        model, teacher = (
            transformers.AutoModelForCausalLM.from_pretrained(folder / "base", **load) for _ in ("student", "teacher")
        )
        with torch.no_grad():
            for parameter in teacher.parameters():
                parameter.mul_(scale)
        settings = trl_peer.SETTINGS | dict(max_steps=5, lmbda=0.0, beta=beta, max_length=48)
        config = gkd.GKDConfig(output_dir=str(folder / f"{name}_of_trl"), **settings)
        trainer = trl_peer.in_order(gkd.GKDTrainer)(
            model=model, teacher_model=teacher, args=config, train_dataset=data, processing_class=tokenizer
        )
        # The trainer's loss takes a temperature, which the trainer does not give it.
        trainer.generalized_jsd_loss = functools.partial(gkd.GKDTrainer.generalized_jsd_loss, temperature=temperature)
        trainer.train()
        logged = [step for step in trainer.state.log_history if "loss" in step]
        result[name] = [{key: step[key] for key in ("loss", "grad_norm")} for step in logged]
        model.save_pretrained(folder / name)
    (folder / "steps.json").write_text(json.dumps(result))


if __name__ == "__main__":
    torch.set_num_threads(1)
    train(pathlib.Path(sys.argv[1]))
