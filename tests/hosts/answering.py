"""What needs answers, in this process: rollouts, samples, DPO's reference pass, distillation, evaluation, the harness.

`python answering.py DEVICES FOLDER NAME PART ...` does the parts as one of several processes of so many devices, and
writes what comes of them to FOLDER/NAME.PART.PROCESS.json. A test does the same alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import pathlib
import sys
from unittest import mock

import jax
import numpy as np

from capibara.checkpoints.policy import Checkpointing
from capibara.cli import evaluate
from capibara.core.types import UserError
from capibara.data.chat.answers import PreferenceJsonlSource, PromptJsonlSource
from capibara.data.chat.conversations import ChatJsonlSource
from capibara.data.chat.template import ChatTemplate
from capibara.data.dataset import Dataset
from capibara.data.tokenizers.vocabulary import TokenizerJsonVocabulary
from capibara.inference.engine.engine import Engine, EngineConfig
from capibara.inference.engine.placement.own_chips import Where
from capibara.inference.engine.placement.serving_mesh import ServingMesh
from capibara.inference.memory_agent.agent import MemoryAgent
from capibara.inference.sample import SampleText, sampler
from capibara.inference.sampling.sampling import Sampling
from capibara.models import api
from capibara.models.api import DecoderConfig
from capibara.multihost import channel, exits, hosts, joining
from capibara.objectives.preference import Dpo
from capibara.optim import Optimizer, Schedule
from capibara.sharding import Plan
from capibara.storage import outputs
from capibara.strategies.answering import Answerer
from capibara.strategies.distillation.loss import Distillation
from capibara.strategies.distillation.teacher import Teacher
from capibara.strategies.environments.environment import Environment, Episode
from capibara.strategies.grpo import Grpo
from capibara.training import loop
from capibara.training.base.callbacks import Callback
from capibara.training.base.options import Evaluation
from capibara.training.evaluation import Judge
from capibara.training.trainer import Trainer

MODEL = DecoderConfig(vocab_size=384, embed_dim=32, num_layers=1, num_heads=2, mlp_dim=64, dtype="float32")
ROWS, GROUP, PROMPTS = 16, 4, 26


def has_digit(prompt, answer, record):
    return float(any(letter.isdigit() for letter in answer))


def differs_by_host(prompt, answer, record):
    return len(answer) + 0.5 * jax.process_index()


def fails_on_one_host(prompt, answer, record):
    return 1.0 if jax.process_index() == 0 else float("nan")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counting(Environment):
    """Answers with how often it was asked and how the message begins, until the length of one divides by three.

    Attributes:
      wrong: what it answers in the place of a message on process 1.
    """

    wrong: object = None

    def begin(self, record):
        return CountingEpisode(self.wrong if jax.process_index() else None)


STEPPED: list[str] = []  # the messages that this process's environment has answered


class CountingEpisode(Episode):
    def __init__(self, wrong):
        self.asked, self.wrong = 0, wrong

    def step(self, messages):
        self.asked += 1
        text = messages[-1]["content"]
        STEPPED.append(text)
        if self.wrong is not None:
            return [self.wrong]
        return [] if len(text) % 3 == 0 else [{"role": "user", "content": f"{self.asked}{text[:2].upper()}"}]


def counted(prompt, answer, record):
    """How often the environment has answered, and how long the last message is."""
    return sum(message["role"] == "user" for message in record["dialogue"]) + len(answer) / 100


class Seen(Callback):
    def __init__(self):
        self.steps, self.evaluations, self.samples = {}, {}, []

    def on_step(self, step, metrics):
        self.steps[step] = dict(metrics)

    def on_evaluate(self, step, metrics):
        self.evaluations[step] = dict(metrics)

    def on_sample(self, step, prompt, text):
        self.samples.append([step, prompt, text])


def write_data(folder: pathlib.Path) -> None:
    """Prompts, pairs of answers, and questions of two kinds."""
    prompts = [{"prompt": f"{i}?"} for i in range(PROMPTS)]
    pairs = [{"prompt": f"{i}?", "chosen": str(i), "rejected": "no" * (1 + i % 3)} for i in range(19)]
    questions = [{"prompt": "def f" + "x" * (i % 5), "target": "x"} for i in range(23)]
    choices = [{"prompt": "a" * (1 + i), "choices": ["b" * (1 + i % 4), "cc"], "target": 1} for i in range(45)]
    documents = [{"question": f"{i}?", "document": "abcdefgh" * (1 + i % 3)} for i in range(PROMPTS)]
    files = {"prompts": prompts, "pairs": pairs, "qa": questions, "mc": choices, "documents": documents}
    for name, lines in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "tasks.gin").write_text(
        f"""
qa/EvalTask.files = ("{folder}/qa.jsonl",)
qa/EvalTask.metrics = (@exact_match,)
qa/EvalTask.num_samples = 2
mc/EvalTask.files = ("{folder}/mc.jsonl",)
mc/EvalTask.prompt = "{{prompt}}"
mc/EvalTask.choices = "choices"
EvalTask.sampling = @Sampling()
Sampling.temperature = 0.7
Sampling.max_new_tokens = 5
EngineConfig.slots = 4
"""
    )


def trainer_of(folder: pathlib.Path, name: str, **changes) -> Trainer:
    tokenizer = str(folder / "tokenizer")
    source = PromptJsonlSource(files=(str(folder / "prompts.jsonl"),), template=ChatTemplate(tokenizer=tokenizer))
    base = Trainer(
        model_dir=str(folder / name),
        steps=2,
        model=MODEL,
        plan=Plan(batch_size=ROWS),
        dataset=Dataset(
            source=dataclasses.replace(source, validation_fraction=0.3),
            vocabulary=TokenizerJsonVocabulary(path=tokenizer),
            length=20,
            packing="none",
        ),
        optimizer=Optimizer(schedule=Schedule(kind="rsqrt", learning_rate=1e-2, warmup_steps=1), weight_decay=0.0),
        evaluation=Evaluation(every=0),
        checkpointing=Checkpointing(every=0),
        loss=Grpo(
            rewards=(has_digit,), group=GROUP, sampling=Sampling(max_new_tokens=8, temperature=0.7),
            engine=EngineConfig(slots=8, prefix_cache_mib=0),
        ),
        log_every=1,
    )  # fmt: skip
    loss = dataclasses.replace(base.loss, **changes.pop("grpo", {}))
    return dataclasses.replace(base, **{"loss": loss, **changes})


def trained(trainer: Trainer, texts: SampleText = SampleText(), judge: Judge | None = None) -> dict:
    """Steps, evaluations and samples, what this process's engine was asked for, and what all answers are."""
    seen, asked, batches = Seen(), [], []
    submit, answers = Engine.submit, Answerer.answers

    def submitting(engine, prompt, *args, **options):
        asked.append(list(prompt) if not isinstance(prompt, str) else prompt)
        return submit(engine, prompt, *args, **options)

    def answering(*args):
        found = answers(*args)
        batches.append([[dataclasses.astuple(one) for one in group] for group in found])
        return found

    Engine.submit, Answerer.answers = submitting, answering
    try:
        dataset = trainer.dataset
        sampled = sampler(
            api.build(trainer.model), dataset.get_vocabulary, dataset.length, texts, gathered=hosts.gathered
        )
        loop.train(trainer, seen, sampler=sampled, judge=judge)
    finally:
        Engine.submit, Answerer.answers = submit, answers
    digest = hashlib.sha256(json.dumps(batches).encode()).hexdigest()
    tokens = [[[one[:2] for one in group] for group in batch] for batch in batches]
    told = {"steps": seen.steps, "evaluations": seen.evaluations, "samples": seen.samples}
    return {**told, "asked": asked, "answers": digest, "tokens": tokens}


def rollouts(folder: pathlib.Path, name: str) -> dict:
    """Two steps, then an evaluation and samples."""
    texts = SampleText(prompts=("a", "b"), sampling=Sampling(max_new_tokens=4, temperature=0.0))
    return trained(trainer_of(folder, f"{name}_rollouts", evaluation=Evaluation(every=2)), texts)


def readings(folder: pathlib.Path, name: str) -> dict:
    """Two steps on documents of one to three chunks, which are read with a memory, and an evaluation."""
    agent = MemoryAgent(
        chunk_tokens=8,
        memory_tokens=4,
        update="{question}|{memory}|{chunk}",
        answer="{question}|{memory}",
        empty_memory="-",
    )
    base = trainer_of(folder, f"{name}_readings", evaluation=Evaluation(every=2))
    source = dataclasses.replace(base.dataset.source, files=(str(folder / "documents.jsonl"),))
    dataset = dataclasses.replace(base.dataset, source=source, length=36)
    loss = dataclasses.replace(base.loss, memory=agent, max_chunks=3)
    return trained(dataclasses.replace(base, dataset=dataset, loss=loss, plan=Plan(batch_size=2 * 4 * GROUP)))


def together(folder: pathlib.Path, name: str) -> dict:
    """All processes make each token; two steps on one rollout."""
    return trained(trainer_of(folder, f"{name}_together", grpo={"where": Where.ALL, "kl": 0.1, "updates": 2}))


def meshes(folder: pathlib.Path, name: str) -> dict:
    """Each process has a mesh of two of its devices."""
    plan = Plan(batch_size=ROWS, fsdp=1, data=-1, tensor=2)
    grpo = {"mesh": ServingMesh(tensor=2), "kl": 0.1, "updates": 2}
    return trained(trainer_of(folder, f"{name}_meshes", plan=plan, grpo=grpo))


def speaking(folder: pathlib.Path, name: str, wrong: object = None, **grpo) -> dict:
    """Two steps on dialogues with an environment, some of which end early, and an evaluation."""
    base = trainer_of(folder, name, evaluation=Evaluation(every=2))
    sampling = Sampling(max_new_tokens=300, temperature=0.7)
    options = {"rewards": (counted,), "environment": Counting(wrong=wrong, turns=3), "sampling": sampling} | grpo
    loss, dataset = dataclasses.replace(base.loss, **options), dataclasses.replace(base.dataset, length=320)
    STEPPED.clear()
    return trained(dataclasses.replace(base, loss=loss, dataset=dataset)) | {"stepped": [*STEPPED]}


def dialogues(folder: pathlib.Path, name: str) -> dict:
    """Each process speaks about its prompts."""
    return speaking(folder, f"{name}_dialogues")


def joint_dialogues(folder: pathlib.Path, name: str) -> dict:
    """All processes make each token of the model; an environment answers in one of them."""
    return speaking(folder, f"{name}_joint_dialogues", where=Where.ALL)


def wrong_dialogues(folder: pathlib.Path, name: str) -> dict:
    """The environment of process 1 answers what is no message, or none that processes can exchange."""
    errors = []
    for number, wrong in enumerate(("text", {"role": "user", "content": "x", "extra": {1, 2}})):
        try:
            speaking(folder, f"{name}_wrong_dialogues{number}", wrong)
        except UserError as error:
            errors.append(str(error))
    return {"errors": errors}


def opinions(folder: pathlib.Path, name: str) -> dict:
    """A reward that is another one on every host."""
    return trained(trainer_of(folder, f"{name}_opinions", steps=1, grpo={"rewards": (differs_by_host,)}))


def failure(folder: pathlib.Path, name: str) -> dict:
    """A reward that is no number on one host."""
    try:
        trained(trainer_of(folder, f"{name}_failure", steps=1, grpo={"rewards": (fails_on_one_host,)}))
    except ValueError as error:
        return {"error": str(error)}
    return {"error": None}


def reference(folder: pathlib.Path, name: str) -> dict:
    """DPO's reference pass, a step and an evaluation."""
    source = PreferenceJsonlSource(
        files=(str(folder / "pairs.jsonl"),),
        template=ChatTemplate(tokenizer=str(folder / "tokenizer")),
        validation_fraction=0.3,
    )
    base = trainer_of(folder, f"{name}_reference", evaluation=Evaluation(every=2))
    dataset = dataclasses.replace(base.dataset, source=source, length=32)
    found = trained(dataclasses.replace(base, dataset=dataset, loss=Dpo(), plan=Plan(batch_size=8)))
    if jax.process_index() == 0:
        for split in ("train", "validation"):
            with np.load(folder / f"{name}_reference" / f"reference.{split}.npz") as file:
                found[split] = file["table"].tolist()
    return found


def distilled(folder: pathlib.Path, name: str) -> dict:
    """Steps on answers of the student and of its teacher, whose parameters all processes hold together; an evaluation."""
    files, template = (str(folder / "pairs.jsonl"),), ChatTemplate(tokenizer=str(folder / "tokenizer"))
    source = ChatJsonlSource(files=files, format="chosen", template=template, validation_fraction=0.3)
    base = trainer_of(folder, f"{name}_distilled", steps=4, evaluation=Evaluation(every=4))
    loss = Distillation(
        teacher=Teacher(path=str(folder / "run"), model=MODEL), on_policy=0.5, teacher_draws=True, top_k=7,
        sampling=Sampling(max_new_tokens=6, temperature=0.7), engine=EngineConfig(slots=8, prefix_cache_mib=0),
    )  # fmt: skip
    dataset = dataclasses.replace(base.dataset, source=source, length=24)
    return trained(dataclasses.replace(base, dataset=dataset, loss=loss, plan=Plan(batch_size=8)))


_CALLED = (channel, "watch"), (outputs, "check_writable")


def evaluated(folder: pathlib.Path, name: str) -> dict:
    """Answers and choices of a run, in a file of predictions; how often this process looked whether it can be written."""
    files = (f"--predictions={folder}/{name}.jsonl", f"--out={folder}/{name}.json")
    run = (f"--model_dir={folder}/run", f"--gin_file={folder}/tasks.gin", "--gin.Plan.batch_size=8")
    called = (mock.patch.object(module, name, wraps=getattr(module, name)) for module, name in _CALLED)
    with contextlib.ExitStack() as stack:
        watched, checked = map(stack.enter_context, called)
        code = evaluate.main([*run, "--gin.Dataset.length=64", *files])
        return {"code": code, "watched": watched.call_count, "checks": checked.call_count}


def harness(folder: pathlib.Path, name: str) -> dict:
    """lm-eval's requests, without its tasks."""
    from lm_eval.api.instance import Instance

    from capibara.cli.composition.models import open_subject
    from capibara.evaluation.harness import CapibaraLM

    subject = open_subject(str(folder / "run"), bindings=["Dataset.length = 64", "Plan.batch_size = 8"])
    lm = CapibaraLM(subject)
    asked = [("x" * i, {"max_gen_toks": 4, "temperature": 0.7 * (i % 2)}) for i in range(1, 12)]
    pairs = [("a" * i, "b" * (1 + i % 3)) for i in range(1, 90)]

    def instances(kind, given):
        return [Instance(kind, {}, one, i, ("t", i, 1)) for i, one in enumerate(given)]

    scored = lm.loglikelihood(instances("loglikelihood", pairs), disable_tqdm=True)
    texts = lm.generate_until(instances("generate_until", asked), disable_tqdm=True)
    return {"apart": subject.is_distributed, "texts": texts, "scores": [list(one) for one in scored]}


def scores(folder: pathlib.Path, name: str) -> dict:
    """Pairs on the mesh of all processes, and on one of each process's own devices."""
    from capibara.cli.composition.models import open_subject
    from capibara.evaluation.scoring import Pair, Scorer

    bindings = ["Dataset.length = 64", "Plan.batch_size = 8"]
    subject = open_subject(str(folder / "run"), bindings=[*bindings, "ServingMesh.data = 2"])
    pairs = [Pair([0] * (1 + i % 9), [1 + i % 50] * (1 + i % 4)) for i in range(90)]
    all_together = Scorer(subject.model, subject.params, 64, plan=subject.trainer.plan, mesh=subject.mesh)
    found = {"together": all_together(pairs), "own": subject.scorer(pairs)}
    return {kind: [one.log_probability for one in of_kind] for kind, of_kind in found.items()}


def judged(folder: pathlib.Path, name: str) -> dict:
    """Each task of a SeqIO mixture, by its losses and metric_fns, while a run trains."""
    from capibara.evaluation.judging import TaskJudge
    from capibara.evaluation.seqio_tasks import SeqioEvaluation

    sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "evaluation"))
    dataset = Dataset(mixture_or_task_name="judged", task_module="seqio_task", length=32, window_rows=2)
    evaluation = Evaluation(every=2, task_metrics=True)
    plan = {"plan": Plan(batch_size=8), "loss": None, "dataset": dataset, "evaluation": evaluation}
    trainer = dataclasses.replace(trainer_of(folder, f"{name}_judged"), **plan)
    options = SeqioEvaluation(task_module="seqio_task", sampling=Sampling(temperature=0.0, max_new_tokens=4))
    return trained(trainer, judge=TaskJudge(trainer, api.build(MODEL), options, EngineConfig(slots=2)))


PARTS = [
    rollouts,
    readings,
    together,
    meshes,
    opinions,
    failure,
    dialogues,
    joint_dialogues,
    wrong_dialogues,
    reference,
    distilled,
    evaluated,
    harness,
    scores,
    judged,
]


def main(argv: list[str] | None = None) -> int:
    devices, folder, name, *parts = sys.argv[1:] if argv is None else argv
    jax.config.update("jax_num_cpu_devices", int(devices))
    joining.join(joining.Joining(), {}, emulated=True)
    joining.join = lambda *_, **__: None  # a verb's own
    by_name = {part.__name__: part for part in PARTS}
    for part in parts:
        found = by_name[part](pathlib.Path(folder), name)
        (pathlib.Path(folder) / f"{name}.{part}.{jax.process_index()}.json").write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(exits.run_process(main))
