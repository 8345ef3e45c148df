"""launch/Dockerfile without a daemon: instructions that Docker has, files that are there, and a shell line that installs what it says."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys
import tomllib

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
LINES = (ROOT / "launch" / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
COMMENTS = "\n".join(line for line in LINES if line.startswith("#"))
INSTRUCTIONS = [tuple(line.split(maxsplit=1)) for line in LINES if line.strip() and not line.startswith("#")]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# TPUs, by default; and what the comments say for others.
EXTRAS = [dict(INSTRUCTIONS)["ARG"].partition("=")[2], *re.findall(r"--build-arg=EXTRAS=((?:\w+,)*\w+)", COMMENTS)]


def test_it_has_the_instructions_of_an_image_in_their_order():
    assert [name for name, _ in INSTRUCTIONS] == ["FROM", "ARG", "COPY", "RUN", "CMD"]


def test_its_python_is_one_that_the_pins_are_for():
    image, tag = dict(INSTRUCTIONS)["FROM"].split(":")
    assert image == "python" and re.fullmatch(r"3\.1[123]-slim", tag)


def test_there_is_an_image_for_tpus_gpus_and_cpus():
    assert [extras.split(",")[0] for extras in EXTRAS] == ["tpu", "gpu", "gcs"]
    known = {*PROJECT["optional-dependencies"]}
    assert all({*extras.split(",")} <= known for extras in EXTRAS)


def test_what_is_copied_is_what_make_wheel_makes():
    pattern, target = dict(INSTRUCTIONS)["COPY"].split()
    assert pattern == f"dist/{PROJECT['name'].replace('-', '_')}-*.whl" and target == "/wheels/"
    assert "make wheel" in COMMENTS and re.search(r"docker build -f launch/Dockerfile .* \.$", COMMENTS, re.MULTILINE)


@pytest.mark.parametrize("extras", EXTRAS)
def test_the_shell_installs_the_wheel_with_its_extras(extras, tmp_path):
    """The line as /bin/sh runs it, with a pip that writes down what it is asked for."""
    (tmp_path / "wheels").mkdir()
    wheel = tmp_path / "wheels" / "capibara_tpu-0.1.0-py3-none-any.whl"
    wheel.write_bytes(b"")
    (tmp_path / "bin").mkdir()
    pip = tmp_path / "bin" / "pip"
    pip.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {tmp_path}/asked\n')
    pip.chmod(0o755)
    line = dict(INSTRUCTIONS)["RUN"].replace("/wheels", str(tmp_path / "wheels"))
    environment = os.environ | {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "EXTRAS": extras}
    subprocess.run(["sh", "-c", line], check=True, env=environment)
    assert (tmp_path / "asked").read_text().split() == ["install", "--no-cache-dir", f"{wheel}[{extras}]"]
    assert not wheel.exists()


def test_its_command_lists_the_verbs():
    command = re.findall(r'"([^"]+)"', dict(INSTRUCTIONS)["CMD"])
    assert command[0] == "python"
    done = subprocess.run([sys.executable, *command[1:]], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and "train" in done.stdout
