# %% [markdown]
# # Pretrain a language model
#
# A small decoder learns the source of Python's standard library, which every machine has. It takes about a minute on two
# cores. What the machine has decides the devices: the same script trains on a GPU or a TPU.

# %%
import pathlib

import capibara as cb

STEPS = 60
TOKENIZER = str(pathlib.Path(cb.__file__).parents[1] / "examples/extend/data/tokenizer")  # bytes, and a chat template

# %% [markdown]
# A run is one value: a model, data, a plan of devices and batch, an optimizer. Every field is in the reference.

# %%
model = cb.DecoderConfig(
    vocab_size=384,
    embed_dim=128,
    num_layers=4,
    num_heads=4,
    mlp_dim=352,
    dtype="float32",
    rope=cb.Rope(),
)
trainer = cb.Trainer(
    model_dir="runs/pretrain",
    steps=STEPS,
    model=model,
    plan=cb.Plan(batch_size=8),
    dataset=cb.Dataset(
        source=cb.StdlibSource(),
        vocabulary=cb.TokenizerJsonVocabulary(path=TOKENIZER),
        length=256,
    ),
    optimizer=cb.Optimizer(schedule=cb.Schedule(learning_rate=3e-3, warmup_fraction=0.1)),
    evaluation=cb.Evaluation(every=STEPS // 2, max_batches=4),
    log_every=10,
)

# %% [markdown]
# Training saves checkpoints in `runs/pretrain`. Run again, the script resumes from the newest; Ctrl-C stops it after a step.

# %%
run = cb.train(trainer)
losses = {row["step"]: round(row["eval_loss"], 2) for row in run.history if "eval_loss" in row}
print(f"loss on held-out text by step: {losses}")

# %% [markdown]
# The model is ready to use.

# %%
print(run.model.generate("def ", max_tokens=40, temperature=0.6))
