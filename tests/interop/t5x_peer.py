"""T5X's own results with its three networks: the peer program of test_t5x_training.py.

Run in an environment with T5X (github.com/google-research/t5x):
        python tests/interop/t5x_peer.py record FILE      losses, sums of the parameters and of Adafactor's states after
        3 and
                                                          20 steps, and learning rates, as JSON: tests/interop/t5x.json
        python tests/interop/t5x_peer.py train FOLDER     all of the same, as FOLDER/NAME.npz python
        tests/interop/t5x_peer.py write FOLDER     runs after 3 steps, as T5X stores them: FOLDER/FORM/CASE python
        tests/interop/t5x_peer.py pack FILE        one of these, in all forms: tests/interop/t5x_stored.zip python
        tests/interop/t5x_peer.py go_on FOLDER     losses of runs that resume from FOLDER/CASE, as FOLDER/NAME.npz
        python tests/interop/t5x_peer.py read FOLDER      losses of runs that begin from the checkpoints FOLDER/NAME, as
                                                          FOLDER/NAME.npz
"""

from __future__ import annotations

import json
import pathlib
import sys
import tempfile
import zipfile
import zlib

import numpy as np

STEPS = 20
KEPT = (3, 20)
SIZES = dict(vocab_size=64, emb_dim=16, num_heads=4, head_dim=4, mlp_dim=24, dropout_rate=0.0)
GATED = dict(mlp_activations=("gelu", "linear"))
# name -> the network, its sizes, Adafactor's options, the model's options.
CASES = {
    "t5": ("t5", SIZES | dict(num_encoder_layers=2, num_decoder_layers=2, logits_via_embedding=True), {}, {}),
    "t5_1_1": (
        "t5",
        SIZES | GATED | dict(num_encoder_layers=1, num_decoder_layers=2),
        dict(min_dim_size_to_factor=8),
        dict(z_loss=1e-3),
    ),
    "scalable_t5": ("scalable_t5", SIZES | GATED | dict(num_encoder_layers=2, num_decoder_layers=3), {}, {}),
    "decoder_only": ("decoder_only", SIZES | GATED | dict(num_layers=3), dict(min_dim_size_to_factor=16), {}),
    "prefix_lm": (
        "decoder_only",
        SIZES | dict(num_layers=2, logits_via_embedding=True),
        {},
        dict(inputs_bidirectional_attention=True, z_loss=1e-3),
    ),
    "t5_offset": (
        "t5",
        SIZES | GATED | dict(num_encoder_layers=1, num_decoder_layers=1),
        dict(min_dim_size_to_factor=8, step_offset=1000),
        {},
    ),
    "scalable_t5_map": (
        "scalable_t5",
        SIZES | GATED | dict(num_encoder_layers=2, num_decoder_layers=2),
        dict(
            beta1=0.9,
            min_dim_size_to_factor=16,
            factor_map=(
                ("attention/(query|key|value)", ("row", "batch", "batch", "column")),
                ("attention/out", ("column", "batch", "column", "row")),
                ("mlp/wi", ("row", "batch", "column")),
                ("mlp/wo", ("none", "batch", "none")),
                ("relpos_bias", None),
                ("pre_.*norm", ("none", "batch")),
                (".*", "heuristic"),
            ),
        ),
        {},
    ),
    "t5_options": (
        "t5",
        SIZES | GATED | dict(num_encoder_layers=1, num_decoder_layers=1),
        dict(
            min_dim_size_to_factor=16, beta1=0.9, decay_rate=0.7, step_offset=0, clipping_threshold=0.5,
            max_parameter_scale=0.9, weight_decay_rate=1e-3, weight_decay_rate_lr_exponent=2.0,
            global_norm_clip_threshold=0.1,
        ),
        {},
    ),
}  # fmt: skip
DROPOUT = dict(dropout_rate=0.3)
DROPPED = {
    "t5": ("t5", SIZES | GATED | DROPOUT | dict(num_encoder_layers=2, num_decoder_layers=2), {}, {}),
    "decoder_only": ("decoder_only", SIZES | GATED | DROPOUT | dict(num_layers=3), {}, {}),
}
BEGUN = {"t5_offset": 1000}  # the initial count of updates, if it is not 0
NORMALIZATIONS = {
    "sum": None,
    "tokens": "NUM_REAL_TARGET_TOKENS",
    "positions": "NUM_TOTAL_TARGET_TOKENS",
    "documents": "AVERAGE_PER_SEQUENCE",
    "233.0": 233.0,
}
NORMALIZED = dict(label_smoothing=0.1, z_loss=1e-2)
NORMALIZED_CASES = {"t5_options": "normalizations", "decoder_only": "normalizations of packed rows"}
LEARNING_RATE = dict(factors="constant * rsqrt_decay", base_learning_rate=0.003, warmup_steps=10)
SCHEDULES = {
    "pretraining": dict(factors="constant * rsqrt_decay", base_learning_rate=1.0, warmup_steps=1000),
    "default": dict(),
    "normalized": dict(factors="constant*linear_warmup*rsqrt_normalized_decay", warmup_steps=100),
    "linear": dict(factors="linear_decay", base_learning_rate=0.01, warmup_steps=500, decay_factor=0.001),
    "every": dict(factors="constant * decay_every", steps_per_decay=700, decay_factor=0.8),
    "cosine": dict(factors="constant * linear_warmup * cosine_decay", steps_per_cycle=3000, warmup_steps=200),
    "offset": dict(factors="constant * linear_warmup * rsqrt_decay", step_offset=1500, warmup_steps=300),
}
SCHEDULE_STEPS = 10_000
READ = ("t5", "scalable_t5")  # cases with T5X's own options
GO_ON = ("t5_1_1", "scalable_t5_map", "decoder_only", "t5_options")  # cases that resume in the other program
STORED_AT = 3
PACKED = "prefix_lm"
FORMS = ("zarr", "orbax", "msgpack")
SHOWN_STEPS = (0, 1, 9, 99, 100, 101, 499, 501, 700, 999, 1000, 1001, 1399, 1500, 1501, 1800, 3199, 3201, 6500, 9999)


def mask(key, p: float, shape) -> np.ndarray:
    """Replaces jax.random.bernoulli: a mask that depends on its shape alone."""
    del key
    return np.random.default_rng(list(shape)).random(shape) < p


def drawn(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """An initial parameter, drawn by its name: T5X's own initial values would need T5X."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    value = rng.standard_normal(shape, np.float32)
    return 1 + 0.1 * value if name.endswith("scale") else value * np.float32(0.15)


def batch(case: str = "t5") -> dict[str, np.ndarray]:
    """Two rows of a text and its continuation, both shorter in the second row. A decoder reads both in one row."""
    if CASES[case][0] == "decoder_only":
        return _batch_of_decoder()
    rng = np.random.default_rng(7)
    inputs, targets = rng.integers(2, 64, (2, 12)), rng.integers(2, 64, (2, 10))
    inputs[1, 9:] = 0
    targets[1, 7:] = 0
    shifted = np.concatenate([np.zeros((2, 1), int), targets[:, :-1]], axis=1)
    shifted[targets == 0] = 0
    found = {"encoder_input_tokens": inputs, "decoder_input_tokens": shifted, "decoder_target_tokens": targets}
    found = {name: value.astype(np.int32) for name, value in found.items()}
    return found | {"decoder_loss_weights": (targets > 0).astype(np.float32)}


def _batch_of_decoder() -> dict[str, np.ndarray]:
    """The first row has two documents."""
    rng = np.random.default_rng(11)
    targets, shifted, prefix, segments, weights, positions = (np.zeros((2, 20), int) for _ in range(6))
    at = [(0, 0, 7, 5, 1), (0, 12, 4, 3, 2), (1, 0, 9, 6, 1)]  # row, position, inputs, targets, document
    for row, begin, inputs, own, document in at:
        ids, end = rng.integers(2, 64, inputs + own), begin + inputs + own
        targets[row, begin:end] = ids
        shifted[row, begin + 1 : end] = ids[:-1]
        prefix[row, begin : begin + inputs + 1] = 1
        segments[row, begin:end], positions[row, begin:end] = document, np.arange(inputs + own)
        weights[row, begin + inputs : end] = 1
    found = {"decoder_input_tokens": shifted, "decoder_target_tokens": targets, "decoder_causal_attention": prefix}
    found |= {"decoder_segment_ids": segments, "decoder_positions": positions}
    found = {name: value.astype(np.int32) for name, value in found.items()}
    return found | {"decoder_loss_weights": weights.astype(np.float32)}


def sums(name: str, value: np.ndarray) -> list[float]:
    """The product of a parameter with a vector drawn by its name, over that vector's norm; and the parameter's norm."""
    weights = np.random.default_rng(zlib.crc32(name.encode()) + 1).standard_normal(value.size)
    value = np.asarray(value, np.float64).ravel()
    return [float(weights @ value / np.linalg.norm(weights)), float(np.linalg.norm(value))]


def rounded(values):
    """To nine digits, enough to distinguish all float32 numbers."""
    return [float(f"{value:.9g}") for value in values]


def flat(tree: dict, prefix: str = "") -> dict[str, np.ndarray]:
    found = {}
    for name, value in tree.items():
        found |= flat(value, f"{prefix}{name}/") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return found


def model_of(case: str, dropped: bool = False, **more):
    """T5X's model of a case, with its Adafactor and further options."""
    import importlib

    import seqio
    from t5x import adafactor, models

    network, sizes, of_adafactor, of_model = (DROPPED if dropped else CASES)[case]
    module = importlib.import_module(f"t5x.examples.{network}.network")
    rules = adafactor.standard_logical_factor_rules()
    options = dict(decay_rate=0.8, step_offset=0, logical_factor_rules=rules) | of_adafactor
    if "factor_map" in options:
        options |= dict(factor_map=factor_map(options["factor_map"]), logical_factor_rules=None)
    optimizer = adafactor.Adafactor(**options)
    vocabulary, options = seqio.ByteVocabulary(), dict(optimizer_def=optimizer) | of_model | more
    if network == "decoder_only":
        wrapped = module.DecoderWrapper(config=module.TransformerConfig(**sizes))
        return models.DecoderOnlyModel(wrapped, vocabulary, **options)
    return models.EncoderDecoderModel(
        module.Transformer(config=module.T5Config(**sizes)), vocabulary, vocabulary, **options
    )


def factor_map(rules):
    from t5x import adafactor

    def rule(given):
        if given == "heuristic":
            return adafactor.HEURISTIC_RULE
        return given and tuple(map(adafactor.factor_name_to_factordim, given))

    return adafactor.HParamMap([(pattern, rule(given)) for pattern, given in rules])


def begun(case: str, **more):
    """(the model, its state before the first step)."""
    import jax
    from flax.core import freeze, unfreeze
    from t5x import train_state

    model = model_of(case, **more)
    shapes = {name: value.shape for name, value in batch(case).items()}
    variables = unfreeze(model.get_initial_variables(jax.random.key(0), shapes))
    variables["params"] = nested({name: drawn(name, value.shape) for name, value in flat(variables["params"]).items()})
    state = train_state.FlaxOptimTrainState.create(model.optimizer_def, freeze(variables))
    optimizer = state._optimizer
    step = np.int32(BEGUN.get(case, 0))
    return model, state.replace(_optimizer=optimizer.replace(state=optimizer.state.replace(step=step)))


def nested(values: dict[str, np.ndarray]) -> dict:
    found: dict = {}
    for name, value in values.items():
        *owners, last = name.split("/")
        inner = found
        for owner in owners:
            inner = inner.setdefault(owner, {})
        inner[last] = value
    return found


def trained(case: str, state=None, steps: int = STEPS):
    """The losses of the steps, and the state after each of them."""
    import functools

    import jax
    import jax.numpy as jnp
    from t5x import trainer, utils

    model, first = begun(case)
    state = first if state is None else state
    schedule = utils.create_learning_rate_scheduler(**LEARNING_RATE)
    given = {name: jnp.asarray(value) for name, value in batch(case).items()}
    step = jax.jit(functools.partial(trainer.train_with_lr, model=model, num_microbatches=None))
    loss_of = jax.jit(lambda params: model.loss_fn(params, given, None)[0])
    losses, states = [], []
    for _ in range(steps):
        losses.append(float(loss_of(state.params)))
        state, _ = step(state, given, learning_rate=schedule(state.step), dropout_rng=None)
        states.append(state)
    return losses, states


def states_of(state) -> dict[str, np.ndarray]:
    """Adafactor's states, without the zeros that stand for unused ones."""
    from flax.core import unfreeze
    from flax.serialization import to_state_dict

    found = flat(unfreeze(to_state_dict(state.param_states)))
    return {name: np.asarray(value) for name, value in found.items() if value.shape != (1,)}


def params_of(state) -> dict[str, np.ndarray]:
    from flax.core import unfreeze

    return {name: np.asarray(value) for name, value in flat(unfreeze(state.params)).items()}


def learning_rates(name: str, steps) -> list[float]:
    import jax
    import jax.numpy as jnp
    from t5x import utils

    schedule = utils.create_learning_rate_scheduler(**SCHEDULES[name])
    return [float(rate) for rate in jax.vmap(schedule)(jnp.asarray(steps, jnp.int32))]


def normalized(name: str, case: str) -> list[float]:
    """The loss and the norm of its gradient."""
    import jax
    import jax.numpy as jnp

    model, state = begun(case, loss_normalizing_factor=NORMALIZATIONS[name], **NORMALIZED)
    given = {name: jnp.asarray(value) for name, value in batch(case).items()}
    loss = jax.jit(jax.value_and_grad(lambda params: model.loss_fn(params, given, None)[0]))
    value, gradient = loss(state.params)
    return [float(value), float(np.sqrt(sum(float(jnp.sum(jnp.square(g))) for g in jax.tree.leaves(gradient))))]


def dropout(case: str) -> float:
    """The loss with masks that depend on their shapes alone."""
    import jax
    import jax.numpy as jnp

    model, state = begun(case, dropped=True)
    given, drawn_anew = {name: jnp.asarray(value) for name, value in batch(case).items()}, jax.random.bernoulli
    jax.random.bernoulli = mask
    try:
        return float(model.loss_fn(state.params, given, jax.random.key(1))[0])
    finally:
        jax.random.bernoulli = drawn_anew


def record(path: str) -> None:
    found: dict = {
        key: {name: rounded(normalized(name, case)) for name in NORMALIZATIONS}
        for case, key in NORMALIZED_CASES.items()
    }
    found |= {"dropout": dict(zip(DROPPED, rounded(map(dropout, DROPPED))))}
    found |= {"schedules": {name: rounded(learning_rates(name, SHOWN_STEPS)) for name in SCHEDULES}}
    for case in CASES:
        losses, states = trained(case)
        found[case] = {"losses": rounded(losses)}
        for what, of_state in (("params", params_of), ("states", states_of)):
            each = {step: of_state(states[step - 1]) for step in KEPT}
            found[case][what] = {
                step: {name: rounded(sums(name, value)) for name, value in of.items()} for step, of in each.items()
            }
    text = json.dumps(found, indent=None, separators=(",", ":"))
    pathlib.Path(path).write_text(text.replace('},"', '},\n"').replace('],"', '],\n"') + "\n")


def train(folder: str) -> None:
    for case in CASES:
        losses, states = trained(case)
        arrays = {
            f"{step}/{name}": value
            for step in KEPT
            for name, value in (params_of(states[step - 1]) | states_of(states[step - 1])).items()
        }
        np.savez(pathlib.Path(folder) / f"{case}.npz", losses=losses, **arrays)
    rates = {name: learning_rates(name, range(SCHEDULE_STEPS)) for name in SCHEDULES}
    np.savez(pathlib.Path(folder) / "schedules.npz", **rates)


def read(folder: str) -> None:
    from t5x import checkpoints

    for case in READ:
        _, state = begun(case)
        loaded = checkpoints.load_t5x_checkpoint(str(pathlib.Path(folder) / case / "checkpoint_0"))
        losses, _ = trained(case, state.restore_state(loaded), steps=3)
        np.savez(pathlib.Path(folder) / f"{case}.npz", losses=losses)


def pack(file: str) -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as out,
    ):
        write(folder, (PACKED,))
        for path in sorted(pathlib.Path(folder).rglob("*")):
            if path.is_file():
                name = zipfile.ZipInfo(str(path.relative_to(folder)))
                name.compress_type = zipfile.ZIP_DEFLATED
                out.writestr(name, path.read_bytes())


def write(folder: str, cases: tuple[str, ...] = GO_ON) -> None:
    """Writes with T5X's two checkpointers, and with Flax into one file."""
    from flax import serialization
    from t5x import checkpoints, partitioning

    partitioner = partitioning.PjitPartitioner(num_partitions=1)
    for case in cases:
        state = trained(case, steps=STORED_AT)[1][-1]
        where = {form: pathlib.Path(folder) / form / case for form in FORMS}
        for path in where.values():
            path.mkdir(parents=True)
        checkpoints.Checkpointer(state, partitioner, str(where["zarr"])).save(state)
        manager = checkpoints.OrbaxCheckpointManagerInterface(str(where["orbax"]), state, partitioner)
        manager.save(state)
        manager.close()
        file = where["msgpack"] / f"checkpoint_{STORED_AT}"
        file.write_bytes(serialization.msgpack_serialize(serialization.to_state_dict(state.state_dict())))


def go_on(folder: str) -> None:
    from t5x import checkpoints

    for case in GO_ON:
        _, state = begun(case)
        loaded = checkpoints.load_t5x_checkpoint(str(pathlib.Path(folder) / case / f"checkpoint_{STORED_AT}"))
        losses, _ = trained(case, state.restore_state(loaded), steps=STEPS - STORED_AT)
        np.savez(pathlib.Path(folder) / f"{case}.npz", losses=losses)


if __name__ == "__main__":
    named = {"record": record, "train": train, "read": read, "write": write, "pack": pack, "go_on": go_on}
    named[sys.argv[1]](sys.argv[2])
