"""Files that survive a power cut."""

from etils import epath

from capibara.storage import durable


def test_a_file_that_another_process_is_writing_is_left_to_it(tmp_path, monkeypatch):
    """Else it is gone, under its passing name, when its turn comes."""
    synced = []
    monkeypatch.setattr(durable, "sync_entry", synced.append)
    (tmp_path / "step").mkdir()
    for name in ("whole", f"hashes.1{durable.PARTIAL}"):
        (tmp_path / "step" / name).touch()
    durable.sync(epath.Path(tmp_path / "step"))
    assert {epath.Path(path).name for path in synced} == {tmp_path.name, "step", "whole"}
