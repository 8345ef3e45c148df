# %% [markdown]
# # Plan a slice, prove the plan, make the job
#
# No TPU is needed: the plan is predicted, the real TPU compiler says whether it fits, and the job is a dry run. The proof
# needs libtpu, which `make setup` installs, and takes a minute or two.

# %%
import dataclasses
import pathlib
import subprocess
import sys

import capibara as cb
from capibara.config import written

SLICE = "v5e-4"
MODEL = cb.DecoderConfig(
    vocab_size=32768, embed_dim=512, num_layers=4, num_heads=8, mlp_dim=1408, dtype="bfloat16", rope=cb.Rope()
)

# %% [markdown]
# The planner searches mesh, batch and recomputation. These figures are predictions.

# %%
plans = cb.plan(MODEL, SLICE, length=2048)
for candidate in plans[:3]:
    print(
        f"{candidate.description}: {candidate.tokens_per_s:,.0f} tokens/s, {candidate.hbm_bytes / 2**30:.2f} GiB a chip"
    )

# %% [markdown]
# A prediction may be wrong: the compiler's peak memory is a fact. The first plan that it accepts is taken.

# %%
trainer = cb.Trainer(
    model_dir="gs://my-bucket/runs/planned",
    steps=1000,
    model=MODEL,
    plan=plans[0].plan,
    dataset=cb.Dataset(source=cb.StdlibSource(), vocabulary=cb.ByteVocabulary(), length=2048),
    optimizer=cb.Optimizer(schedule=cb.Schedule(learning_rate=1e-3)),
)
for candidate in plans:
    trainer = dataclasses.replace(trainer, plan=candidate.plan)
    compiled = cb.prove(trainer).compiled
    if compiled is not None:
        print(f"{candidate.description}: {compiled.peak_bytes / 2**30:.2f} GiB a chip, fits: {compiled.fits}")
        if compiled.fits:
            break

# %% [markdown]
# The job of this run, as Kubernetes would get it. Without `--dry-run` it is submitted, watched, and replaced after a
# preemption.

# %%
pathlib.Path("planned.gin").write_text(written.text_of(trainer))
command = ["launch", "gke", "planned.gin", "--storage=gs://my-bucket", "--image=my-registry/capibara:1", "--dry-run"]
job = subprocess.run([sys.executable, "-m", "capibara", *command], capture_output=True, text=True, check=True)
print(job.stderr, job.stdout[:1500], sep="\n")
