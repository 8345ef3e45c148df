"""What is installed: the wheel carries the Gin files, and our gin/ folder never shadows the gin library."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile

import pytest

CHECKOUT = pathlib.Path(__file__).resolve().parent.parent
GIN_FILES = sorted(str(path.relative_to(CHECKOUT / "gin")) for path in (CHECKOUT / "gin").rglob("*.gin"))


def python(*args: str, cwd: pathlib.Path, **env: str) -> subprocess.CompletedProcess:
    """Runs this interpreter in `cwd`, which is first on its path where `args` start with -c or -m."""
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | env
    return subprocess.run([sys.executable, *args], cwd=cwd, env=clean, capture_output=True, text=True)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> pathlib.Path:
    """The wheel, built offline, from a copy so that nothing is left in the checkout."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in ("capibara", "gin", "launch"):
        shutil.copytree(CHECKOUT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", ".gitignore"):  # hatchling leaves out what git ignores
        shutil.copy(CHECKOUT / name, source)
    done = python("-m", "hatchling", "build", "-t", "wheel", "-d", str(target), cwd=source)
    assert done.returncode == 0, done.stderr
    (built,) = target.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> pathlib.Path:
    """A site-packages folder that holds the wheel's files, in the place that an installer gives them."""
    site = tmp_path_factory.mktemp("installed") / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    return site


def test_the_wheel_holds_the_code_and_the_gin_files(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {"capibara/__init__.py", "capibara/config/__init__.py", "capibara/launch_files/xm_launch.py"} <= {*names}
    assert GIN_FILES
    assert sorted(name for name in names if name.endswith(".gin")) == [f"capibara/gin_files/{n}" for n in GIN_FILES]
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"capibara"}
    assert not [name for name in names if name.startswith("capibara/gin/")]


def test_the_wheel_describes_itself(wheel):
    archive = zipfile.ZipFile(wheel)
    (metadata,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    text = archive.read(metadata).decode()
    extras = set(re.findall(r"^Provides-Extra: (\w+)", text, re.MULTILINE))
    assert {"tpu", "gpu", "hf", "seqio", "dashboard", "dev"} <= extras
    assert "Requires-Python: >=3.11" in text
    (scripts,) = [name for name in archive.namelist() if name.endswith("entry_points.txt")]
    assert "capibara = capibara.__main__:main" in archive.read(scripts).decode()


def test_the_installed_package_finds_its_gin_files_outside_the_checkout(installed, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    code = f"from capibara import config\nfor n in {GIN_FILES}: print(config.find_file(n, config.search_folders()))"
    done = python("-c", code, cwd=tmp_path / "elsewhere", PYTHONPATH=str(installed))
    assert done.stdout.splitlines() == [str(installed / "capibara/gin_files" / n) for n in GIN_FILES], done.stderr


def test_the_installed_train_verb_reads_a_gin_file_outside_the_checkout(installed, tmp_path):
    """The file is found and parsed: the first complaint is about the name that the command line got wrong."""
    (tmp_path / "elsewhere").mkdir()
    arguments = ["-m", "capibara.train", "--gin_file=base_v5e64.gin", "--gin.TRAIN_STEPSS=3"]
    done = python(*arguments, cwd=tmp_path / "elsewhere", PYTHONPATH=str(installed))
    assert done.returncode == 2
    assert done.stderr == "error: --gin.TRAIN_STEPSS: no Gin file uses TRAIN_STEPSS: did you mean TRAIN_STEPS?\n"


class TestGinIsTheLibrary:
    """`import gin` in a folder that has a gin/ of Gin files, which Python takes for a namespace package."""

    def test_from_the_checkout(self):
        assert not list((CHECKOUT / "gin").rglob("*.py"))
        done = python("-c", "import gin; print(gin.__file__); gin.parse_config('')", cwd=CHECKOUT)
        assert done.returncode == 0, done.stderr
        assert not done.stdout.startswith(str(CHECKOUT / "gin"))

    def test_from_the_checkout_first_on_the_path_twice(self):
        code = "import sys; sys.path.insert(0, sys.path[0]); from capibara.config import registry; print(registry.gin.__file__)"
        done = python("-c", code, cwd=CHECKOUT, PYTHONPATH=str(CHECKOUT))
        assert done.returncode == 0, done.stderr

    def test_without_the_library_the_message_says_so(self):
        # -S leaves out site-packages, so that the folder is all that `import gin` finds.
        done = python("-S", "-c", "import capibara.config", cwd=CHECKOUT)
        assert done.returncode != 0
        assert done.stderr.strip().endswith("found a folder named gin; run: pip install gin-config")


def pins(name: str) -> dict[tuple[str, str], str]:
    """(package, marker) -> version of each line of a lock."""
    lines = [line for line in (CHECKOUT / name).read_text().splitlines() if not line.startswith("#")]
    found = {}
    for line in lines:
        requirement, _, marker = line.partition(" ; ")
        package, version = requirement.split("==")
        found[package.lower(), marker] = version
    assert len(found) == len(lines)
    return found


class TestLock:
    PROJECT = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]

    @pytest.mark.parametrize("name", ["requirements.lock", "requirements-base.lock"])
    def test_names_no_registry(self, name):
        lines = (CHECKOUT / name).read_text().splitlines()
        assert not [line for line in lines if re.search(r"://|--(index|extra-index|find-links)| @ ", line)]

    def test_pins_all_that_the_project_asks_for(self):
        extras = self.PROJECT["optional-dependencies"]
        for name, more in (("requirements.lock", ("seqio", "dev", "docs")), ("requirements-base.lock", ("gguf",))):
            wanted = [*self.PROJECT["dependencies"], *(item for extra in more for item in extras[extra])]
            pinned = {package for package, _ in pins(name)}
            assert {re.match(r"[\w-]+", text)[0].lower() for text in wanted} <= pinned, name

    def test_the_base_has_the_versions_of_the_whole_and_no_package_of_tests(self):
        base, whole = pins("requirements-base.lock"), pins("requirements.lock")
        versions = {(package, version) for (package, _), version in whole.items()}
        assert not [item for item in base if (item[0], base[item]) not in versions]
        packages = {package for package, _ in base}
        assert "hatchling" in packages and len(packages) < len({package for package, _ in whole}) / 3
        assert not packages & {"libtpu", "tensorflow", "pytest", "datasets", "pyarrow", "fastapi", "torch"}
