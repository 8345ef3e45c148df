"""Outputs of the other builders become a routing set: whole, redacted, the same bytes however it was built."""

from __future__ import annotations

import collections
import json
import pathlib
import subprocess
import sys
import textwrap

import pytest

from capibara.builders.executions.build import ExecutionLogs
from capibara.builders.executions.build import build as build_executions
from capibara.builders.files import reading
from capibara.builders.files.manifest import read_manifest
from capibara.builders.files.problems import Problems
from capibara.builders.playbooks.build import Playbooks
from capibara.builders.playbooks.build import build as build_playbooks
from capibara.builders.playbooks.ranking import BulletRanking, DomainFrom
from capibara.builders.routing.balance import Balance, BalanceMethod
from capibara.builders.routing.build import ENDINGS, build
from capibara.builders.routing.labelling.domains import Domain
from capibara.builders.routing.settings import RoutingSet, UnknownDomain
from capibara.builders.routing.splits import NAMES, Splits
from capibara.core.types import UserError
from tests.builders.executions import logs
from tests.builders.redaction import planted
from tests.builders.routing import data

for _package in ("tree_sitter_sql", "rensa", "detect_secrets", "openlineage.client"):
    pytest.importorskip(_package)
parquet = pytest.importorskip("pyarrow.parquet")

EVEN = Splits(train=0.4, validation=0.3, test=0.3)
SETTINGS = RoutingSet(
    splits=EVEN, min_examples=0, unknown_domain=UnknownDomain.INFER, balance=Balance(method=BalanceMethod.NONE)
)


def tree(folder) -> dict[str, bytes]:
    """The files of a data set; lineage has times."""
    folder = pathlib.Path(folder)
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "lineage.jsonl"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(files)}


def write_inputs(folder: pathlib.Path) -> list[str]:
    """Outputs of both builders, and documents."""
    build_executions(logs.folder(folder / "logs", files=3, sessions=12), str(folder / "executions"), ExecutionLogs())
    (folder / "books").mkdir()
    advice = [
        f"[b-{i}] helpful={i} harmful=1 :: When query {i} is slow, add an index to its table" for i in range(1, 9)
    ]
    (folder / "books" / "sql.md").write_text("\n".join(["## SQL", *advice]))
    build_playbooks(
        [str(folder / "books" / "sql.md")],
        str(folder / "playbooks"),
        Playbooks(ranking=BulletRanking(domain_from=DomainFrom.SECTION)),
    )
    data.write(folder / "docs.jsonl", data.documents(6))
    built = [folder / name for name in ("executions", "playbooks")]
    reports = [path for one in built for path in sorted(one.glob("*.json*"))]  # named by themselves
    return reading.expand([str(path) for path in [*built, *reports, folder / "docs.jsonl"]], ENDINGS, Problems())


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def whole(inputs, tmp_path_factory):
    """A routing set of all inputs."""
    folder = tmp_path_factory.mktemp("whole")
    build(inputs, str(folder), SETTINGS)
    return folder


def test_all_kinds_of_records_are_read(whole, inputs):
    manifest = read_manifest(str(whole))
    counts, found = manifest.counts, data.examples(whole)
    kinds = {kind: counts[f"records {kind}"] for kind in ("execution", "fix", "chat", "bullet", "document")}
    assert kinds["execution"] == 144 and kinds["fix"] == 36 and kinds["document"] == 36 and kinds["bullet"] == 8
    assert sum(kinds.values()) == counts["records"] and counts["skipped"] == 0
    reports = [one for one in inputs if pathlib.Path(one).name in ("manifest.json", "lineage.jsonl", "statistics.json")]
    assert manifest.problems.counts == {"left_out": len(reports)} and len(reports) == 5
    assert counts["files"] + counts["files_left_out"] == len(inputs)
    lost = sum(count for name, count in counts.items() if name.startswith(("excluded", "repeated texts of")))
    assert len(found) == counts["records"] - lost
    assert {record["kind"] for record in found} == {*kinds}
    assert {record["domain"] for record in found} <= {*data.DOMAINS}
    assert {record["domain"] for record in found if record["kind"] == "fix"} == {"debug"}
    assert {record["domain"] for record in found if record["kind"] == "bullet"} == {"sql"}
    for record in found:
        assert 0.6 <= record["confidence"] <= 1 and 0 <= record["difficulty_score"] <= 1 and record["repeat"] == 0
        if record["kind"] == "document":
            assert record["source"].split("/")[1] == record["domain"]


def test_all_records_of_a_session_are_in_one_split(whole):
    found = collections.defaultdict(set)
    kinds = collections.defaultdict(set)
    for record in data.examples(whole):
        found[record["source"]].add(record["split"])
        kinds[record["source"]].add(record["kind"])
    assert all(len(splits) == 1 for splits in found.values())
    sessions = [source for source in found if source.startswith("log") and "#s" in source]
    assert len(sessions) == 36 and any({"execution", "fix", "chat"} <= kinds[source] for source in sessions)


def test_parquet_has_what_the_json_lines_have(whole):
    for name in NAMES:
        table = parquet.read_table(whole / f"{name}.parquet")
        assert table.to_pylist() == data.read(whole, f"{name}.jsonl")
        assert table.schema.metadata[b"capibara.schema"] == b"1"
        assert json.loads(table.schema.metadata[b"capibara.domains"]) == [*data.DOMAINS]
    assert read_manifest(str(whole)).config["schema"] == 1


def test_statistics_are_those_of_the_files(whole):
    found = data.examples(whole)
    statistics = json.loads((whole / "statistics.json").read_text())
    for domain, about in statistics["domains"].items():
        here = [record for record in found if record["domain"] == domain]
        written = collections.Counter(record["split"] for record in here)
        assert {name: count for name, count in about["written"].items() if count} == written
        assert sum(about["difficulty"].values()) == sum(about["label_source"].values()) == about["examples"]
        assert about["examples"] >= len(here)
    for name, about in statistics["splits"].items():
        assert about["examples"] == sum(record["split"] == name for record in found)


def test_the_bytes_depend_on_no_worker_and_a_second_run_has_nothing_to_do(inputs, whole, tmp_path):
    build(inputs, str(tmp_path / "out"), SETTINGS, num_workers=2)
    assert tree(tmp_path / "out") == tree(whole)
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    build([*reversed(inputs)], str(tmp_path / "out"), SETTINGS)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == times


def test_a_file_that_was_read_whole_is_not_read_again(tmp_path):
    paths = [data.write(tmp_path / "in" / f"{i}.jsonl", data.documents(3, seed=i)) for i in range(2)]
    folder, seen = tmp_path / "out", []

    def stopped(done: int, total: int) -> None:
        if done == 1:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        build(paths, str(folder), SETTINGS, progress=stopped)
    part = folder / ".building" / "scratch" / "examples" / "000000"
    written = part.stat().st_ino, part.stat().st_mtime_ns

    def followed(done: int, total: int) -> None:
        seen.append((done, total, (part.stat().st_ino, part.stat().st_mtime_ns) == written))

    build(paths, str(folder), SETTINGS, progress=followed)
    assert seen == [(1, 2, True), (2, 2, True)]


_KILLS = """
    import os, pathlib, signal, sys
    from capibara.builders.routing.build import build
    from tests.builders.routing import data
    from tests.builders.routing.test_build import SETTINGS, tree

    root, stride = pathlib.Path(sys.argv[1]), int(sys.argv[2])
    paths = [data.write(root / "in" / f"{i}.jsonl", data.documents(4, seed=i)) for i in range(2)]
    build(paths, str(root / "whole"), SETTINGS)
    expected, kills = tree(root / "whole"), 0

    def killed_at(number, folder):
        '''Builds in a child, which kills itself before it syncs a file for the number-th time.'''
        child = os.fork()
        if not child:
            real, seen = os.fsync, []
            def fsync(file):
                seen.append(file)
                if len(seen) == number:
                    os.kill(os.getpid(), signal.SIGKILL)
                real(file)
            os.fsync = fsync
            build(paths, str(folder), SETTINGS)
            os._exit(0)
        return os.waitpid(child, 0)[1] != 0

    number = 1
    while killed_at(number, root / f"at{number}"):
        kills += 1
        assert not killed_at(0, root / f"at{number}")
        assert tree(root / f"at{number}") == expected, number
        number += stride
    often = 3
    while killed_at(often, root / "often"):
        often += 2
    assert tree(root / "often") == expected
    print(kills)
"""


@pytest.mark.parametrize("stride", [13, pytest.param(1, marks=pytest.mark.heavy)])
def test_a_build_that_is_killed_anywhere_is_resumed_to_the_same_bytes(tmp_path, stride):
    argv = [sys.executable, "-c", textwrap.dedent(_KILLS), str(tmp_path), str(stride)]
    checkout = pathlib.Path(__file__).resolve().parents[3]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, cwd=checkout)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 3


def test_shards_have_all_examples_in_their_order(inputs, whole, tmp_path):
    build(inputs, str(tmp_path), RoutingSet(**{**vars(SETTINGS), "shards": 3}))
    names = [f"train-{number:05d}-of-00003.jsonl" for number in range(3)]
    shards = [data.read(tmp_path, name) for name in names]
    assert [one for shard in shards for one in shard] == data.read(whole, "train.jsonl")
    assert min(map(len, shards)) > 5 and not (tmp_path / "train.jsonl").exists()
    assert parquet.read_table(tmp_path / "train-00001-of-00003.parquet").to_pylist() == shards[1]


# --- input -----------------------------------------------------------------------------------------------------------


def made(tmp_path, records, **changes):
    path = data.write(tmp_path / "in.jsonl", records)
    return build([path], str(tmp_path / "out"), RoutingSet(**{**vars(SETTINGS), **changes}))


def test_what_is_malformed_is_counted_and_the_rest_is_kept(tmp_path):
    lines = [json.dumps(record).encode() for record in data.documents(6)]
    lines[3:3] = [b'{"text": "cut', b'{"title": "no text"}', b"[1]", b'{"text": "\xff\xfe"}', b'{"text": 3}']
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\n".join(lines) + b"\n")
    (tmp_path / "cut.jsonl").write_bytes(b"\n".join(lines[8:20])[:-20])
    manifest = build([str(path), str(tmp_path / "cut.jsonl")], str(tmp_path / "out"), SETTINGS)
    assert manifest.problems.counts == {"encoding": 1, "malformed": 4, "truncated": 1}
    assert {(problem.path, problem.line) for problem in manifest.problems} == {
        *((str(path), number) for number in (4, 5, 6, 7, 8)),
        (str(tmp_path / "cut.jsonl"), 12),
    }
    assert manifest.counts["labelled"] == 36 + 11 and manifest.counts["repeated texts of a source"] == 11


def test_a_cell_has_the_domain_of_what_earlier_cells_import_for_it(tmp_path):
    cells = {
        "ml": ["import numpy as np", "weights = np.ones((3, 4)) * {0}", "total_{0} = 4 + {0}\nprint(total_{0} * 2)"],
        "api": ["from webob import Request\nkept = 1", "reply_{0} = Request.blank('/page/{0}')"],
    }
    records = [
        logs.execution(code.format(number), session_id=f"{domain}{number}", language="python")
        for number in range(3)
        for domain, codes in cells.items()
        for code in codes
    ]
    build_executions([logs.write(tmp_path / "log.jsonl", records)], str(tmp_path / "executions"), ExecutionLogs())
    path = tmp_path / "executions" / "executions" / "00000.jsonl"
    read = [json.loads(line) for line in path.open()]
    assert [one["earlier_imports"] for one in read] == [[], ["numpy"], [], [], ["webob"]] * 3
    settings = RoutingSet(**{**vars(SETTINGS), "splits": Splits(train=1.0, validation=0.0, test=0.0)})
    build([str(path)], str(tmp_path / "out"), settings)
    found = {one["text"]: (one["domain"], one["label_source"]) for one in data.examples(tmp_path / "out")}
    for number in range(3):
        assert found[f"weights = np.ones((3, 4)) * {number}"] == ("ml", "imports")
        assert found[f"reply_{number} = Request.blank('/page/{number}')"] == ("api", "imports")
        assert found[f"total_{number} = 4 + {number}\nprint(total_{number} * 2)"] == ("python", "language")


def test_ambiguous_and_other_texts_are_excluded_and_counted(tmp_path):
    more = [
        {"text": "import numpy\nimport requests\nprint(requests.get(numpy))"},
        {"text": "It rains, and the capybara sleeps beside the river."},
        {"text": "x = 1"},
        {"text": "print(1)\n" * 20_000},
    ]
    counts = made(tmp_path, data.documents(6) + more).counts
    excluded = {name: count for name, count in counts.items() if name.startswith("excluded as")}
    assert excluded == {f"excluded as {reason}": 1 for reason in ("ambiguous", "no domain", "too short", "too long")}
    sure = made(tmp_path / "sure", data.documents(6) + more, min_confidence=0.9).counts
    assert sure["excluded as ambiguous"] > 1


def test_an_unknown_domain_is_an_error_unless_it_is_allowed(tmp_path):
    records = data.documents(6)
    records[7] |= {"domain": "cooking"}
    records[8] |= {"domain": "general"}  # says nothing
    with pytest.raises(UserError) as error:
        made(
            tmp_path / "long",
            [{"text": "a text of a domain", "domain": "A" * 10_000}],
            unknown_domain=UnknownDomain.REFUSE,
        )
    assert len(str(error.value)) < 1000
    with pytest.raises(UserError) as error:
        made(tmp_path, records, unknown_domain=UnknownDomain.REFUSE)
    said = str(error.value)
    assert said.startswith(f"{tmp_path / 'in.jsonl'}:8: domain 'cooking' is none of RoutingSet.domains (python, sql,")
    assert "\n" not in said
    made(tmp_path / "infer", records)
    (found,) = [one for one in data.examples(tmp_path / "infer" / "out") if one["record"] == "in.jsonl:8"]
    assert (found["domain"], found["label_source"]) == ("sql", "language")
    left = made(tmp_path / "left", records, unknown_domain=UnknownDomain.EXCLUDE)
    assert left.counts["excluded as other domain"] == 1
    cooking = Domain(name="kitchen", names=("cooking",))
    made(tmp_path / "own", records, domains=(*data.DOMAINS, cooking), unknown_domain=UnknownDomain.REFUSE)
    (found,) = [one for one in data.examples(tmp_path / "own" / "out") if one["record"] == "in.jsonl:8"]
    assert (found["domain"], found["label_source"], found["confidence"]) == ("kitchen", "declared", 1.0)


def test_a_domain_without_examples_is_an_error(tmp_path):
    records = [record for record in data.documents(8) if "/sql/" not in record["source"]]
    with pytest.raises(UserError, match=r"domain 'sql' has 0 examples in train \(0 in all splits\).*add input of it"):
        made(tmp_path, records, min_examples=1, domains=("sql", "python"))
    with pytest.raises(UserError, match=r"has \d+ examples in train \(\d+ in all splits\).*another Splits.seed"):
        made(tmp_path / "few", records, min_examples=7, domains=("python", "ml"))


def test_the_output_folder_is_no_input(tmp_path):
    paths = [
        data.write(tmp_path / "in" / name, data.documents(4, seed=i))
        for i, name in enumerate(("a.jsonl", "leaks.jsonl"))
    ]
    folder = str(tmp_path / "in" / "out")
    first = build(paths, folder, SETTINGS)
    assert first.counts["files"] == 2, "a file that is only named like a report is read"
    again = build(reading.expand([str(tmp_path / "in")], ENDINGS, Problems()), folder, SETTINGS)
    assert again == first


def test_input_without_any_record_of_a_domain_is_an_error_that_names_the_cause(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\xff\xfe" + '{"text": "x"}\n'.encode("utf-16-le"))
    with pytest.raises(UserError, match=r"0 records, .*1 skipped, the first: .*in.jsonl:1: encoding: .* UTF-16"):
        build([str(path)], str(tmp_path / "a"), SETTINGS)
    path.write_text('{"text": "It rains, and the capybara sleeps."}\n{"text": "x"}\n')
    with pytest.raises(UserError, match=r"2 records, .*\(1 excluded as no domain; 1 excluded as too short\)"):
        build([str(path)], str(tmp_path / "b"), SETTINGS)
    path.write_text("")
    with pytest.raises(UserError, match="0 records, .*it is empty"):
        build([str(path)], str(tmp_path / "c"), SETTINGS)


def test_no_file_of_records_is_an_error(whole, tmp_path):
    with pytest.raises(UserError, match="has no file of records"):
        build([str(whole / "manifest.json"), str(whole / "lineage.jsonl")], str(tmp_path / "out"), SETTINGS)


def test_no_secret_is_written(tmp_path):
    tokens = [make(planted.Make(number)) for number, make in enumerate(planted.TOKENS.values())]
    records = data.documents(6)
    for number, token in enumerate(tokens):
        code = f"import numpy as np\nkey = '{token}'\nprint(np.zeros({number}))\n"
        records.append({"text": code, "source": f"asmith@acme-corp.io {number}", "session": token})
    manifest = made(tmp_path, records)
    assert manifest.counts["labelled"] == len(records)
    written = b"".join(tree(tmp_path / "out").values()).decode(errors="replace")
    assert "<SECRET:" in written
    assert not [token for token in tokens if token in written] and "asmith" not in written
