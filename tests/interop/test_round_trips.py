"""Hugging Face folders converted to run folders and back: every file and every field is compared.

Each family twice: converted to a run folder and back, and fine-tuned with adapters in between.
"""

import dataclasses
import json
import pathlib

import jax
import ml_dtypes
import numpy as np
import pytest
import tokenizers
from safetensors import numpy as safetensors

from capibara import config
from capibara.cli import convert, train
from capibara.cli.composition.models import load_run
from capibara.core.types import UserError
from capibara.data.dataset import Dataset
from capibara.data.sources.sources import StdlibSource
from capibara.data.tokenizers import files as tokenizer_files
from capibara.data.tokenizers.vocabulary import ByteVocabulary, TokenizerJsonVocabulary
from capibara.interop import conversion, gin_of, open_model
from capibara.interop.hf import config as hf_config
from capibara.interop.hf import folder as hf_folder
from capibara.models import api
from capibara.multihost import exits
from capibara.training import run_folder
from capibara.training.run_folder import origin, own_tokenizer
from capibara.training.trainer import Trainer

HERE = pathlib.Path(__file__).resolve().parent
FOLDERS = json.loads((HERE / "folders.json").read_text())
CARD = '---\nlicense: other\nlicense_name: capy\nlanguage:\n- en\n- "no"\nmodel_name: Capy Tiny\n---\n\n# Capy\n'
# Fields that a folder gains, with their meaning: another name of the same, or a reader's default.
ROPE = {"rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "rotary_pct", "rotary_emb_base"}
SAME = ROPE | {"torch_dtype", "rope_local_base_freq", "layer_types", "sliding_window_pattern", "max_window_layers"}
OTHER_NAMES = {"dense_act_fn", "is_gated_act", "scale_decoder_outputs", "tie_word_embeddings"}  # T5's, renamed
# Defaults that no folder writes; other versions of transformers need them.
ADDED = {"attention_bias": False, "position_embedding_type": "absolute", "hidden_act": "gelu_pytorch_tanh"}
ADDED |= {"num_experts": 8, "decoder_start_token_id": 0}


def cases(quick):
    return [pytest.param(name, marks=() if name in quick else pytest.mark.heavy) for name in FOLDERS]


def run(verb, *argv):
    config.reset()
    try:
        assert exits.run_verb(verb.main, [str(arg) for arg in argv]) == 0
    finally:
        config.reset()


def tokenizer(folder):
    """A tokenizer of words with special tokens, as transformers writes one."""
    special = ["<pad>", "<s>", "</s>", "<unk>", "<|eot|>", "<|turn|>"]
    words = special + [f"w{i}" for i in range(90 - len(special))]
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.add_special_tokens(special)
    made.save(str(folder / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    (folder / "special_tokens_map.json").write_text(json.dumps(named))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(named | {"model_max_length": 77, "tokenizer_class": "X", "added_tokens_decoder": {}})
    )
    (folder / "chat_template.jinja").write_text("{{ messages }}")


def family(name, folder):
    """A folder of random weights in bfloat16, with every file that a folder can have."""
    values, rng = dict(FOLDERS[name]["config"]), np.random.default_rng(0)
    values |= {key: 0.05 for key in values if "drop" in key or key.endswith("pdrop")}
    ends = [2, 4, 5]
    values |= {"initializer_range": 0.013, "eos_token_id": ends, "dtype": "bfloat16", "_name_or_path": "org/Tiny"}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values))
    generation = {"bos_token_id": 1, "eos_token_id": ends, "temperature": 0.6, "top_p": 0.9, "do_sample": True}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    (folder / "README.md").write_text(CARD)
    (folder / "LICENSE").write_text("as you like")
    tokenizer(folder)
    tensors = {
        key: rng.normal(scale=0.3, size=shape).astype(ml_dtypes.bfloat16)
        for key, shape in FOLDERS[name]["shapes"].items()
    }
    safetensors.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return values


def differences(before, after):
    """Fields that differ between two config.json, except for other names of the same."""
    one, two = (hf_folder.HfFolder(str(folder)).config for folder in (before, after))
    assert hf_config.resolved(hf_config.from_hf(one)) == hf_config.resolved(hf_config.from_hf(two))
    names = (one.keys() | two.keys()) - SAME - (OTHER_NAMES if one["model_type"] == "t5" else set())
    found = {key: (one.get(key), two.get(key)) for key in names if one.get(key) != two.get(key)}
    return {key: pair for key, pair in found.items() if pair != (None, ADDED.get(key))}


def assert_same_files(before, after, other=()):
    ours, theirs = (
        {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".safetensors"}
        for folder in (after, before)
    )
    assert ours.keys() == theirs.keys()
    assert {name for name in ours if ours[name] != theirs[name]} - {"config.json"} == set(other)


@pytest.mark.parametrize("name", cases(("llama_llama3", "phi3", "t5_1_1")))
def test_a_folder_comes_back_from_a_run_folder(name, tmp_path):
    before, after = tmp_path / "before", tmp_path / "after"
    family(name, before)
    run(convert, f"--from={before}", f"--to={tmp_path}/run", "--format=capibara")
    run(convert, f"--from={tmp_path}/run", f"--to={after}")
    assert differences(before, after) == {}
    assert_same_files(before, after)
    one, two = (safetensors.load_file(folder / "model.safetensors") for folder in (before, after))
    assert one.keys() == two.keys() and all(np.array_equal(one[key], two[key]) for key in one)


# Models that read texts with masked spans need ids for the spans.
SPARE = dict.fromkeys((api.EncoderConfig, api.EncoderDecoderConfig), "TokenizerJsonVocabulary.extra_ids = 2\n")


def run_file(name, folder, path):
    """A run with adapters that uses a folder's tokenizer, and its configuration."""
    family(name, folder)
    values = hf_folder.HfFolder(str(folder)).config  # it reads whether T5 1.1 has a head
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix == ".json"}
    made = hf_config.from_hf(values, dtype="float32")
    path.write_text(
        f"{gin_of.run(made, str(folder), files, 16)}\n{type(made).__name__}.lora = @Lora()\nLora.rank = 2\n"
        "SampleText.prompts = ()\nTrainer.steps = 2\n" + SPARE.get(type(made), "")
    )
    return dataclasses.replace(made, lora=api.Lora(rank=2))


def assert_fine_tuned(before, after):
    assert differences(before, after) == {}
    assert_same_files(before, after, ["README.md"])
    assert "license_name: capy" in (card := (after / "README.md").read_text()) and "base_model: Capy Tiny" in card
    one, two = (safetensors.load_file(folder / "model.safetensors") for folder in (before, after))
    assert one.keys() == two.keys() and any(not np.array_equal(one[key], two[key]) for key in one)


@pytest.mark.heavy
@pytest.mark.parametrize("name", FOLDERS)
def test_a_fine_tuned_folder_is_what_it_was(name, tmp_path):
    """For a run that began from the folder, and for one that began from that run."""
    before, after, gin = tmp_path / "before", tmp_path / "after", tmp_path / "run.gin"
    run_file(name, before, gin)
    for start, end in (("before", "run"), ("run", "again")):
        changed = [f"Trainer.model_dir='{tmp_path}/{end}'", f"Trainer.init_from='{tmp_path}/{start}'"]
        run(train, f"--gin_file={gin}", *(f"--gin.{line}" for line in changed))
    run(convert, f"--from={tmp_path}/again", f"--to={after}")
    assert_fine_tuned(before, after)


@pytest.mark.heavy
def test_a_run_goes_on_with_the_adapter_of_another(tmp_path):
    before, gin = tmp_path / "before", tmp_path / "run.gin"
    run_file("llama", before, gin)
    adapters = []
    for start, end in (("before", "one"), ("one.peft", "two")):
        changed = [f"Trainer.model_dir='{tmp_path}/{end}'", f"Trainer.init_from='{tmp_path}/{start}'"]
        run(train, f"--gin_file={gin}", *(f"--gin.{line}" for line in changed))
        run(convert, f"--from={tmp_path}/{end}", f"--to={tmp_path}/{end}.peft", "--format=peft")
        about = json.loads((tmp_path / f"{end}.peft" / "adapter_config.json").read_text())
        assert about["base_model_name_or_path"] == str(before)
        adapters.append(safetensors.load_file(tmp_path / f"{end}.peft" / "adapter_model.safetensors"))
    one, two = adapters
    moved = {key: np.abs(two[key] - value).max() for key, value in one.items()}
    assert all(np.abs(value).max() > 0 for value in one.values())
    assert all(0 < by < 5e-3 for by in moved.values())  # a few small steps, not from anew


@pytest.mark.parametrize("name", ["phi3", "t5"])
def test_a_run_keeps_what_its_weights_came_with(name, tmp_path):
    """The same with untrained adapters."""
    before, after, gin = tmp_path / "before", tmp_path / "after", tmp_path / "run.gin"
    model = api.build(run_file(name, before, gin))
    params = jax.tree.map(lambda s: jax.numpy.full(s.shape, 0.1, s.dtype), model.abstract_params)
    for start, end in (("before", "run"), ("run", "again")):
        changed = [f"Trainer.model_dir='{tmp_path}/{end}'", f"Trainer.init_from='{tmp_path}/{start}'"]
        config.reset()
        config.parse([str(gin)], changed)
        trainer = config.build(Trainer)
        foreign = open_model.loader(trainer.init_from, model.plain) if start == "before" else None
        origin.keep(trainer, foreign)
        run_folder.save(trainer.model_dir, params, config.operative())
    run(convert, f"--from={tmp_path}/again", f"--to={after}")
    assert_fine_tuned(before, after)
    run(convert, f"--from={tmp_path}/again", f"--to={tmp_path}/adapter", "--format=peft")
    targets = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["target_modules"]
    assert ("qkv_proj" in targets) == (name == "phi3")
    beside, whole = tokenizer_files.carried(f"{tmp_path}/adapter"), tokenizer_files.carried(str(after))
    for files in (beside, whole):
        files.pop(tokenizer_files.GENERATION_FILE, None)  # T5's also names the decoder's first token beside a model
    assert beside == whole
    assert {*beside} & {"tokenizer.json", "spiece.model"}


def test_a_run_with_another_tokenizer_says_its_ids(tmp_path):
    folder, rng = tmp_path / "before", np.random.default_rng(0)
    values = family("llama", folder)
    model = api.build(hf_config.from_hf(values))
    params = jax.tree.map(lambda s: rng.standard_normal(s.shape, np.float32), model.abstract_params)
    dataset = Dataset(source=StdlibSource(), vocabulary=ByteVocabulary(), length=16)
    files = {"config.json": json.dumps(values).encode(), "LICENSE": b"mine"}
    made = conversion.of_run(model, params, dataset, files)
    assert (made.config["eos_token_id"], made.config["bos_token_id"], made.stored) == (1, 0, "bf16")
    assert made.config["attention_dropout"] == 0.05 and made.tokenizer == {} and made.about["LICENSE"] == b"mine"
    kept = conversion.of_run(model, params, dataset, files, trained=False)
    assert kept.config["eos_token_id"] == [2, 4, 5] and "README.md" not in kept.about


def test_every_end_token_of_a_folder_ends_a_text(tmp_path):
    family("llama", tmp_path / "hf")
    ends = lambda path: TokenizerJsonVocabulary(path=str(path)).end_ids  # noqa: E731
    assert ends(tmp_path / "hf") == ends(tmp_path / "hf" / "tokenizer.json") == (2, 4, 5)
    (tmp_path / "hf" / "generation_config.json").unlink()
    run(convert, f"--from={tmp_path}/hf", f"--to={tmp_path}/run", "--format=capibara")
    dataset = load_run(str(tmp_path / "run")).trainer.dataset
    assert dataset.get_vocabulary().end_ids == (2, 4, 5)  # which config.json says, too
    own_tokenizer.keep(dataset, str(tmp_path / "later"))
    assert TokenizerJsonVocabulary(path=str(tmp_path / "later")).end_ids == (2, 4, 5)
    (tmp_path / "hf" / "generation_config.json").write_text('{"eos_token_id": [5, 4000, -1]}')
    assert ends(tmp_path / "hf") == (2, 5)  # its own first; what is no id of the model ends nothing
    (tmp_path / "hf" / "generation_config.json").write_text('{"eos_token_id": "</s>"}')
    with pytest.raises(UserError, match="eos_token_id = .*</s>.* must be a token id or a list"):
        ends(tmp_path / "hf")
