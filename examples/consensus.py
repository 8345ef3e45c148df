# %% [markdown]
# # Train replicas that agree
#
# Four replicas (nodes) train apart, each on its part of every batch, and agree on one model every 10 steps (DiLoCo, Douillard
# et al. 2023). One of them may fail or lie: the geometric median withstands it. Four emulated devices stand for four slices.

# %%
import capibara as cb

STEPS = 40


def trainer(folder: str, nodes: int, strategy: cb.ConsensusConfig | None) -> cb.Trainer:
    return cb.Trainer(
        model_dir=folder,
        steps=STEPS,
        model=cb.DecoderConfig(
            vocab_size=384, embed_dim=64, num_layers=2, num_heads=4, mlp_dim=176, dtype="float32", rope=cb.Rope()
        ),
        plan=cb.Plan(batch_size=16, node=nodes),
        dataset=cb.Dataset(source=cb.StdlibSource(), vocabulary=cb.ByteVocabulary(), length=128),
        optimizer=cb.Optimizer(schedule=cb.Schedule(learning_rate=3e-3)),
        evaluation=cb.Evaluation(every=STEPS // 2, max_batches=4),
        strategy=strategy,
        log_every=10,
    )


# %% [markdown]
# A round makes one model of the nodes' models by a rule. The outer optimizer then steps towards it.

# %%
strategy = cb.ConsensusConfig(
    every=10,
    aggregation=cb.Aggregation(rule=cb.GeometricMedian(), faults=1),
    outer=cb.OuterSgd(learning_rate=0.7, momentum=0.9),
)
agreed = cb.train(trainer("runs/consensus", 4, strategy), emulate=4)

# %% [markdown]
# The same run on one mesh, whose devices exchange gradients in every step instead of models in every tenth.

# %%
single = cb.train(trainer("runs/single", 1, None), emulate=4)
for name, run in (("four nodes", agreed), ("one mesh", single)):
    print(f"{name}: loss on held-out text {run.history[-1]['eval_loss']:.3f} after {run.step} steps")
