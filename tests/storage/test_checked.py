"""What a store of the user's returns is checked where it arises."""

import copy
import inspect

import numpy as np
import pytest
from etils import epath

from capibara.core import user_modules
from capibara.core.types import UserError
from capibara.storage import checked, stores
from capibara.storage.disk import DiskStore
from capibara.storage.store import Store


class Forgetful(DiskStore):
    """Writes, reads and locks, and returns nothing."""

    def write_hashed(self, path, data):
        super().write_hashed(path, data)

    def read_version(self, path, most):
        return b""

    def list(self, folder):
        return None

    def lock(self, folder, within_s):
        return True


@pytest.fixture
def assigned(tmp_path, monkeypatch):
    """The user's store of a folder."""
    monkeypatch.setattr(user_modules, "own_class", lambda store: type(store).__name__)
    stores.assign(tmp_path, Forgetful())
    yield stores.of(tmp_path / "file")
    stores.assign(tmp_path, None)


@pytest.mark.parametrize(
    "method, name, args, said",
    [
        ("write_hashed", "file", [np.zeros(3, np.uint8)], "Forgetful.write_hashed returned None, must be str"),
        ("read_version", "file", [9], "Forgetful.read_version returned b'', must be tuple"),
        ("list", "", [], "Forgetful.list returned None, must be dict"),
        ("lock", "", [1.0], "Forgetful.lock returned True, must be a context manager"),
    ],
)
def test_another_type_is_one_line(assigned, tmp_path, method, name, args, said):
    path = epath.Path(tmp_path) / name
    with pytest.raises(UserError, match=said):
        getattr(assigned, method)(path, *args)


def test_every_method_of_the_table_is_checked(monkeypatch, tmp_path):
    monkeypatch.setattr(user_modules, "own_class", lambda store: type(store).__name__)
    wrong = type("Wrong", (DiskStore,), {name: lambda self, *args: 1.5 for name in checked.RETURNS})
    store = checked.checked(wrong())
    for name, (_, needed) in checked.RETURNS.items():
        with pytest.raises(UserError, match=f"Wrong.{name} returned 1.5, must be {needed}: "):
            getattr(store, name)("anything")
    assert isinstance(copy.copy(store), type(store))


def test_what_it_returns_otherwise_is_passed_on(assigned, tmp_path):
    assigned.write_atomic(tmp_path / "file", b"abc")
    assert assigned.read(tmp_path / "file") == b"abc" and assigned.size(tmp_path / "file") == 3
    assert assigned.has_local_paths and assigned.free_bytes(tmp_path) > 0


def test_capibaras_stores_are_not_wrapped(tmp_path):
    store = DiskStore()
    stores.assign(tmp_path, store)
    try:
        assert stores.of(tmp_path / "file") is store
    finally:
        stores.assign(tmp_path, None)


def test_the_table_has_every_method_that_returns_a_value():
    returns = {name for name, method in vars(Store).items() if inspect.isfunction(method) and not name.startswith("_")
               and inspect.signature(method).return_annotation != "None"}  # fmt: skip
    assert returns - {"open", "lines"} == set(checked.RETURNS)
