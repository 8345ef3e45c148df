"""TRL's training on answers that are given: the peer program of test_transformers_rollouts.py.

Run by that test in an environment with torch, transformers, trl and datasets:
        python tests/interop/rollouts_peer.py FOLDER    trains FOLDER/base with each of FOLDER/cases.json on the answers of
                                                        FOLDER/rollouts.json, whose `drawn` it completes, into FOLDER/steps.json and FOLDER/NAME
"""

from __future__ import annotations

import functools
import json
import pathlib
import sys
from collections.abc import Callable

import datasets
import torch
import transformers
import trl
from trl.experimental import gmpo, online_dpo
from trl.trainer import grpo_trainer, rloo_trainer

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "models" / "golden")]

import make  # noqa: E402
import trl_peer  # noqa: E402

TRAINERS = {
    "grpo": (trl.GRPOTrainer, trl.GRPOConfig),
    "rloo": (trl.RLOOTrainer, trl.RLOOConfig),
    "gmpo": (gmpo.GMPOTrainer, gmpo.GMPOConfig),
    "online_dpo": (online_dpo.OnlineDPOTrainer, online_dpo.OnlineDPOConfig),
}
METRICS = ("loss", "grad_norm", "reward", *(f"rewards/{x}" for x in ("chosen", "rejected", "margins", "accuracies")))
METRICS += ("logps/chosen", "logps/rejected")
PAD = 0


def on_given_pairs(picks: list[int], part: int, rollouts: list[list[dict]]) -> tuple[type, Callable]:
    """A trainer with two of the answers of each prompt, and a function of their rewards."""

    def answers(prompts):
        return [rollouts[int(prompt)][pick] for pick in picks for prompt in prompts]

    class Trainer(online_dpo.OnlineDPOTrainer):
        def _generate(self, model, prompts, images=None):
            given = answers(prompts)
            ids, mask = padded([answer["prompt"] for answer in given], "left")
            return ids, mask, *padded([answer["tokens"] for answer in given], "right"), None

        def _get_train_sampler(self, dataset=None):
            return torch.utils.data.SequentialSampler(self.train_dataset)

    def reward(prompts, **_):
        return [answer["parts"][part] for answer in answers(prompts[: len(prompts) // 2])]

    return Trainer, reward


def padded(rows: list[list[int]], side: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of one length, and which of their tokens are none of padding."""
    stack = functools.partial(torch.nn.utils.rnn.pad_sequence, batch_first=True, padding_side=side)
    ids = stack([torch.tensor(row) for row in rows], padding_value=PAD)
    return ids, stack([torch.ones(len(row), dtype=torch.long) for row in rows], padding_value=0)


def on_given_answers(trainer: type, rollouts: list[list[dict]]) -> type:
    """A trainer whose prompts are numbers of rollouts, and whose answers are theirs."""

    def answers(prompts):
        """The answer of each row: the copies of a prompt follow each other."""
        return [rollouts[int(prompt)][i % len(rollouts[int(prompt)])] for i, prompt in enumerate(prompts)]

    class Trainer(trainer):
        def _tokenize_prompts(self, prompts):
            self.given = answers(prompts)
            return [answer["prompt"] for answer in self.given], None, {}

        def _generate_single_turn(self, prompt_ids, *_):
            ids = [answer["tokens"] for answer in self.given]
            return ids if trainer is trl.RLOOTrainer else (ids, [answer["drawn"] for answer in self.given])

    return Trainer


def reward_of(rollouts: list[list[dict]], part: int):
    def reward(prompts, **_):
        return [rollouts[int(p)][i % len(rollouts[int(p)])]["parts"][part] for i, p in enumerate(prompts)]

    return reward


def with_log_probabilities(model: torch.nn.Module, rollouts: list[list[dict]]) -> list[list[dict]]:
    """Adds the model's log-probability of each token to `drawn`, as if the answers were the engine's."""
    for answer in (answer for group in rollouts for answer in group):
        ids, count = torch.tensor([answer["prompt"] + answer["tokens"]]), len(answer["tokens"])
        with torch.no_grad():
            log_p = model(ids).logits[0, -count - 1 : -1].log_softmax(-1)
        of_each = log_p.gather(-1, ids[0, -count:, None])[:, 0].tolist()
        answer["drawn"] = [round(a + b, 4) for a, b in zip(answer["drawn"], of_each)]
    return rollouts


def train(folder: pathlib.Path) -> None:
    make.model_of(make.CASES["llama"] | {"vocab_size": trl_peer.VOCAB}).save_pretrained(folder / "base")
    tokenizer = trl_peer.padded(trl_peer.tokenizer_of(folder / "tokenizer"))
    tokenizer.padding_side = "left"
    load = dict(attn_implementation="eager", dtype=torch.float32)
    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "base", **load)
    rollouts = with_log_probabilities(base, json.loads((folder / "rollouts.json").read_text()))
    (folder / "rollouts.json").write_text(json.dumps(rollouts))
    data = datasets.Dataset.from_list([{"prompt": str(number)} for number in range(len(rollouts))])
    grpo_trainer.shuffle_sequence_dict = rloo_trainer.shuffle_sequence_dict = lambda batch: batch
    result = {}
    for name, options in json.loads((folder / "cases.json").read_text()).items():
        method, weighs = options.pop("method"), options.pop("weighs", False)
        trainer_class, config_class = TRAINERS[method]
        model = transformers.AutoModelForCausalLM.from_pretrained(folder / "base", **load)
        settings = {key: value for key, value in trl_peer.SETTINGS.items() if key != "max_length"}
        settings |= dict(max_steps=5, learning_rate=2e-4)
        if method == "online_dpo":
            given_trainer, *rewards = on_given_pairs(options.pop("picks"), options.pop("part"), rollouts)
        else:
            settings |= dict(per_device_train_batch_size=8, num_generations=4, max_completion_length=12)
            settings["shuffle_dataset"] = False
            rewards = [reward_of(rollouts, part) for part in range(options.pop("parts", 1))]
            given_trainer = on_given_answers(trainer_class, rollouts)
        config = config_class(output_dir=str(folder / f"{name}_of_trl"), **settings | {"bf16": False} | options)
        trainer = given_trainer(
            model=model, args=config, train_dataset=data, processing_class=tokenizer, reward_funcs=rewards
        )
        trainer.use_vllm = weighs  # the correction of the engine's probabilities, without an engine
        trainer.train()
        logged = [step for step in trainer.state.log_history if "loss" in step]
        result[name] = [{key: step[key] for key in METRICS if key in step} for step in logged]
        model.save_pretrained(folder / name)
    lines = [f'"{name}": {json.dumps(steps)}' for name, steps in result.items()]
    (folder / "steps.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    train(pathlib.Path(sys.argv[1]))
