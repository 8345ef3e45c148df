"""TRL's training and masks: the peer program of test_transformers_trl.py.

Run by that test in an environment with torch, transformers, trl and datasets:
        python tests/interop/trl_peer.py train FOLDER     runs the trainer of each of FOLDER/cases.json on FOLDER/base
        and the
                                                          lines of FOLDER/pairs.jsonl, or unpaired.jsonl of KTO, into
                                                          found.json and FOLDER/NAME
        python tests/interop/trl_peer.py masks FOLDER     the assistant's tokens in each conversation of
        FOLDER/asked.json, under
                                                          TRL's templates for training, into FOLDER/masks.json
        python tests/interop/trl_peer.py scores FOLDER    the scores of the token ids in FOLDER/ids.json by each reward
        model
                                                          in FOLDER, as one padded batch, into FOLDER/scores.json
        python tests/interop/trl_peer.py token_scores FOLDER    the logits of each token of the ids in FOLDER/ids.json by
                                                          each token classification in FOLDER, into
                                                          FOLDER/token_scores.json
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
from trl.experimental import cpo, orpo

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
METRICS += ("accuracy", "margin", "mean_reward", "logps/chosen", "logps/rejected", "nll_loss", "log_odds_chosen", "kl")


TRAINERS = {
    "dpo": (trl.DPOTrainer, trl.DPOConfig),
    "kto": (trl.KTOTrainer, trl.KTOConfig),
    "cpo": (cpo.CPOTrainer, cpo.CPOConfig),
    "reward": (trl.RewardTrainer, trl.RewardConfig),
    "orpo": (orpo.ORPOTrainer, orpo.ORPOConfig),
}


def in_order(trainer: type) -> type:
    """A trainer that reads the lines in the file's order."""

    def sampler(self, *_):
        return torch.utils.data.SequentialSampler(self.train_dataset)

    return type(f"InOrder{trainer.__name__}", (trainer,), {"_get_train_sampler": sampler})


def tokenizer_of(folder: pathlib.Path) -> transformers.PreTrainedTokenizerFast:
    return transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"),
        eos_token="<|end|>",
        pad_token="<|end|>",
        chat_template=(folder / "chat_template.jinja").read_text(),
    )


def turn(role: str, text: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text}]


def lines(path: pathlib.Path) -> list[dict]:
    """The lines of a file as conversations."""
    answers = ("chosen", "rejected", "completion")
    return [
        {"prompt": turn("user", line["prompt"])}
        | {key: turn("assistant", line[key]) for key in answers if key in line}
        | {key: line[key] for key in line if key not in ("prompt", *answers)}
        for line in map(json.loads, path.read_text().splitlines())
    ]


def padded(tokenizer: transformers.PreTrainedTokenizerFast) -> transformers.PreTrainedTokenizerFast:
    """The tokenizer with another pad token than the end: transformers scores the last token that is not the pad token."""
    tokenizer.pad_token = "<|turn|>"
    return tokenizer


def train(folder: pathlib.Path) -> None:
    make.model_of(make.CASES["llama"] | {"vocab_size": VOCAB}).save_pretrained(folder / "base")
    tokenizer = tokenizer_of(folder / "tokenizer")
    found = {}
    for name, options in json.loads((folder / "cases.json").read_text()).items():
        method, load = options.pop("method"), dict(attn_implementation="eager", dtype=torch.float32)
        trainer_class, config_class = TRAINERS[method]
        model_class = transformers.AutoModelForCausalLM
        if method == "reward":
            model_class, tokenizer = transformers.AutoModelForSequenceClassification, padded(tokenizer)
            load["num_labels"] = 1
        model = model_class.from_pretrained(folder / "base", **load)
        if method == "reward":
            with torch.no_grad():
                model.score.weight[:] = torch.linspace(-0.5, 0.5, model.score.weight.numel())
        more = {}
        if method in ("dpo", "kto"):
            more["ref_model"] = transformers.AutoModelForCausalLM.from_pretrained(folder / "base", **load)
        pairs = lines(folder / ("unpaired.jsonl" if method == "kto" else "pairs.jsonl"))
        unread = set() if method == "reward" else {"margin"}
        data = datasets.Dataset.from_list([{k: v for k, v in pair.items() if k not in unread} for pair in pairs])
        config = config_class(output_dir=str(folder / f"{name}_of_trl"), **SETTINGS, **options)
        trainer = in_order(trainer_class)(
            model=model, args=config, train_dataset=data, processing_class=tokenizer, **more
        )
        trainer.train()
        logged = [step for step in trainer.state.log_history if "loss" in step]
        found[name] = [{key: step[key] for key in METRICS if key in step} for step in logged]
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


def scores(folder: pathlib.Path) -> None:
    texts, found = json.loads((folder / "ids.json").read_text()), {}
    width = max(map(len, texts))
    for path in sorted(path for path in folder.iterdir() if path.is_dir()):
        model = transformers.AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32)
        pad = model.config.pad_token_id
        ids = torch.tensor([ids + [pad] * (width - len(ids)) for ids in texts])
        mask = torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids in texts])
        with torch.no_grad():
            found[path.name] = model(input_ids=ids, attention_mask=mask).logits[:, 0].tolist()
    (folder / "scores.json").write_text(json.dumps(found))


def token_scores(folder: pathlib.Path) -> None:
    texts, logits = json.loads((folder / "ids.json").read_text()), {}
    for path in sorted(path for path in folder.iterdir() if path.is_dir()):
        model = transformers.AutoModelForTokenClassification.from_pretrained(path, dtype=torch.float32)
        with torch.no_grad():
            logits[path.name] = [model(input_ids=torch.tensor([ids])).logits[0].tolist() for ids in texts]
    (folder / "token_scores.json").write_text(json.dumps(logits) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"train": train, "masks": masks, "scores": scores, "token_scores": token_scores}[sys.argv[1]](
        pathlib.Path(sys.argv[2])
    )
