# %% [markdown]
# # Fine-tune a model on conversations
#
# All weights of the model that `pretrain.py` has trained learn to answer questions. Name another model in `MODEL`: a Hugging
# Face folder, a `.gguf` file, or a name on the Hub. Without `method="full"` the run trains adapters (LoRA).

# %%
import capibara as cb

MODEL = "runs/pretrain"
STEPS = 120

# %% [markdown]
# Data are dicts here; files of JSON lines, a `datasets.Dataset` or a frame of pandas work the same. What the assistant says
# has loss, nothing else.

# %%
COLOURS = {"banana": "yellow", "cherry": "red", "lime": "green", "plum": "blue", "orange": "orange", "coconut": "brown"}
chats = [
    {
        "messages": [
            {"role": "user", "content": f"What is the colour of a {fruit}?"},
            {"role": "assistant", "content": f"A {fruit} is {colour}."},
        ]
    }
    for fruit, colour in COLOURS.items()
] * 20

# %%
run = cb.finetune(
    MODEL,
    chats,
    "runs/finetune",
    method="full",
    steps=STEPS,
    batch_size=16,
    length=80,
    learning_rate=2e-3,
    log_every=20,
)

# %% [markdown]
# `compare` asks two models the same questions and tests the difference.

# %%
questions = {f"What is the colour of a {fruit}?": colour for fruit, colour in COLOURS.items()}


def is_right(prompt: str, answer: str) -> float:
    return float(questions[prompt] in answer)


before = cb.load(MODEL)
print(cb.compare(before, run.model, list(questions), score=is_right, max_tokens=24, temperature=0))
print(run.model.chat("What is the colour of a lime?", max_tokens=24, temperature=0))

# %% [markdown]
# The result leaves in the formats that others load: `.gguf` for llama.cpp, a folder for transformers.

# %%
run.model.save("runs/finetune.gguf")
cb.convert(run.folder, "runs/finetune_hf", format="hf")
