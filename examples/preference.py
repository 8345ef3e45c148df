# %% [markdown]
# # Train on preferences, and on rewards
#
# The model that `finetune.py` has trained learns which of two answers is better (DPO, Rafailov et al. 2023), and then from a
# reward of its own answers (GRPO, Shao et al. 2024). Both train adapters.

# %%
import capibara as cb

MODEL = "runs/finetune"
STEPS = 20

# %% [markdown]
# A pair has a prompt, the chosen answer and the rejected one. Here short answers are preferred.

# %%
COLOURS = {"banana": "yellow", "cherry": "red", "lime": "green", "plum": "blue", "orange": "orange", "coconut": "brown"}
pairs = [
    {
        "prompt": f"What is the colour of a {fruit}?",
        "chosen": f"{colour.capitalize()}.",
        "rejected": f"A {fruit} is {colour}.",
    }
    for fruit, colour in COLOURS.items()
] * 8

preferred = cb.dpo(MODEL, pairs, "runs/dpo", steps=STEPS, batch_size=8, length=96, learning_rate=1e-3, log_every=5)
print("margin of the rewards by step:", [round(row["reward_margin"], 2) for row in preferred.history if "loss" in row])

# %% [markdown]
# A reward is a function of the prompt, the answer and the record. GRPO draws a group of answers to each prompt, and raises
# the probability of those that are better than their group's mean.


# %%
def is_short(prompt: str, answer: str, record: dict) -> float:
    return -abs(len(answer) - 8) / 8


prompts = [{"question": f"What is the colour of a {fruit}?", "answer": colour} for fruit, colour in COLOURS.items()] * 8
rewarded = cb.grpo(
    MODEL,
    prompts,
    "runs/grpo",
    [is_short],
    steps=STEPS // 2,
    batch_size=32,
    learning_rate=3e-3,
    length=80,
    log_every=1,
    bindings=["GROUP = 8", "ANSWER_LENGTH = 24"],
)
print("mean reward by step:", [round(row["reward"], 2) for row in rewarded.history if "reward" in row])
