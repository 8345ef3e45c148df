"""The files of a job: which they are, that they are what was staged, and that nothing else is used."""

import hashlib
import pathlib

import pytest

from capibara import config
from capibara.core import user_modules
from capibara.core.types import UserError
from capibara.jobs import bundle


@pytest.fixture
def cwd(tmp_path, monkeypatch):
    folder = tmp_path / "cwd"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def collected(gin_files, search_paths=(), wheel=None):
    read = config.parse(gin_files, (), search_paths)
    return bundle.collect(gin_files, read, search_paths, user_modules.files_of(config.imported_modules()), wheel)


def test_the_users_files_are_staged_where_they_are_found_again(cwd, tmp_path, monkeypatch):
    other = tmp_path / "other"
    (cwd / "sub").mkdir()
    other.mkdir()
    (cwd / "run.gin").write_text('include "models/tiny.gin"\ninclude "sub/a.gin"\ninclude "b.gin"\nA = 1\n')
    (cwd / "sub" / "a.gin").write_text("B = 1\n")
    (other / "b.gin").write_text("C = 1\n")
    sources = collected(["run.gin"], [str(other)])
    assert [*sources.paths] == ["gin/0/run.gin", "gin/0/sub/a.gin", "gin/1/b.gin"]  # capibara's own are where they were
    made = bundle.describe(sources, "run", str(tmp_path / "store"))
    bundle.stage(made, sources)
    there = tmp_path / "there"
    written = bundle.sums(made.files)
    bundle.unpack(made.url, hashlib.sha256(written).hexdigest(), there)
    monkeypatch.chdir(there / "gin" / "0")
    read = config.parse(["run.gin"], (), ["../1"])
    own = [path.resolve() for path in read if path.resolve().is_relative_to(there)]
    assert [str(path.relative_to(there)) for path in own] == [*sources.paths]


def test_a_module_that_a_gin_file_imports_is_staged(cwd, monkeypatch):
    (cwd / "burrow_of_jobs").mkdir()
    (cwd / "burrow_of_jobs" / "__init__.py").write_text("from burrow_of_jobs import deep\n")
    (cwd / "burrow_of_jobs" / "deep.py").write_text("import beside_of_jobs\n")
    (cwd / "beside_of_jobs.py").write_text("")
    (cwd / "not_imported.py").write_text("")
    (cwd / "run.gin").write_text("import burrow_of_jobs\n")
    monkeypatch.syspath_prepend(str(cwd))
    sources = collected(["run.gin"])
    assert [*sources.paths] == [
        "gin/0/beside_of_jobs.py",
        "gin/0/burrow_of_jobs/__init__.py",
        "gin/0/burrow_of_jobs/deep.py",
        "gin/0/run.gin",
    ]


def test_the_folder_is_named_after_the_content(cwd, tmp_path):
    (cwd / "run.gin").write_text("A = 1\n")
    sources = collected(["run.gin"])
    first = bundle.describe(sources, "run", "gs://bucket/jobs/")
    assert first.url.startswith("gs://bucket/jobs/run/") and len(first.url.rpartition("/")[2]) == 16
    assert bundle.describe(sources, "run", "gs://bucket/jobs") == first
    (cwd / "run.gin").write_text("A = 2\n")
    assert bundle.describe(sources, "run", "gs://bucket/jobs").url != first.url


def test_a_file_from_elsewhere_is_refused(cwd, tmp_path):
    (tmp_path / "far.gin").write_text("A = 1\n")
    (cwd / "run.gin").write_text(f'include "{tmp_path}/far.gin"\n')
    with pytest.raises(
        UserError, match=f"far.gin lies outside the working directory .*add --gin_search_paths={tmp_path}"
    ):
        collected(["run.gin"])


@pytest.mark.parametrize(
    ("name", "search_paths", "place", "there"),
    [
        ("run.gin", [], "gin/0/run.gin", "run.gin"),
        ("{cwd}/run.gin", [], "gin/0/run.gin", "run.gin"),
        ("sub/s.gin", ["sub"], "gin/0/sub/s.gin", "sub/s.gin"),
        ("s.gin", ["sub"], "gin/0/sub/s.gin", "sub/s.gin"),
        ("link.gin", [], "gin/0/link.gin", "link.gin"),
        ("../outer.gin", [".."], "gin/1/outer.gin", "../1/outer.gin"),
        ("{cwd}/../outer.gin", [".."], "gin/1/outer.gin", "../1/outer.gin"),
        ("quickstart.gin", [], None, "quickstart.gin"),
        ("{shipped}/runs/pretrain.gin", [], None, "runs/pretrain.gin"),
    ],
)
def test_a_file_has_a_name_by_which_a_host_finds_it(cwd, name, search_paths, place, there):
    (cwd / "sub").mkdir()
    for path in (cwd / "run.gin", cwd / "sub" / "s.gin", cwd.parent / "outer.gin"):
        path.write_text("A = 1\n")
    (cwd / "link.gin").symlink_to("sub/s.gin")
    name = name.format(cwd=cwd, shipped=config.search_folders()[-1].resolve())
    sources = collected([name], search_paths)
    assert [*sources.paths] == ([] if place is None else [place]) and [*sources.gin_files] == [there]
    bundle.check(sources, lambda files, folders: config.parse(files, (), folders))


def test_an_include_that_a_host_would_not_find_is_an_error_before_anything_is_staged(cwd):
    (cwd.parent / "outer.gin").write_text("A = 1\n")
    (cwd / "run.gin").write_text('include "../outer.gin"\n')
    sources = collected(["run.gin"], [".."])
    with pytest.raises(UserError, match="on a host of the job the Gin files would not be found: .*outer.gin"):
        bundle.check(sources, lambda files, folders: config.parse(files, (), folders))
    assert pathlib.Path.cwd() == cwd


def test_a_file_that_would_take_the_place_of_another(cwd, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (cwd / "run.gin").write_text("A = 1\n")
    (other / "run.gin").write_text("A = 2\n")
    (other / "b.gin").write_text('include "run.gin"\n')  # that of the working directory comes first
    sources = collected(["b.gin"], [str(other)])
    assert [*sources.paths] == ["gin/0/run.gin", "gin/1/b.gin"]
    bundle.check(sources, lambda files, folders: config.parse(files, (), folders))


@pytest.mark.parametrize(
    "name",
    ["capibara_tpu.whl", "other-1.0-py3-none-any.whl", "capibara-1.0-py3-none-any.whl", "capibara_tpu-1.0.tar.gz"],
)
def test_a_wheel_that_is_none(cwd, name):
    (cwd / "run.gin").write_text("A = 1\n")
    (cwd / name).write_text("")
    with pytest.raises(UserError, match="must be a wheel of capibara"):
        collected(["run.gin"], wheel=str(cwd / name))


@pytest.fixture
def staged(cwd, tmp_path):
    (cwd / "run.gin").write_text("A = 1\n")
    sources = collected(["run.gin"])
    made = bundle.describe(sources, "run", str(tmp_path / "store"))
    bundle.stage(made, sources)
    return made, hashlib.sha256(bundle.sums(made.files)).hexdigest()


@pytest.mark.parametrize("which", ["gin/0/run.gin", bundle.SUMS])
def test_a_file_that_was_changed_where_it_is_stored_is_not_used(staged, tmp_path, which):
    made, digest = staged
    file = pathlib.Path(made.url) / which
    file.write_text(file.read_text().replace("1", "2", 1))
    with pytest.raises(UserError, match="launch (it|the job) again"):
        bundle.unpack(made.url, digest, tmp_path / "there")
    assert not (tmp_path / "there" / "gin" / "0" / "run.gin").exists()


def test_a_bundle_does_not_write_outside_its_folder(tmp_path):
    folder = tmp_path / "store"
    folder.mkdir()
    (folder / "evil.py").write_text("")
    sums = f"{hashlib.sha256(b'').hexdigest()}  ../evil.py\n"
    (folder / bundle.SUMS).write_text(sums)
    with pytest.raises(UserError, match="lies outside the bundle"):
        bundle.unpack(str(folder), hashlib.sha256(sums.encode()).hexdigest(), tmp_path / "a" / "there")
    assert not (tmp_path / "a" / "evil.py").exists()


def test_what_was_changed_in_the_storage_is_mended_when_the_job_is_launched_again(cwd, tmp_path):
    (cwd / "run.gin").write_text("A = 1\n")
    sources = collected(["run.gin"])
    made = bundle.describe(sources, "run", str(tmp_path / "store"))
    bundle.stage(made, sources)
    file = pathlib.Path(made.url) / "gin" / "0" / "run.gin"
    for change in (lambda: file.write_text("A = 2\n"), file.unlink):
        change()
        bundle.stage(made, sources)
        assert file.read_text() == "A = 1\n"


def test_a_storage_that_cannot_be_written_and_a_bundle_that_is_not_there(cwd, tmp_path):
    (cwd / "run.gin").write_text("A = 1\n")
    (tmp_path / "file").write_text("")
    sources = collected(["run.gin"])
    with pytest.raises(UserError, match="cannot be written .*: name another --storage"):
        bundle.stage(bundle.describe(sources, "run", str(tmp_path / "file")), sources)
    with pytest.raises(UserError, match="is not whole"):
        bundle.unpack(str(tmp_path / "none"), "0", tmp_path / "there")


def test_a_name_that_would_be_two_lines_of_the_sums(cwd):
    (cwd / "a\nb.gin").write_text("A = 1\n")
    with pytest.raises(UserError, match="must be printable: rename it"):
        collected(["a\nb.gin"])


def test_a_file_that_changes_while_it_is_staged(cwd, tmp_path):
    (cwd / "run.gin").write_text("A = 1\n")
    sources = collected(["run.gin"])
    made = bundle.describe(sources, "run", str(tmp_path / "store"))
    (cwd / "run.gin").write_text("A = 2\n")
    with pytest.raises(UserError, match="has changed while it was staged"):
        bundle.stage(made, sources)
    assert not (pathlib.Path(made.url) / bundle.SUMS).exists()


def test_a_bundle_in_a_bucket(gs, cwd, tmp_path):
    (cwd / "run.gin").write_text("A = 1\n")
    sources = collected(["run.gin"])
    made = bundle.describe(sources, "run", "gs://bucket/jobs")
    bundle.stage(made, sources)
    bundle.stage(made, sources)  # the same files again: nothing to do
    bundle.unpack(made.url, hashlib.sha256(bundle.sums(made.files)).hexdigest(), tmp_path / "there")
    assert (tmp_path / "there" / "gin" / "0" / "run.gin").read_text() == "A = 1\n"
