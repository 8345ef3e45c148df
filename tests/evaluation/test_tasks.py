"""Tasks from Gin and their files: what is asked of each line, and every mistake in one line."""

from __future__ import annotations

import json
import sys
import types

import pytest

from capibara import config
from capibara.cli.composition import evaluation_tasks
from capibara.core.types import UserError
from capibara.data.dataset import Dataset
from capibara.data.sources.sources import StdlibSource
from capibara.data.tokenizers.vocabulary import TokenizerJsonVocabulary
from capibara.evaluation import evaluate
from capibara.evaluation.metrics import choice_accuracy, exact_match, pair_accuracy
from capibara.evaluation.programs import PassAtK
from capibara.evaluation.tasks import EvalTask, Item, read_items
from capibara.inference.memory_agent.agent import MemoryAgent
from capibara.inference.sampling.sampling import Sampling


@pytest.fixture
def lines(tmp_path):
    def write(*records, name="qa.jsonl"):
        (tmp_path / name).write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))
        return str(tmp_path / name)

    return write


def items(path, limit=None, **fields):
    return read_items("qa", EvalTask(**{"files": (path,), "metrics": (exact_match,)} | fields), limit)


def test_lines_become_items(lines):
    path = lines({"q": "1+1?", "a": "2", "n": 3}, "", {"q": "{x}", "a": ["b", "c"]})
    assert items(path, prompt="Q: {q}\n{{A}}:", target="a") == [
        Item("Q: 1+1?\n{A}:", "2"),
        Item("Q: {x}\n{A}:", ["b", "c"]),
    ]
    assert items(path, 1, prompt="{q}", target=("a", "n")) == [Item("1+1?", {"a": "2", "n": 3})]


@pytest.mark.parametrize("answer, number", [(1, 1), ("B", 1), ("b", 1), ("two", 1), (0, 0), ("A", 0)])
def test_the_right_choice_is_a_number_a_letter_or_a_text(lines, answer, number):
    path = lines({"q": "?", "c": ["one", "two"], "a": answer})
    assert items(path, prompt="{q}", target="a", choices="c", metrics=None) == [Item("?", number, ("one", "two"))]


def test_mistakes_in_files_name_the_line(lines, tmp_path):
    good = {"prompt": "?", "target": "!"}
    with pytest.raises(UserError, match=r"qa.jsonl:2 has no 'target', which EvalTask.target needs: did you mean targe"):
        items(lines(good, {"prompt": "?", "targe": "!"}))
    with pytest.raises(UserError, match=r"qa.jsonl:1 has no 'q', which EvalTask.prompt needs"):
        items(lines(good), prompt="{q}")
    with pytest.raises(UserError, match=r"qa.jsonl:2 is no JSON"):
        items(lines(good, '{"prompt": '))
    with pytest.raises(UserError, match="must be a JSON object, not list"):
        items(lines("[1]"))
    with pytest.raises(UserError, match=r"qa/EvalTask.files \(.*\) have no lines"):
        items(lines(""))
    with pytest.raises(UserError, match="matches no file"):
        items(str(tmp_path / "none.jsonl"))
    for choices, answer, why in ((["a"], 0, "at least two texts"), (["a", "b"], 2, "from 0 to 1"), ("ab", 0, "a list")):
        with pytest.raises(UserError, match=why):
            items(lines(good | {"c": choices, "target": answer}), choices="c", metrics=None)
    with pytest.raises(UserError, match=r"qa.jsonl:1 is no JSON"):
        items(lines("[" * 50000))


def test_lines_of_pairs_have_two_conversations_and_groups_have_names(lines):
    path = lines({"prompt": "1+1?", "chosen": "2", "rejected": "3", "subset": "sums"})
    (item,) = items(path, metrics=None, pairs=True, group_by="subset")
    assert [message["content"] for message in item.pair.rejected.messages] == ["1+1?", "3"]
    assert item.group == "sums" and item.target is None
    turns = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
    whole = lines({"chosen": turns, "rejected": [turns[0], {"role": "assistant", "content": "3"}]})
    assert items(whole, metrics=None, pairs=True)[0].pair == item.pair
    assert [i.group for i in items(lines({"prompt": "?", "target": "!", "level": 3}), group_by="level")] == ["3"]
    with pytest.raises(
        UserError, match="qa.jsonl:1 has no 'subset', which EvalTask.group_by needs: did you mean subsets"
    ):
        items(lines({"prompt": "?", "target": "!", "subsets": "x"}), group_by="subset")
    for value in ("", " ", None, True, 1.5, ["x"], "a\nb", "\x1b[31m", "x" * 201):
        with pytest.raises(UserError, match="'subset' is .*, must be a name or a whole number"):
            items(lines({"prompt": "?", "target": "!", "subset": value}), group_by="subset")
    with pytest.raises(UserError, match="qa.jsonl:1 is no preference pair: it needs chosen and rejected"):
        items(lines({"prompt": "?", "chosen": "!"}), metrics=None, pairs=True)


@pytest.mark.parametrize(
    "fields, error",
    [
        ({"prompt": "{q}"}, r"EvalTask.prompt is '\{q\}', and EvalTask.pairs True"),
        ({"target": "a"}, "EvalTask.target is 'a', and EvalTask.pairs True"),
        ({"choices": "c"}, "EvalTask.choices is 'c', and EvalTask.pairs True"),
        ({"num_samples": 2}, "EvalTask.num_samples is '2', and EvalTask.pairs True"),
        ({"format": "chat"}, "EvalTask.format is 'chat', and EvalTask.pairs True"),
        ({"memory": MemoryAgent()}, "EvalTask.memory is .*, and EvalTask.pairs True"),
        ({"metrics": (exact_match,)}, "exact_match, which is for texts, but EvalTask.pairs is True: remove one"),
    ],
)
def test_pairs_are_asked_nothing_else(fields, error):
    with pytest.raises(UserError, match=error):
        EvalTask(files=("x.jsonl",), pairs=True, **fields)


def test_metrics_of_pairs_need_pairs():
    with pytest.raises(
        UserError, match="pair_accuracy, which is for pairs, but EvalTask.pairs is False: set it to True"
    ):
        EvalTask(files=("x.jsonl",), metrics=(pair_accuracy,))


def test_tables_are_read_as_lines(tmp_path):
    path = tmp_path / "qa.csv"
    path.write_text("prompt,target\n1+1?,2\n")
    assert items(str(path)) == [Item("1+1?", "2")]
    name = evaluate.Ours("qa", EvalTask(files=(str(path),), metrics=(exact_match,)), [])
    assert evaluate.files_of([name]) == [str(path)]
    several = evaluate.Ours("qa", EvalTask(files=(f"{tmp_path}/q*.csv",), metrics=(exact_match,)), [])
    assert evaluate.files_of([several]) == [str(path)]
    path.write_text("prompt\n1+1?\n")
    with pytest.raises(UserError, match=f"^{path}:1 has no 'target'"):
        items(str(path))
    with pytest.raises(UserError, match="none.parquet does not exist"):
        items(str(tmp_path / "none.parquet"))


def test_a_line_of_a_task_with_a_memory_has_a_document(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"q": "who?", "target": "x", "text": "long"}\n')
    task = EvalTask(files=(str(path),), metrics=(exact_match,), prompt="{q}", memory=MemoryAgent(document="text"))
    assert [item.document for item in read_items("qa", task)] == ["long"]
    for line, message in (
        ('{"q": "who?", "target": "x"}', "has no 'text', which MemoryAgent.document needs"),
        ('{"q": "who?", "target": "x", "text": " "}', "'text' is ' ', must be a text"),
        ('{"q": "who?", "target": "x", "text": 3}', "'text' is '3', must be a text"),
    ):
        path.write_text(line)
        with pytest.raises(UserError, match=message):
            read_items("qa", task)
    with pytest.raises(UserError, match="EvalTask.choices is 'c' and EvalTask.memory is set"):
        EvalTask(files=("x",), choices="c", memory=MemoryAgent())
    with pytest.raises(UserError, match="Sampling.num_decodes is 2, which reading with a memory does not support"):
        EvalTask(files=("x",), metrics=(exact_match,), memory=MemoryAgent(), sampling=Sampling(num_decodes=2))


def test_mistakes_in_a_task():
    for fields, why in (
        ({"metrics": ()}, "EvalTask.metrics is empty"),
        ({"metrics": None}, "EvalTask.metrics is empty"),
        ({"num_samples": 0}, "num_samples is 0"),
        ({"num_samples": 2}, "all answers would be the same"),
        ({"choices": "c", "num_samples": 2, "sampling": Sampling()}, "must be 1 with EvalTask.choices"),
        ({"prompt": "{a"}, "cannot be read"),
        ({"prompt": "{a.b}"}, "names of keys"),
        ({"prompt": "{}"}, "names of keys"),
        ({"prompt": "{a:d}"}, "names of keys"),
        ({"prompt": "{a:{w}}"}, "names of keys"),
        ({"prompt": "{a!r}"}, "names of keys"),
        ({"choices": "c"}, "has exact_match, which is for texts"),
        ({"choices": "c", "metrics": (PassAtK(),)}, "has PassAtK, which is for texts"),
        ({"metrics": (choice_accuracy,)}, "has choice_accuracy, which is for choices"),
    ):
        with pytest.raises(UserError, match=why):
            EvalTask(**{"files": ("x",), "metrics": (exact_match,)} | fields)


def test_targets_are_looked_at_before_anything_is_answered(lines):
    path = lines({"prompt": "?", "target": "!"}, {"prompt": "?", "target": []})
    for metric, why in (
        ("exact_match", r"qa, example 1: the target \[\]"),
        ("PassAtK()", "qa, example 0: PassAtK needs"),
    ):
        config.parse([], [f"qa/EvalTask.files = ('{path}',)", f"qa/EvalTask.metrics = (@{metric},)"])
        with pytest.raises(UserError, match=why):
            evaluation_tasks.select([], None)
    config.parse([], [f"qa/EvalTask.files = ('{path}',)", "qa/EvalTask.metrics = (@exact_match,)"])
    tasks = evaluation_tasks.select([], 1)
    assert len(tasks[0].items) == 1 and evaluate.files_of(tasks) == [path]


def test_tasks_are_scopes(lines):
    path = lines({"prompt": "?", "target": "!"})
    bindings = [
        f"a/EvalTask.files = ('{path}',)", f"b/EvalTask.files = ('{path}',)", "EvalTask.metrics = (@exact_match,)",
        "b/EvalTask.prompt = 'So: {prompt}'", "EvalTask.sampling = @Sampling()", "Sampling.temperature = 0.0",
        "b/Sampling.max_new_tokens = 7", "exact_match.normalise = False",
    ]  # fmt: skip
    config.parse([], bindings)
    a, b = evaluation_tasks.select([], None)
    assert (a.name, b.name) == ("a", "b") and [b.items, a.items] == [[Item("So: ?", "!")], [Item("?", "!")]]
    assert (a.task.sampling.max_new_tokens, b.task.sampling.max_new_tokens) == (128, 7)
    assert a.task.metrics[0](["Yes"], ["yes"]) == {"exact_match": [0.0]}  # as it is bound
    assert [one.name for one in evaluation_tasks.select(["b"], None)] == ["b"]
    assert evaluation_tasks.select(["validation"], None) == [evaluate.Validation()]
    config.parse([], [*bindings, "bleu.tokenize = 'char'"])
    with pytest.raises(UserError, match="bleu.tokenize is bound but nothing uses it"):
        evaluation_tasks.select([], None)
    config.parse([], bindings)
    with pytest.raises(UserError, match="--task=validaton is not bound: did you mean validation?"):
        evaluation_tasks.select(["validaton"], None)
    config.parse([], [])
    assert evaluation_tasks.select([], None) == [evaluate.Validation()]
    with pytest.raises(UserError, match="no configurable named @exact_mach: did you mean exact_match?"):
        config.parse([], ["qa/EvalTask.metrics = (@exact_mach,)"])


@pytest.mark.parametrize("form", ["plain", "chat"])
def test_a_template_that_gin_sets_is_of_chats(lines, tmp_path, form):
    dataset = Dataset(source=StdlibSource(), vocabulary=TokenizerJsonVocabulary(path=str(tmp_path)), length=64)
    subject = types.SimpleNamespace(trainer=types.SimpleNamespace(dataset=dataset), template=None)
    path = lines({"prompt": "?", "target": "!"})
    task = [
        f"qa/EvalTask.files = ('{path}',)",
        "qa/EvalTask.metrics = (@exact_match,)",
        f"qa/EvalTask.format = '{form}'",
    ]
    config.parse([], [*task, "ChatTemplate.date = '2030-01-02'"])
    if form == "plain":
        with pytest.raises(UserError, match="ChatTemplate.date is bound but nothing uses it"):
            evaluation_tasks.select([], None, subject)
        assert subject.template is None
    else:
        evaluation_tasks.select([], None, subject)
        assert (subject.template.date, subject.template.tokenizer) == ("2030-01-02", str(tmp_path))


@pytest.mark.parametrize("metric, package", [("bleu", "sacrebleu"), ("rouge", "rouge_score")])
def test_what_a_metric_needs_is_said_before_anything_is_answered(lines, monkeypatch, metric, package):
    path = lines({"prompt": "?", "target": "!"})
    bindings = [f"qa/EvalTask.files = ('{path}',)", f"qa/EvalTask.metrics = (@{metric},)"]
    config.parse([], bindings)
    assert len(evaluation_tasks.select([], None)) == 1
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    config.parse([], bindings)
    with pytest.raises(UserError, match=rf'{package} is not installed .*: pip install -e "[^"]+\[evaluation\]"'):
        evaluation_tasks.select([], None)


def test_bleu_takes_one_text_an_example(lines):
    more = ["qa/EvalTask.num_samples = 2", "EvalTask.sampling = @Sampling()", "Sampling.temperature = 1.0"]
    path = lines({"prompt": "?", "target": "!"})
    config.parse([], [f"qa/EvalTask.files = ('{path}',)", "qa/EvalTask.metrics = (@bleu,)", *more])
    with pytest.raises(UserError, match="EvalTask.num_samples is 2: set it to 1"):
        evaluation_tasks.select([], None)


def test_a_metric_of_ones_own_is_a_function_in_a_module_beside_the_gin_file(lines, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.path", [*sys.path])
    path = lines({"prompt": "?", "target": "!"})
    (tmp_path / "metrics_of_mine.py").write_text(
        "from capibara.config import configurable\n\n"
        "@configurable\ndef longer(targets, predictions, than=1):\n"
        "    return {'longer': [len(text) > than for text in predictions]}\n"
    )
    (tmp_path / "mine.gin").write_text(
        f"import metrics_of_mine\nmine/EvalTask.files = ('{path}',)\nmine/EvalTask.metrics = (@longer,)\nlonger.than = 2\n"
    )
    config.parse(["mine.gin"], [], [tmp_path])
    [asked] = evaluation_tasks.select([], None)
    assert asked.task.metrics[0](["!"] * 2, ["abc", "ab"]) == {"longer": [True, False]}


READY = {
    "questions": ("QUESTIONS", {"question": "1+1?", "answer": ["2", "two"]}, "Question: 1+1?\nAnswer:"),
    "choices": ("CHOICES", {"question": "1+1?", "choices": ["1", "2"], "answer": "B"}, "Question: 1+1?\nAnswer:"),
    "humaneval": ("PROBLEMS", {"prompt": "def f", "test": "", "entry_point": "f", "task_id": "0"}, "def f"),
    "pairs": ("PAIRS", {"prompt": "1+1?", "chosen": "2", "rejected": "3", "subset": "x"}, ""),
    "ruler": ("RULER", {"question": "who?", "answer": "x", "document": "long"}, "who?"),
    "texts": ("TEXTS", {"source": "long", "target": "short"}, "long"),
}


@pytest.mark.parametrize("name", READY)
def test_the_ready_files_take_their_formats(lines, name):
    macro, record, prompt = READY[name]
    # retrieved.gin needs an index: tests/cli/composition/test_retrieving.py
    assert READY.keys() | {"retrieved"} == {
        path.stem for path in (config.search_folders()[-1] / "evaluation").glob("*.gin")
    }
    config.parse([f"evaluation/{name}.gin"], [f"{macro} = ('{lines(record)}',)"])
    [asked] = evaluation_tasks.select([], None)
    assert asked.name == name and asked.items[0].prompt == prompt
    if name == "humaneval":
        assert asked.task.num_samples == 10 and asked.task.sampling.temperature == 0.2
        config.parse([f"evaluation/{name}.gin"], [f"{macro} = ('{lines(record)}',)", "K = (1, 20)"])
        with pytest.raises(UserError, match="PassAtK.k has 20, must be at most EvalTask.num_samples .10."):
            evaluation_tasks.select([], None)
