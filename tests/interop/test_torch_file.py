"""State dicts as torch.save writes them: torch's own in torch_files.json, ours in its form, and refused ones.

torch_files.json has the same state dict in both forms of PyTorch 2.13 (zlib, base64), and its values; to make it anew, see
the names below: a tied pair, bfloat16, float16, a view with strides and an offset, a Parameter, a scalar, no values, int64.
"""

import base64
import io
import json
import os
import pathlib
import pickle
import pickletools
import zipfile
import zlib

import jax
import ml_dtypes
import numpy as np
import pytest

from capibara import config
from capibara.cli import convert
from capibara.core.types import UserError
from capibara.interop import open_model
from capibara.interop.hf import config as hf_config
from capibara.interop.hf import folder as hf_folder
from capibara.interop.hf import tables, torch_file
from capibara.models import api
from capibara.models.api import DecoderConfig, EncoderConfig, EncoderDecoderConfig
from capibara.multihost import exits

GOLDEN = json.loads((pathlib.Path(__file__).parent / "torch_files.json").read_text())
SIZES = dict(vocab_size=96, embed_dim=32, num_layers=2, num_heads=4, mlp_dim=48, dtype="float32")
MODELS = {
    "llama": DecoderConfig(**SIZES, norm_eps=1e-5, head="separate"),
    "qwen3": DecoderConfig(**SIZES, qk_norm="head"),
    "t5": EncoderDecoderConfig(**SIZES, activation="relu", head="tied"),
    "bert": EncoderConfig(**SIZES, max_length=40),
}


def golden(form, folder):
    path = folder / "pytorch_model.bin"
    path.write_bytes(zlib.decompress(base64.b64decode(GOLDEN[form])))
    return path


@pytest.mark.parametrize("form", ["zip", "legacy"])
def test_what_torch_wrote_is_read_to_the_bit(form, tmp_path):
    file = torch_file.TorchFile(str(golden(form, tmp_path)))
    assert file.keys() == list(GOLDEN["want"])
    for name, (dtype, shape, values) in GOLDEN["want"].items():
        assert file.get_slice(name).get_shape() == shape
        got = file.get_tensor(name)
        assert (got.dtype.name, list(got.shape)) == (dtype, shape)
        assert got.astype(np.float32).reshape(-1).tolist() == values


def tensors():
    rng = np.random.default_rng(0)
    drawn = {
        "a.weight": rng.standard_normal((3, 5), np.float32),
        "b.weight": rng.standard_normal((2, 3, 4), np.float32).astype(ml_dtypes.bfloat16),
        "c": rng.standard_normal(7, np.float32).astype(np.float16),
    }
    return drawn


def test_what_we_write_is_of_torchs_form_and_read_to_the_bit(tmp_path):
    path, drawn = str(tmp_path / "model.bin"), tensors()
    torch_file.save_torch(path, drawn, {"tied.weight": "a.weight"})
    file = torch_file.TorchFile(path)
    assert file.keys() == [*drawn, "tied.weight"]
    for name, value in {**drawn, "tied.weight": drawn["a.weight"]}.items():
        got = file.get_tensor(name)
        assert got.dtype == value.dtype
        np.testing.assert_array_equal(got, value)
    assert file.get_slice("tied.weight").storage.key == file.get_slice("a.weight").storage.key
    ours, theirs = (
        opcodes(content) for content in (pathlib.Path(path).read_bytes(), golden("zip", tmp_path).read_bytes())
    )
    assert ours <= theirs  # nothing is called or named but what torch.save does
    with zipfile.ZipFile(path) as archive:
        assert archive.read("archive/version") == b"3\n" and archive.read("archive/byteorder") == b"little"
        starts = [info.header_offset + 30 + len(info.filename) + len(info.extra) for info in archive.infolist()]
        assert {start % 64 for start in starts} == {0} and archive.testzip() is None


def opcodes(content):
    """The names in a file's pickle, with their modules."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("data.pkl"))
        return {arg for code, arg, _ in pickletools.genops(archive.read(name)) if code.name == "GLOBAL"}


class Evil:
    def __init__(self, call):
        self.call = call

    def __reduce__(self):
        return self.call


# {"a": a tensor [2, 2] in the storage 0}
TENSOR = (
    b"\x80\x02}(X\x01\x00\x00\x00actorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storagectorch\nFloatStorage\n"
    b"X\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x04tQK\x00(K\x02K\x02t(K\x02K\x01ttRu."
)


def zipped(content):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("archive/data.pkl", content)
    return out.getvalue()


@pytest.mark.parametrize("call", [(os.system, ("touch gone",)), (eval, ("open('gone', 'w')",)), (dict, ())], ids=str)
@pytest.mark.parametrize("around", [zipped, lambda content: content], ids=["zip", "plain"])
def test_a_pickle_is_never_run(call, around, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.bin").write_bytes(around(pickle.dumps({"a": Evil(call)}, protocol=2)))
    with pytest.raises(torch_file.Refused, match=f"would run .*{call[0].__name__}"):
        torch_file.TorchFile("model.bin")
    assert os.listdir() == ["model.bin"]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (zipped(pickle.dumps([1, 2])), "holds a list, must be a state dict"),
        (zipped(pickle.dumps({"model": {"a": 1}})), "it has 'model', a dict, must be only tensors"),
        (zipped(b"\x80\x02}q"), "."),
        (zipped(b"\x80\x02}r\xff\xff\xff\x0f."), "memo index 268435455"),
        (zipped(TENSOR.replace(b"(K\x02K\x02t", b"(K\x02t", 1)), "a tensor with 1 dimensions, 2 strides"),
        (b"PK\x03\x04 and no more", "not a zip file"),
        (b"", "."),
        (pickle.dumps(5), "no file of torch.save"),
    ],
)
def test_other_objects_than_state_dicts_are_refused(content, told, tmp_path):
    (tmp_path / "model.bin").write_bytes(content)
    with pytest.raises(torch_file.Refused, match=told) as error:
        torch_file.TorchFile(str(tmp_path / "model.bin"))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("form", ["zip", "legacy"])
def test_a_file_cut_anywhere_or_with_a_changed_byte_is_refused(form, tmp_path):
    path = golden(form, tmp_path)
    whole = path.read_bytes()
    for end in range(0, len(whole), 61):
        path.write_bytes(whole[:end])
        with pytest.raises(torch_file.Refused):
            read_all(path)
    if form == "zip":  # has checksums
        with zipfile.ZipFile(io.BytesIO(whole)) as archive:
            (info,) = (info for info in archive.infolist() if info.filename.endswith("data/0"))
            at = whole.index(archive.read(info))
        path.write_bytes(whole[: at + 5] + bytes([whole[at + 5] ^ 1]) + whole[at + 6 :])
        with pytest.raises(torch_file.Refused, match="CRC"):
            read_all(path)


def test_a_pickle_leaves_nothing_behind(tmp_path):
    build = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(N}(X\x04\x00\x00\x00evilK\x01utb."
    (tmp_path / "model.bin").write_bytes(zipped(build))
    with pytest.raises(torch_file.Refused, match="must be a state dict"):
        torch_file.TorchFile(str(tmp_path / "model.bin"))
    assert not hasattr(torch_file._rebuild, "evil")


@pytest.mark.parametrize(("damage", "told"), [("more", "has 17 bytes, its tensors have 16"), ("locked", "encrypted")])
def test_storages_that_cannot_be_read_are_refused(damage, told, tmp_path):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("archive/data.pkl", TENSOR)
        archive.writestr("archive/data/0", bytes(17 if damage == "more" else 16))
    content = bytearray(out.getvalue())
    if damage == "locked":
        content[content.rindex(b"PK\x01\x02") + 8] |= 1
        content[content.rindex(b"PK\x03\x04") + 6] |= 1
    (tmp_path / "model.bin").write_bytes(content)
    with pytest.raises(torch_file.Refused, match=told):
        read_all(tmp_path / "model.bin")


def read_all(path):
    file = torch_file.TorchFile(str(path))
    return [file.get_tensor(name) for name in file.keys()]


def run(*argv):
    config.reset()
    return exits.run_verb(convert.main, [str(arg) for arg in argv])


@pytest.mark.parametrize("name", MODELS)
def test_a_folder_goes_to_a_state_dict_and_back_to_the_bit(name, tmp_path):
    model = api.build(MODELS[name])
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda s: rng.standard_normal(s.shape, np.float32), model.abstract_params)
    values = hf_config.to_hf(model.config)
    shapes = open_model.hf_shapes(model, values["model_type"])
    drawn = dict(open_model.hf_tensors(params, model, values["model_type"]))
    hf_folder.save_hf(str(tmp_path / "hf"), values, shapes, drawn.items(), {}, dtype="float32")
    assert run(f"--from={tmp_path}/hf", f"--to={tmp_path}/torch", "--format=pytorch") == 0
    assert not list((tmp_path / "torch").glob("*.safetensors"))
    file = torch_file.TorchFile(str(tmp_path / "torch" / "pytorch_model.bin"))
    tied = tables.aliases(values["model_type"], shapes)
    assert set(file.keys()) == set(shapes) | set(tied) and bool(tied) == (name != "llama")
    assert run(f"--from={tmp_path}/torch", f"--to={tmp_path}/again") == 0
    files = [(tmp_path / folder / "model.safetensors").read_bytes() for folder in ("hf", "again")]
    assert files[0] == files[1]


def test_a_large_model_has_several_files_and_an_index(tmp_path):
    model = api.build(MODELS["qwen3"])
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda s: rng.standard_normal(s.shape, np.float32), model.abstract_params)
    shapes, values = open_model.hf_shapes(model, "qwen3"), hf_config.to_hf(model.config)
    drawn = dict(open_model.hf_tensors(params, model, "qwen3"))
    how = dict(dtype="float32", shard_bytes=20_000, state_dict=True)
    hf_folder.save_hf(str(tmp_path / "model"), values, shapes, drawn.items(), {}, **how)
    index = json.loads((tmp_path / "model" / "pytorch_model.bin.index.json").read_text())["weight_map"]
    assert len(set(index.values())) > 3 and set(index) == {*shapes, "lm_head.weight"}
    assert index["lm_head.weight"] == index["model.embed_tokens.weight"]
    foreign = open_model.open_model(str(tmp_path / "model"))
    assert all(np.array_equal(foreign.read(name), drawn[name]) for name in shapes)
    os.unlink(tmp_path / "model" / index["model.norm.weight"])
    with pytest.raises(UserError, match="is missing, the index names it"):
        open_model.open_model(str(tmp_path / "model"))
