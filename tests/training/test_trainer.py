"""What a run refuses before anything is built."""

import contextlib
import dataclasses

import pytest

from capibara import config, sharding
from capibara.cli.composition import training_run
from capibara.cli.composition.inspected_run import run_of_gin
from capibara.core.types import UserError
from capibara.models import api
from capibara.models.parts.moe import Moe
from capibara.models.parts.router import Hints
from capibara.objectives.base import Normalization
from capibara.training import setup as run
from capibara.training.trainer import Trainer


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        (dict(label_smoothing=1.0), "label_smoothing is 1.0, must be from 0 to below 1"),
        (dict(loss_normalization=0.0), "loss_normalization is 0.0, must be finite and above 0, or 'tokens'"),
        (dict(loss_normalization="token"), "did you mean 'tokens'"),
    ],
)
def test_options_of_the_cross_entropy(make_trainer, fields, told):
    with pytest.raises(UserError, match=told):
        make_trainer(**fields)


def test_a_normalization_is_known_by_its_old_name(make_trainer, capsys):
    assert make_trainer(loss_normalization="places").loss_normalization is Normalization.POSITIONS
    assert '"places" is now "positions"' in capsys.readouterr().err


@pytest.mark.parametrize("seed", [-1, 2**32, 10**30])
def test_a_seed_has_32_bits(make_trainer, seed):
    with pytest.raises(UserError, match=f"Trainer.seed is {seed}, must be from 0 to 4294967295"):
        make_trainer(seed=seed)
    assert make_trainer(seed=2**32 - 1).seed == 2**32 - 1


class TestBindings:
    """Every binding of the command line has an effect or is refused."""

    @pytest.fixture
    def used(self):
        def build(*bindings, files=("quickstart.gin",)):
            config.parse(files, bindings)
            training_run.parts_of(config.build(Trainer))
            return config.check_used()

        return build

    @pytest.mark.parametrize("file", ["quickstart_seqio.gin", "base_v5e64.gin"])
    def test_the_runs_that_come_along_are_quiet(self, used, file):
        bindings = (
            "TASK_MODULE=capibara.data.builtin_tasks",
            "MODEL_DIR=x",
            "Sampling.top_k=2",
            "SampleText.prompts=('a',)",
        )
        assert used(*bindings, files=[file]) == []

    def test_what_a_run_advertises_is_built(self, used):
        used("Rope.theta=5.0", "Rules.kv_heads=()", "LossScaling.initial=4.0")
        trainer = config.build(Trainer)
        assert trainer.model.rope.theta == 5 and trainer.plan.rules.kv_heads == () and trainer.loss_scaling.initial == 4

    @pytest.mark.parametrize(
        ("binding", "message"),
        [
            ("Moe.num_experts=4", "Moe.num_experts is bound but nothing uses it: add '--gin.DecoderConfig.moe=@Moe()'"),
            ("Hints.loss=0.1", "uses it: add '--gin.DecoderConfig.moe=@Moe()' '--gin.Moe.hints=@Hints()'"),
            ("EncoderConfig.vocab_size=384", "add '--gin.Trainer.model=@EncoderConfig()'"),
            (
                "Masking.chosen=0.2",
                "Masking.chosen is bound but nothing uses it: add '--gin.Dataset.masking=@Masking()'",
            ),
            ("Rope.scaling=yarn", "Rope.factor (1.0) must be above 1 with yarn scaling: try 8.0"),
            ("LossScaling.initial=-1.0", "at most initial (-1.0)"),
        ],
    )
    def test_what_nothing_reads_is_refused_with_the_way_in(self, used, binding, message):
        with pytest.raises(UserError) as error:
            used(binding)
        assert message in str(error.value)

    def test_in_a_file_of_the_users_it_is_a_note(self, used, tmp_path):
        (tmp_path / "mine.gin").write_text('include "quickstart.gin"\nMoe.num_experts = 4\n')
        (note,) = used(files=[tmp_path / "mine.gin"])
        assert note.startswith(f"{tmp_path}/mine.gin:2: Moe.num_experts is bound but nothing uses it: add ")

    @pytest.mark.parametrize(("model", "run"), [("t5_1_1_small", "pretrain_t5"), ("bert_base", "pretrain_bert")])
    def test_a_model_of_another_kind_names_its_run(self, used, model, run):
        files = [f"models/{model}.gin", "tasks/text.gin", "runs/pretrain.gin"]
        needed = ("MODEL_DIR=x", "TRAIN_STEPS=1", "FILES=('x',)")
        with pytest.raises(
            UserError, match=f"^DecoderConfig.vocab_size has no value, .* use --gin_file=runs/{run}.gin"
        ):
            used(*needed, files=files)
        assert used(*needed, files=[*files[:2], f"runs/{run}.gin"]) == []


def test_hints_and_data_name_the_same_domains(make_trainer):
    base = make_trainer()
    hints = Hints(domains=("code", "prose"), decay_steps=10)
    model = dataclasses.replace(base.model, moe=Moe(num_experts=4, hints=hints))
    for domains in ((), ("prose", "code"), ("code",)):
        with pytest.raises(
            UserError, match=r"^Hints.domains .*must be Dataset.domains .*: set Dataset.domains = \('code'"
        ):
            make_trainer(model=model, dataset=dataclasses.replace(base.dataset, domains=domains))
    make_trainer(model=model, dataset=dataclasses.replace(base.dataset, domains=("code", "prose")))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(length=250), r"^Dataset.length \(250\) must be a multiple of 8 \(2 x Plan.context\): try 256"),
        (dict(length=32), None),
    ],
)
def test_a_context_axis_divides_the_rows(make_trainer, changes, message):
    base = make_trainer()
    plan = dataclasses.replace(base.plan, fsdp=2, tensor=1, context=4)
    trainer = make_trainer(plan=plan, dataset=dataclasses.replace(base.dataset, **changes))
    with pytest.raises(UserError, match=message) if message else contextlib.nullcontext():
        run.lower_step(trainer, api.build(trainer.model), sharding.make_mesh(plan))


def test_an_encoders_rows_divide_too(make_trainer):
    base = make_trainer()
    dataset = dataclasses.replace(base.dataset, kind="encoder_decoder", length=32, encoder_length=66)
    sizes = dict(vocab_size=384, embed_dim=32, num_layers=2, num_heads=2, mlp_dim=64)
    plan = dataclasses.replace(base.plan, fsdp=2, tensor=1, context=4)
    trainer = make_trainer(plan=plan, dataset=dataset, model=api.EncoderDecoderConfig(**sizes))
    with pytest.raises(
        UserError, match=r"Dataset.encoder_length \(66\) must be a multiple of 4 \(Plan.context\): try 68"
    ):
        run.lower_step(trainer, api.build(trainer.model), sharding.make_mesh(plan))


@pytest.mark.parametrize("name", ["gemma3n_e2b", "t5_small", "llama3.2_1b"])
def test_the_file_of_a_model_alone_is_a_run(name):
    config.parse([f"models/{name}.gin"], [], [])
    found = run_of_gin(length=64)
    kind = {"gemma3n_e2b": api.Gemma3nConfig, "t5_small": api.EncoderDecoderConfig}.get(name, api.DecoderConfig)
    assert type(found.model) is kind and found.dataset.length == 64
