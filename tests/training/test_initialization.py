"""Where the parameters that a run begins from are looked for."""

from __future__ import annotations

import types

from capibara.checkpoints import manifest
from capibara.training import initialization
from capibara.training.base.options import InitWith


def trainer_of(init_from, own):
    return types.SimpleNamespace(init_from=init_from, init_with=InitWith.WEIGHTS, model_dir=str(own), seed=0)


def test_run_folders_are_read_by_ourselves_and_other_models_by_what_is_given(tmp_path):
    def load(path, model, merge):
        assert path == str(tmp_path / "model.gguf")
        return "a reader"

    (tmp_path / "base" / "checkpoints").mkdir(parents=True)
    (tmp_path / "own" / "checkpoints" / "3").mkdir(parents=True)
    (tmp_path / "own" / "checkpoints" / "3" / manifest.NAME).touch()
    for init_from, want in ((None, None), (tmp_path / "base", None), (tmp_path / "model.gguf", "a reader")):
        trainer = trainer_of(init_from and str(init_from), tmp_path / "new")
        assert initialization.reader(trainer, None, load) == initialization.reader_again(trainer, None, load) == want
        trainer = trainer_of(init_from and str(init_from), tmp_path / "own")
        assert (
            initialization.reader(trainer, None, load) is None
            and initialization.reader_again(trainer, None, load) == want
        )


def test_a_reference_is_read_as_the_run_was_begun(tmp_path, monkeypatch):
    (tmp_path / "base" / "checkpoints").mkdir(parents=True)
    seen = []
    monkeypatch.setattr(initialization, "load_params", lambda trainer, model, mesh, read: seen.append(read))
    for name in ("base", "model.gguf"):
        trainer = trainer_of(str(tmp_path / name), tmp_path / "own")
        initialization.initial_params(
            trainer,
            None,
            None,
            lambda path, model, merge: "a reader",
            lambda key, pretrained: types.SimpleNamespace(params=pretrained),
        )
    assert seen == [None, "a reader"]
