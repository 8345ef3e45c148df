"""What a job may be, and what it costs."""

import pathlib
import sys

import pytest

from capibara.core.types import UserError
from capibara.jobs.secrets import Secret, Source
from capibara.jobs.spec import Attempt, Bundle, Capacity, near_name

sys.path.append(str(pathlib.Path(__file__).parent))
from job_specs import job  # noqa: E402


@pytest.mark.parametrize("name", ["Run", "run_1", "1run", "run-", "", "r" * 41, "run\nx", "run;rm"])
def test_a_name_that_no_system_takes_is_refused_with_one_that_all_take(name):
    with pytest.raises(UserError, match="must be 1 to 40 lower-case letters") as error:
        job(name=name)
    near = str(error.value).rpartition("--name=")[2]
    assert near == near_name(name) and job(name=near).name == near


@pytest.mark.parametrize("name", ["r", "run", "a-1", "r" * 40])
def test_a_name_that_all_systems_take(name):
    assert job(name=name).name == name


@pytest.mark.parametrize(
    "labels", [{"Team": "a"}, {"team": "A"}, {"1": "a"}, {"team": "a" * 64}, {"team": "-a"}, {"team": "a\n"}]
)
def test_a_label_that_some_system_refuses(labels):
    with pytest.raises(UserError, match="must be at most 63 lower-case letters"):
        job(labels=labels)


def test_labels_by_which_a_job_is_found_are_capibaras():
    attempt = Attempt(launch="ab", number=1, failures=2, spent_s=3)
    assert job(labels={"team": ""}, digest="0123", attempt=attempt).all_labels == {
        "capibara-job": "run",
        "capibara-spec": "0123",
        "capibara-launch": "ab",
        "capibara-attempt": "1",
        "capibara-failures": "2",
        "capibara-spent": "3",
        "team": "",
    }
    with pytest.raises(UserError, match="--label=capibara-job=... is set by capibara itself"):
        job(labels={"capibara-job": "other"})


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"A-B": "x"}, "must name a variable"),
        ({"A": "x\ny"}, "must be one line"),
        ({"A": "x\u2028y"}, "must be one line"),
        ({"PATH": "/x"}, "is a variable of the shell"),
        ({"capibara_home": "/x"}, "is a variable of the shell"),
        ({"PGPASSWORD": "abc"}, "looks like a secret"),
        ({"AWS_SECRET_ACCESS_KEY": "/abc"}, "looks like a secret"),
        ({"HF_TOKEN": "abc"}, "looks like a secret"),
        ({"wandb_api_key": "abc"}, "looks like a secret"),
        ({"X": "hf_abcdef"}, "looks like a secret"),
        ({"X": "-----BEGIN PRIVATE KEY-----"}, "looks like a secret"),
    ],
)
def test_an_environment_that_is_refused_without_its_value(environment, message):
    with pytest.raises(UserError, match=message) as error:
        job(environment=environment)
    assert "abc" not in str(error.value) and "BEGIN" not in str(error.value)


def test_paths_and_counts_are_no_secrets():
    public = {"GOOGLE_APPLICATION_CREDENTIALS": "/etc/key.json", "TOKENIZERS_PARALLELISM": "false", "MAX_TOKENS": "5"}
    assert job(environment=public).environment == public


def test_a_variable_has_one_value():
    secret = Secret(variable="A", source=Source.ENVIRONMENT, name="A")
    with pytest.raises(UserError, match="A is set twice by --env and --secret"):
        job(environment={"A": "x"}, secrets=(secret,))
    with pytest.raises(UserError, match="A is set twice by --env and --secret"):
        job(secrets=(secret, secret))


@pytest.mark.parametrize("variable", ["PATH", "UID", "capibara_host", "BASH_ENV"])
def test_a_secret_is_no_variable_of_the_shell(variable):
    with pytest.raises(UserError, match=f"--secret={variable}=... is a variable of the shell: choose another name"):
        job(secrets=(Secret(variable=variable, source=Source.ENVIRONMENT, name="A"),))


def test_a_budget_is_time():
    spec = job(budget_usd=76.8)
    assert spec.usd_per_hour == pytest.approx(64 * 1.2) and spec.longest_s == pytest.approx(3600)
    assert job(budget_usd=32.0, usd_per_chip_hour=0.5).longest_s == pytest.approx(3600)
    assert job().longest_s is None


def test_a_budget_that_buys_nothing_or_has_no_price():
    with pytest.raises(
        UserError, match="buys 47 s of v5e-64 at 76.80 USD an hour, must be at least a minute: raise it to 77"
    ):
        job(budget_usd=1.0)
    with pytest.raises(UserError, match="tpu7x-128 has no list price: add --usd_per_chip_hour"):
        job("tpu7x-128", budget_usd=100.0)
    for value in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(UserError, match="must be positive and finite"):
            job(budget_usd=value)


def test_a_reservation_goes_with_reserved_capacity():
    assert job(capacity=Capacity.RESERVED, reservation="r").reservation == "r"
    with pytest.raises(UserError, match="--reservation is not set, but --capacity is reserved, not on_demand or spot"):
        job(capacity=Capacity.RESERVED)
    with pytest.raises(UserError, match="--reservation is set, but --capacity is spot, not reserved"):
        job(capacity=Capacity.SPOT, reservation="r")


@pytest.mark.parametrize("field", ["image", "priority", "reservation"])
@pytest.mark.parametrize("text", ["a\nb", "a b", "", "a\tb", "--privileged"])
def test_names_are_one_word(field, text):
    capacity = {"capacity": "reserved"} if field == "reservation" else {}
    with pytest.raises(UserError, match="must be one word|--reservation"):
        job(**{field: text}, **capacity)


@pytest.mark.parametrize(
    "fields",
    [
        {"labels": {"key": "hf_abcdef"}},
        {"labels": {"hf_abcdef": "a"}},
        {"arguments": ('--gin_bindings=A.b = "sk-abcdef"',)},
        {"priority": "hf_abcdef"},
        {"image": "hf_abcdef"},
        {"bundle": Bundle(url="s3://hf_abcdef/jobs/run/0", files={})},
    ],
)
def test_a_secret_in_a_label_or_a_binding(fields):
    with pytest.raises(UserError, match="a flag, a binding or a label looks like a secret") as error:
        job(**fields)
    assert "abcdef" not in str(error.value)


def test_counts_have_limits():
    for fields in ({"restarts": -1}, {"grace_s": -1}, {"restarts": 10_001}, {"grace_s": 10**26}):
        with pytest.raises(UserError, match="must be from 0 to 10000, --grace"):
            job(**fields)


def test_a_budget_of_many_years():
    with pytest.raises(UserError, match="buys more than ten years of v5e-64: lower it"):
        job(budget_usd=1e308)
