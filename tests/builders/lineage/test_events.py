"""A build's events are OpenLineage's, are in a file beside its output, and reach a server if one is named."""

from __future__ import annotations

import http.server
import importlib
import json
import pkgutil
import socket
import threading
import uuid

import pytest

from capibara.builders.files import fingerprints
from capibara.builders.lineage import events, history
from capibara.builders.writing import Output
from capibara.core.types import UserError

pytest.importorskip("openlineage.client")


CONFIG = {"filter": {"least": 1}, "names": ["a", "b"]}


@pytest.fixture(autouse=True)
def _no_server(monkeypatch):
    for name in ("URL", "API_KEY", "PARENT_ID", "NAMESPACE"):
        monkeypatch.delenv(f"OPENLINEAGE_{name}", raising=False)


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text('{"a": 1}\n')
    return path


def build(folder, *inputs, config=CONFIG, error=None):
    with Output(str(folder), "sets", config, fingerprints.inputs_of(inputs)) as output:
        if output.done() is None:
            with output.part("train.jsonl") as part:
                part.write_record({"messages": [], "n": 1, "score": 0.5})
            if error is not None:
                raise error
            return output.finish()


def states(folder):
    return [event["eventType"] for event in history.read(str(folder))]


def facet_classes():
    """OpenLineage's classes of facets, by their schema."""
    import openlineage.client.generated as generated

    modules = [
        importlib.import_module(f"{generated.__name__}.{m.name}") for m in pkgutil.iter_modules(generated.__path__)
    ]
    classes = [value for module in modules for value in vars(module).values() if hasattr(value, "_get_schema")]
    return {one._get_schema(): one for one in classes}


def check(event):
    """Builds an event again by OpenLineage's classes, which validate; returns the facets that they know."""
    from openlineage.client import event_v2
    from openlineage.client.serde import Serde

    classes, known = facet_classes(), []

    def checked(facets):
        for name, facet in (facets or {}).items():
            assert facet["_producer"] == event["producer"]
            own = {key: value for key, value in facet.items() if not key.startswith("_")}
            made = classes[facet["_schemaURL"]](**({} if name.startswith("capibara_") else own))
            if not name.startswith("capibara_"):
                made._producer = facet["_producer"]
                assert Serde.to_dict(made) == facet
                known.append(name)
        return facets

    again = event_v2.RunEvent(
        eventTime=event["eventTime"],
        eventType=event_v2.RunState[event["eventType"]],
        producer=event["producer"],
        run=event_v2.Run(event["run"]["runId"], checked(event["run"].get("facets"))),
        job=event_v2.Job(event["job"]["namespace"], event["job"]["name"], checked(event["job"].get("facets"))),
        inputs=[
            event_v2.InputDataset(
                one["namespace"], one["name"], inputFacets=checked(one["inputFacets"]), facets=checked(one["facets"])
            )
            for one in event["inputs"]
        ],
        outputs=[
            event_v2.OutputDataset(
                one["namespace"], one["name"], outputFacets=checked(one["outputFacets"]), facets=checked(one["facets"])
            )
            for one in event["outputs"]
        ],
    )
    assert Serde.to_dict(again) == event
    return known


def test_a_build_has_a_start_and_an_end_that_openlineage_accepts(tmp_path, source):
    manifest = build(tmp_path / "out", source)
    start, end = history.read(str(tmp_path / "out"))
    for event in (start, end):
        known = check(event)
        assert {"executionParameters", "processing_engine", "jobType", "version", "inputStatistics"} <= {*known}
    assert (start["eventType"], end["eventType"]) == ("START", "COMPLETE")
    assert start["run"]["runId"] == end["run"]["runId"] and start["job"] == end["job"]
    assert end["job"]["name"] == "prepare.sets" and start["eventTime"] < end["eventTime"]
    [one] = end["inputs"]
    assert (one["namespace"], one["name"]) == ("file", str(source))
    assert one["facets"]["version"]["datasetVersion"] == fingerprints.hash_file(source).sha256
    folder, file = end["outputs"]
    assert folder["name"] == str(tmp_path / "out")
    assert folder["facets"]["version"]["datasetVersion"] == manifest.fingerprint
    assert folder["outputFacets"]["outputStatistics"]["rowCount"] == 1
    assert file["name"] == str(tmp_path / "out/train.jsonl")
    assert [(field["name"], field["type"]) for field in file["facets"]["schema"]["fields"]] == [
        ("messages", "array"),
        ("n", "integer"),
        ("score", "number"),
    ]
    facets = end["run"]["facets"]
    assert [(one["key"], one["value"]) for one in facets["executionParameters"]["parameters"]] == [
        ("filter.least", "1"),
        ("names", '["a","b"]'),
    ]
    code = fingerprints.code_version()
    assert facets["capibara_code"]["package"] == code.package
    assert facets["capibara_code"].get("commit") == code.commit


def test_a_build_that_has_nothing_to_do_has_no_events(tmp_path, source):
    build(tmp_path / "out", source)
    build(tmp_path / "out", source)
    assert states(tmp_path / "out") == ["START", "COMPLETE"]


@pytest.mark.parametrize(("error", "state"), [(ValueError("no\nluck"), "FAIL"), (KeyboardInterrupt(), "ABORT")])
def test_a_build_that_ends_early_says_so_and_can_be_resumed(tmp_path, source, error, state):
    with pytest.raises(type(error)):
        build(tmp_path / "out", source, error=error)
    assert states(tmp_path / "out") == ["START", state]
    end = history.read(str(tmp_path / "out"))[-1]
    check(end)
    if state == "FAIL":
        assert end["run"]["facets"]["errorMessage"]["message"] == "ValueError: no luck"
    build(tmp_path / "out", source)
    assert states(tmp_path / "out") == ["START", state, "START", "COMPLETE"]
    assert len({event["run"]["runId"] for event in history.read(str(tmp_path / "out"))}) == 2


def test_a_build_that_was_killed_is_aborted_by_the_next_one(tmp_path, source):
    output = Output(str(tmp_path / "out"), "sets", {}, fingerprints.inputs_of([source]))
    assert output.done() is None
    output.close()  # as the system does for a killed process
    path = tmp_path / "out" / history.FILE
    path.write_bytes(path.read_bytes() + b'{"eventType": "COMPL')  # killed while it wrote
    build(tmp_path / "out", source, config={})
    assert states(tmp_path / "out") == ["START", "ABORT", "START", "COMPLETE"]
    assert [json.loads(line)["eventType"] for line in path.read_text().splitlines()] == states(tmp_path / "out")
    first = history.read(str(tmp_path / "out"))
    assert first[0]["run"]["runId"] == first[1]["run"]["runId"] != first[2]["run"]["runId"]
    check(first[1])


def test_the_run_that_made_an_input_is_named(tmp_path, source):
    build(tmp_path / "one", source)
    build(tmp_path / "two", tmp_path / "one/train.jsonl", source)
    made, end = history.read(str(tmp_path / "one"))[-1], history.read(str(tmp_path / "two"))[-1]
    assert "jobDependencies" in check(end)
    [upstream] = end["run"]["facets"]["jobDependencies"]["upstream"]
    assert upstream == {
        "job": {"namespace": "capibara", "name": "prepare.sets"},
        "run": {"runId": made["run"]["runId"]},
    }


def test_an_input_that_changed_after_it_was_built_names_no_run(tmp_path, source):
    build(tmp_path / "one", source)
    (tmp_path / "one/train.jsonl").write_text('{"by": "hand"}\n')
    build(tmp_path / "two", tmp_path / "one/train.jsonl")
    assert "jobDependencies" not in history.read(str(tmp_path / "two"))[-1]["run"]["facets"]


def test_the_scheduler_that_started_a_build_is_its_parent(tmp_path, source, monkeypatch):
    parent = str(uuid.uuid4())
    monkeypatch.setenv("OPENLINEAGE_PARENT_ID", f"airflow/nightly.sets/{parent}")
    monkeypatch.setenv("OPENLINEAGE_NAMESPACE", "team")
    build(tmp_path / "out", source)
    event = history.read(str(tmp_path / "out"))[-1]
    assert "parent" in event["run"]["facets"] and event["job"]["namespace"] == "team"
    assert event["run"]["facets"]["parent"]["run"] == {"facets": {}, "runId": parent}
    assert event["run"]["facets"]["parent"]["job"]["name"] == "nightly.sets"


@pytest.mark.parametrize("text", ["nonsense", "a/b/c", "a/b/c/d"])
def test_a_parent_that_is_none_is_the_users_mistake(tmp_path, source, monkeypatch, text):
    monkeypatch.setenv("OPENLINEAGE_PARENT_ID", text)
    with pytest.raises(UserError, match="OPENLINEAGE_PARENT_ID .* must be NAMESPACE/JOB/RUN"):
        build(tmp_path / "out", source)


def test_many_inputs_are_named_by_their_folders(tmp_path, monkeypatch):
    monkeypatch.setattr(events, "MOST_FILES", 3)
    paths = [tmp_path / folder / f"{i}.jsonl" for folder in "ab" for i in range(3)]
    for path in paths:
        path.parent.mkdir(exist_ok=True)
        path.write_text(path.name)
    build(tmp_path / "out", *paths)
    end = history.read(str(tmp_path / "out"))[-1]
    check(end)
    assert [one["name"] for one in end["inputs"]] == [str(tmp_path / "a"), str(tmp_path / "b")]
    assert [one["inputFacets"]["inputStatistics"]["fileCount"] for one in end["inputs"]] == [3, 3]
    assert (
        len({one["facets"]["version"]["datasetVersion"] for one in end["inputs"]}) == 1
    )  # the same names and contents


def test_without_openlineage_the_extra_is_named(tmp_path, source, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "openlineage.client", None)
    with pytest.raises(UserError, match=r'openlineage.client is not installed .*: pip install -e "[^"]+\[builders\]"'):
        build(tmp_path / "out", source)


# --- the server ------------------------------------------------------------------------------------------------------


@pytest.fixture
def server():
    """A server that keeps the events, and answers with `status`."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            made.got.append((self.path, self.headers.get("Authorization"), json.loads(body)))
            self.send_response(made.status)
            self.end_headers()

        def log_message(self, *given):
            pass

    made = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.got, made.status = [], 201
    thread = threading.Thread(target=made.serve_forever, args=(0.02,))
    thread.start()
    yield made
    made.shutdown()
    made.server_close()
    thread.join()


def test_a_server_gets_the_events_of_the_file(tmp_path, source, server, monkeypatch, capfd):
    monkeypatch.setenv("OPENLINEAGE_URL", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("OPENLINEAGE_API_KEY", "sesame-4711")
    build(tmp_path / "out", source)
    assert [event for _, _, event in server.got] == history.read(str(tmp_path / "out"))
    assert {(path, key) for path, key, _ in server.got} == {("/api/v1/lineage", "Bearer sesame-4711")}
    assert "sesame" not in (tmp_path / "out" / history.FILE).read_text() + "".join(capfd.readouterr())


@pytest.mark.parametrize("fault", ["status", "closed", "unknown"])
def test_a_server_that_fails_is_said_once_and_fails_no_build(tmp_path, source, server, monkeypatch, capfd, fault):
    server.status = 401
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        closed = free.getsockname()[1]
    url = {
        "status": f"http://127.0.0.1:{server.server_port}/?token=sesame-4711",
        "closed": f"http://127.0.0.1:{closed}",
        "unknown": "http://no-such-host.invalid",
    }[fault]
    monkeypatch.setenv("OPENLINEAGE_URL", url)
    monkeypatch.setenv("OPENLINEAGE_API_KEY", "sesame-4711")
    assert build(tmp_path / "out", source) is not None
    assert states(tmp_path / "out") == ["START", "COMPLETE"]
    said = capfd.readouterr().err
    assert said.count("does not take the lineage events") == 1 == said.count("\n")
    assert "sesame" not in said and ("HTTP 401" in said) == (fault == "status")


@pytest.mark.parametrize("url", ["ftp://host", "host:80", "http://", "http://user:sesame@host"])
def test_an_address_that_is_none_is_the_users_mistake(tmp_path, source, monkeypatch, url):
    monkeypatch.setenv("OPENLINEAGE_URL", url)
    with pytest.raises(UserError, match="OPENLINEAGE_URL") as told:
        build(tmp_path / "out", source)
    assert "sesame" not in str(told.value)
