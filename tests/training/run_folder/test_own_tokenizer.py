"""A run folder carries its tokenizer: copied once, compared later, and taken where the first is gone."""

from __future__ import annotations

import json
import os
import shutil

import pytest

from capibara.cli import train
from capibara.core.types import UserError
from capibara.data.chat.conversations import ChatJsonlSource
from capibara.data.chat.formats import Conversation
from capibara.data.chat.template import ChatTemplate
from capibara.data.dataset import Dataset
from capibara.data.sources.sources import StdlibSource
from capibara.data.tokenizers.vocabulary import ByteVocabulary, SentencePieceVocabulary, TokenizerJsonVocabulary
from capibara.models.api import DecoderConfig
from capibara.optim import Optimizer
from capibara.sharding import Plan
from capibara.training.run_folder import own_tokenizer
from capibara.training.trainer import Trainer

TALK = Conversation([{"role": "user", "content": "Hi"}])


@pytest.fixture
def folder(toy_tokenizer, tmp_path):
    """A tokenizer that may go."""
    return shutil.copytree(toy_tokenizer, tmp_path / "tokenizer_of_mine")


@pytest.fixture
def run(tmp_path):
    return str(tmp_path / "run")


def chats(path, template=None):
    source = ChatJsonlSource(files=("a.jsonl",), template=ChatTemplate(tokenizer=str(path), template=template))
    end = "<|end|>" if str(path).endswith(".json") else None  # which the folder says, and a file does not
    return Dataset(source=source, vocabulary=TokenizerJsonVocabulary(path=str(path), eos_token=end), length=64)


def texts(vocabulary):
    return Dataset(source=StdlibSource(), vocabulary=vocabulary, length=64)


def trainer_of(dataset, run):
    small = DecoderConfig(vocab_size=384, embed_dim=32, num_layers=1, num_heads=2, mlp_dim=64)
    return Trainer(model_dir=run, steps=1, model=small, plan=Plan(batch_size=8), optimizer=Optimizer(), dataset=dataset)


def moved(dataset, run):
    """The data of the run when its folder is elsewhere."""
    if not os.path.exists(f"{run}_moved"):
        shutil.move(run, f"{run}_moved")
    return own_tokenizer.of_run(trainer_of(dataset, run), f"{run}_moved").dataset


def trained(dataset, run):
    """The data of the run when it is trained."""
    return own_tokenizer.of_run(trainer_of(dataset, run)).dataset


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_a_moved_run_has_its_tokenizer_and_template(folder, run, kind):
    path = folder if kind == "folder" else folder / "mine.json"
    if kind == "file":
        os.rename(folder / "tokenizer.json", path)
    dataset = chats(path)
    said, ids = dataset.source.template.render(TALK, "a:1").text, dataset.vocabulary.encode_rendered("<|turn|>é<|end|>")
    prints = dataset.vocabulary.fingerprint(), dataset.source.template.fingerprint()
    own_tokenizer.keep(dataset, run)
    assert trained(dataset, run) is dataset  # the first is still there, and training reads it
    assert moved(dataset, run).vocabulary.path.startswith(f"{run}_moved/")  # what was learnt is read with its own
    shutil.rmtree(folder)
    own = moved(chats(path), run)
    place = f"{run}_moved/tokenizer" + ("/tokenizer.json" if kind == "file" else "")
    assert own.vocabulary.path == own.source.template.tokenizer == place
    assert own.source.template.render(TALK, "a:1").text == said
    assert own.vocabulary.encode_rendered("<|turn|>é<|end|>")[0].tolist() == ids[0].tolist()
    assert (own.vocabulary.fingerprint(), own.source.template.fingerprint()) == prints  # a resume finds no difference
    other = chats(folder / "another")  # what the user names now, and is not there, is not the run's
    assert moved(other, run) == other


def test_train_reads_the_copy_if_the_original_is_gone(folder, run, capsys):
    own_tokenizer.keep(texts(TokenizerJsonVocabulary(path=str(folder))), run)
    shutil.rmtree(folder)
    bindings = {"Dataset.vocabulary": "@TokenizerJsonVocabulary()", "TokenizerJsonVocabulary.path": repr(str(folder))}
    argv = [f"--gin_file={file}" for file in ("models/tiny.gin", "tasks/stdlib.gin", "runs/pretrain.gin")]
    argv += [f"--gin.MODEL_DIR={run}", "--gin.TRAIN_STEPS=1", "--emulate=8", "--check"]
    assert train.main([*argv, *(f"--gin.{name}={value}" for name, value in bindings.items())]) == 0
    assert "checked data: first batch made" in capsys.readouterr().out


def test_a_run_folder_is_a_tokenizer(folder, run):
    template = folder.parent / "mine.jinja"
    template.write_text("mine {{ messages[0].content }}")
    own_tokenizer.keep(chats(folder, str(template)), run)
    vocabulary, chat = TokenizerJsonVocabulary(path=run), ChatTemplate(tokenizer=run)
    assert vocabulary.fingerprint() == TokenizerJsonVocabulary(path=str(folder)).fingerprint()
    assert chat.render(TALK, "a:1").text == "mine Hi"  # the template that it was trained with
    shutil.rmtree(folder)
    template.unlink()
    assert moved(chats(folder, str(template)), run).source.template.render(TALK, "a:1").text == "mine Hi"


def test_a_sentencepiece_model_goes_along(tmp_path, run):
    import sentencepiece

    path = tmp_path / "some.model"
    lines = iter(["the river and the grass", "a capybara swims"] * 20)
    with open(path, "wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=lines, model_writer=file, vocab_size=24, minloglevel=2, pad_id=3
        )
    vocabulary = SentencePieceVocabulary(path=str(path))
    own_tokenizer.keep(texts(vocabulary), run)
    expected = vocabulary.encode("the river"), vocabulary.fingerprint()
    path.unlink()
    for own in (moved(texts(vocabulary), run).vocabulary, SentencePieceVocabulary(path=f"{run}_moved")):
        fresh = SentencePieceVocabulary(path=own.path)  # nothing was cached
        assert (fresh.encode("the river"), fresh.fingerprint()) == expected
    with pytest.raises(UserError, match="TokenizerJsonVocabulary.path .*tokenizer.json.* does not exist"):
        TokenizerJsonVocabulary(path=f"{run}_moved").encode("x")


def test_it_is_copied_once_and_a_change_is_refused(folder, run):
    own_tokenizer.keep(texts(ByteVocabulary()), run)
    assert not os.path.exists(run)
    dataset = chats(folder)
    own_tokenizer.keep(dataset, run)
    first = {name: os.stat(f"{run}/tokenizer/{name}").st_mtime_ns for name in os.listdir(f"{run}/tokenizer")}
    assert first.keys() == {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    (folder / "chat_template.jinja").write_text("another")
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(UserError, match="this run started .tokenizer_config.json, chat_template.jinja differs from"):
        own_tokenizer.keep(dataset, run)
    assert {name: os.stat(f"{run}/tokenizer/{name}").st_mtime_ns for name in os.listdir(f"{run}/tokenizer")} == first
    elsewhere = shutil.copytree(f"{run}/tokenizer", folder.parent / "elsewhere")  # the same under another name
    own_tokenizer.keep(chats(elsewhere), run)
    assert json.loads(open(f"{run}/paths.json").read()) == {str(folder): "tokenizer", str(elsewhere): "tokenizer"}


def test_a_copy_that_was_not_finished_is_made_again(folder, run):
    own_tokenizer.keep(chats(folder), run)
    os.unlink(f"{run}/paths.json")
    open(f"{run}/tokenizer/tokenizer.json", "w").close()
    own_tokenizer.keep(chats(folder), run)
    assert open(f"{run}/tokenizer/tokenizer.json").read() == (folder / "tokenizer.json").read_text()
    for spoilt in ("[1", "[1]", "[]", '{"a": 1}', "\0", '{"a": "../../b"}', '{"a": "/b"}', "[" * 100_000):
        open(f"{run}/paths.json", "w").write(spoilt)
        with pytest.raises(UserError, match="paths.json cannot be read"):
            own_tokenizer.keep(chats(folder), run)
