"""What jobs on hosts with SSH ask for, and what is refused before anything is staged."""

import pathlib
import sys

import pytest

from capibara.cli import launch
from capibara.core.types import UserError
from capibara.jobs.backends.ssh import Ssh
from capibara.jobs.secrets import Secret, Source
from capibara.multihost import exits

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))
from job_specs import job  # noqa: E402


def text_of(slice_="2xh100-8", *, hosts="gpu0,gpu1", fields=None, **more):
    return Ssh(hosts=hosts, **(fields or {})).render(job(slice_, **{"image": None, **more})).text()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hosts": "gpu0,gpu1,gpu0"}, "--hosts names gpu0 twice"),
        ({"hosts": "gpu0, gpu1"}, "--hosts: ' gpu1' must be an alias of ssh"),
        ({"hosts": "-oProxyCommand=touch x"}, "--hosts: '-oProxyCommand=touch x' must be"),
        ({"hosts": "me@-x"}, "must be an alias"),
        ({"hosts": "gpu0:22"}, "must be an alias"),
        ({"hosts": ""}, "must be an alias"),
        ({"folder": "jobs"}, "--folder='jobs' must begin with / or ~/"),
        ({"folder": "/a\nb"}, "--folder"),
        ({"python": ""}, "--python='' must be the path of a python"),
        ({"coordinator": "gpu0:8476"}, "without a port"),
        ({"port_of_coordinator": 0}, "--port_of_coordinator is 0, must be from 1 to 65535"),
        ({"known_hosts": 'a"b'}, "--known_hosts=.* must be a path without quotes"),
    ],
)
def test_fields_that_name_no_hosts(fields, message):
    with pytest.raises(UserError, match=message):
        Ssh(**fields)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"slice_": "h100-8"}, "--hosts=gpu0,gpu1 has 2 of the 1 hosts of h100-8: name as many"),
        ({"slice_": "v5e-8"}, "launch ssh runs GPUs and CPUs: use launch gce, gke or vertex"),
        ({"image": "i"}, "--image=i has no effect with launch ssh, which runs --python=python"),
        ({"priority": "high"}, "--priority=high has no effect"),
        ({"capacity": "spot"}, "--capacity=spot has no effect"),
        ({"secrets": (Secret(variable="T", source=Source.KUBERNETES, name="s/k"),)}, "launch ssh cannot read"),
    ],
)
def test_jobs_that_hosts_cannot_run(spec, message):
    with pytest.raises(UserError, match=message):
        text_of(**spec)


def test_no_hosts_are_named():
    with pytest.raises(UserError, match="--hosts is not set: name the machines as ssh does"):
        text_of(hosts=None)


@pytest.mark.parametrize(
    ("hosts", "fields", "address"),
    [
        ("me@gpu0,gpu1", {}, "gpu0:8476"),
        ("10.0.0.1,10.0.0.2", {"port_of_coordinator": 9000}, "10.0.0.1:9000"),
        ("fe80::1,fe80::2", {}, "'[fe80::1]:8476'"),
        ("gpu0,gpu1", {"coordinator": "10.0.0.1"}, "10.0.0.1:8476"),
    ],
)
def test_the_first_host_is_where_the_others_find_each_other(hosts, fields, address):
    assert f"export JAX_COORDINATOR_ADDRESS={address} JAX_NUM_PROCESSES=2\n" in text_of(hosts=hosts, fields=fields)


def test_one_host_joins_no_other():
    assert "JAX_" not in text_of("h100-8", hosts="gpu0")


def test_a_budget_needs_a_manager(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    argv = ["ssh", "quickstart.gin", "--hosts=arm0", "--slice=cpu-1", "--storage=/shared", "--budget_usd=10"]
    assert exits.run_verb(launch.main, [*argv, "--usd_per_chip_hour=1", "--dry-run"]) == exits.EXIT_USER_ERROR
    assert "--budget_usd=10 has no effect with launch ssh unless a manager" in capsys.readouterr().err


def test_a_script_has_references_in_place_of_secrets():
    secrets = (
        Secret(variable="A", source=Source.ENVIRONMENT, name="MINE"),
        Secret(variable="B", source=Source.SECRET_MANAGER, name="projects/p/secrets/s/versions/1"),
    )
    text = text_of(secrets=secrets)
    assert "IFS= read -r -d '' A && export A" in text and "--secret=B=projects/p/secrets/s/versions/1" in text
