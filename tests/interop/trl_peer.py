"""TRL's training and masks: the peer program of test_transformers_trl.py.

Run by that test in an environment with torch, transformers, trl and datasets:
        python tests/interop/trl_peer.py dpo FOLDER       runs DPOTrainer for each of FOLDER/cases.json on FOLDER/base
        and the
                                                          pairs of FOLDER/pairs.jsonl, into found.json and FOLDER/NAME
        python tests/interop/trl_peer.py masks FOLDER     the assistant's tokens in each conversation of
        FOLDER/asked.json, under
                                                          TRL's templates for training, into FOLDER/masks.json
"""

from __future__ import annotations

import json
import pathlib
import sys

import datasets
import torch
import transformers
import trl
from trl import chat_template_utils

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "models" / "golden"))

import make  # noqa: E402

VOCAB = 384
SETTINGS = dict(
    per_device_train_batch_size=4,
    max_steps=6,
    learning_rate=1e-3,
    lr_scheduler_type="constant",
    adam_beta1=0.9,
    adam_beta2=0.95,
    adam_epsilon=1e-6,
    weight_decay=0.0,
    max_grad_norm=1.0,
    max_length=None,
    logging_steps=1,
    save_strategy="no",
    report_to="none",
    bf16=False,
    use_cpu=True,
    gradient_checkpointing=False,
    disable_tqdm=True,
)


METRICS = ("loss", "grad_norm", *(f"rewards/{x}" for x in ("chosen", "rejected", "margins", "accuracies")))
METRICS += ("logps/chosen", "logps/rejected")


class InOrder(trl.DPOTrainer):
    """Reads the pairs in the file's order."""

    def _get_train_sampler(self, *_):
        return torch.utils.data.SequentialSampler(self.train_dataset)


def tokenizer_of(folder: pathlib.Path) -> transformers.PreTrainedTokenizerFast:
    return transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"),
        eos_token="<|end|>",
        pad_token="<|end|>",
        chat_template=(folder / "chat_template.jinja").read_text(),
    )


def dpo(folder: pathlib.Path) -> None:
    make.model_of(make.CASES["llama"] | {"vocab_size": VOCAB}).save_pretrained(folder / "base")
    tokenizer = tokenizer_of(folder / "tokenizer")
    pairs = [json.loads(line) for line in (folder / "pairs.jsonl").read_text().splitlines()]
    turn = lambda role, text: [{"role": role, "content": text}]  # noqa: E731
    data = datasets.Dataset.from_list(
        [
            {"prompt": turn("user", pair["prompt"])}
            | {side: turn("assistant", pair[side]) for side in ("chosen", "rejected")}
            for pair in pairs
        ]
    )
    found = {}
    for name, options in json.loads((folder / "cases.json").read_text()).items():
        load = dict(attn_implementation="eager", dtype=torch.float32)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder / "base", **load)
        reference = transformers.AutoModelForCausalLM.from_pretrained(folder / "base", **load)
        config = trl.DPOConfig(output_dir=str(folder / f"{name}_of_trl"), **SETTINGS, **options)
        trainer = InOrder(model=model, ref_model=reference, args=config, train_dataset=data, processing_class=tokenizer)
        trainer.train()
        logged = [step for step in trainer.state.log_history if "loss" in step]
        found[name] = [{key: step[key] for key in METRICS} for step in logged]
        model.save_pretrained(folder / name)
    (folder / "found.json").write_text(
        "{\n" + ",\n".join(f'"{k}": {json.dumps(v)}' for k, v in found.items()) + "\n}\n"
    )


def masks(folder: pathlib.Path) -> None:
    """Writes each template beside its tokenizer, and the ids and the mask with TRL's training template in its place."""
    asked, found = json.loads((folder / "asked.json").read_text()), {}
    templates = pathlib.Path(chat_template_utils.__file__).parent / "chat_templates"
    for name, (bos, eos) in asked["templates"].items():
        own = (templates / f"{name}.jinja").read_text()
        (folder / name / "chat_template.jinja").write_text(own)
        tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_file=str(folder / name / "tokenizer.json"), bos_token=bos, eos_token=eos, chat_template=own
        )
        training = chat_template_utils.get_training_chat_template(tokenizer)
        options = dict(chat_template=training, return_dict=True, return_assistant_tokens_mask=True)
        (folder / name / "training.jinja").write_text(training)
        found[name] = {
            which: dict(tokenizer.apply_chat_template(messages, **options))
            for which, messages in (asked["conversations"] | asked["of_template"].get(name, {})).items()
        }
    (folder / "masks.json").write_text(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"dpo": dpo, "masks": masks}[sys.argv[1]](pathlib.Path(sys.argv[2]))
