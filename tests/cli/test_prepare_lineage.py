"""`capibara prepare`: its words, what the words of builders share, and `prepare lineage`."""

from __future__ import annotations

import json
import os

import pytest

from capibara.builders.files import fingerprints
from capibara.builders.writing import Output
from capibara.cli import prepare
from capibara.cli.preparing import builders
from capibara.multihost import exits

pytest.importorskip("openlineage.client")


def build(folder, *inputs, bad=0):
    with Output(str(folder), "sets", {}, fingerprints.inputs_of(inputs)) as output:
        with output.part("train.jsonl") as part:
            part.write_record({"messages": []})
            part.counts["kept"] += 1
            for line in range(1, bad + 1):
                part.problems.add("in.jsonl", line, "malformed", "is bad")
        return output.finish()


@pytest.fixture
def out(tmp_path):
    (tmp_path / "in.jsonl").write_text("{}\n")
    build(tmp_path / "out", tmp_path / "in.jsonl")
    return tmp_path / "out"


def test_the_chain_is_printed_with_hashes(out, capsys):
    assert prepare.main(["lineage", str(out)]) == 0
    first, second = capsys.readouterr().out.splitlines()
    digest = json.loads((out / "manifest.json").read_text())["fingerprint"]
    assert first.startswith(f"data set {out} {digest[:12]}: unchanged, built by prepare sets, records 1, by capibara ")
    assert (
        second
        == f"  file {out.parent}/in.jsonl {fingerprints.hash_file(out.parent / 'in.jsonl').sha256[:12]}: unchanged"
    )


@pytest.mark.parametrize("check", ["hashes", "sizes"])
def test_what_has_changed_since_is_the_exit_code(out, capsys, check):
    source = out.parent / "in.jsonl"
    source.write_text("[]\n")
    assert prepare.main(["lineage", str(out), "--json", f"--check={check}"]) == int(check == "hashes")
    [parent] = json.loads(capsys.readouterr().out)["parents"]
    assert (parent["path"], parent["state"]) == (str(source), "changed" if check == "hashes" else "not checked")
    source.unlink()
    assert prepare.main(["lineage", str(out), f"--check={check}"]) == 1
    assert capsys.readouterr().out.endswith(": missing\n")


def test_mistakes_are_one_line(tmp_path, capsys):
    for argv, message in (
        (["lineage", str(tmp_path)], "has no lineage: name a run folder"),
        (["lineage", str(tmp_path), "--chek=sizes"], "unknown flag --chek: did you mean --check?"),
        (["lineage"], "the following arguments are required: PATH"),
        (["lineaeg"], "unknown word 'lineaeg': did you mean lineage?"),
    ):
        assert exits.run_verb(prepare.main, argv) == exits.EXIT_USER_ERROR
        said = capsys.readouterr().err
        assert message in said and said.count("\n") == 1


def test_help_names_every_word(capsys):
    assert prepare.main([]) == prepare.main(["--help"]) == 0
    said = capsys.readouterr().out
    assert all(f"\n  {word}  " in said for word in prepare.MODULES)


def test_the_older_words_take_their_flags_on_both_sides(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text('{"messages": []}\n')
    for argv in (
        ["vocabulary", "--sample_megabytes=-1"],
        ["--sample_megabytes=-1", "vocabulary"],
        ["--sample_megabytes", "-1", "instructions"],
    ):
        assert exits.run_verb(prepare.main, argv) == exits.EXIT_USER_ERROR
        assert "--sample_megabytes (-1.0) must be positive" in capsys.readouterr().err


@pytest.fixture
def parse(monkeypatch):
    monkeypatch.setenv("OPENLINEAGE_URL", "http://of.the.environment")
    return lambda *argv: builders.parsed(builders.parser("sets", "Make sets."), argv)


def test_builders_share_their_flags(parse):
    args = parse("a", "b*", "--out=c", "--num_workers=3", "--lineage_url=http://of.the.flag")
    assert (args.inputs, args.out, args.num_workers) == (["a", "b*"], "c", 3)
    assert os.environ["OPENLINEAGE_URL"] == "http://of.the.flag"
    assert parse("a", "--out=c").num_workers >= 1


def test_a_negative_number_of_workers_is_the_users_mistake(parse):
    with pytest.raises(exits.UserError, match=r"--num_workers \(-1\) must be at least 0"):
        parse("a", "--out=b", "--num_workers=-1")


@pytest.mark.parametrize(
    ("bad", "flags", "code"),
    [(0, [], 0), (3, [], exits.EXIT_SKIPPED), (3, ["--allow_skipped"], 0), (3, ["--json"], exits.EXIT_SKIPPED)],
)
def test_skipped_input_is_named_and_is_the_exit_code(tmp_path, parse, capsys, monkeypatch, bad, flags, code):
    monkeypatch.delenv("OPENLINEAGE_URL")
    (tmp_path / "in.jsonl").write_text("{}\n")
    manifest = build(tmp_path / "out", tmp_path / "in.jsonl", bad=bad)
    assert builders.report(manifest, parse("in.jsonl", f"--out={tmp_path}/out", *flags)) == code
    said = capsys.readouterr()
    if "--json" in flags:
        assert json.loads(said.out) == json.loads((tmp_path / "out/manifest.json").read_text())
    else:
        assert f"fingerprint {manifest.fingerprint}\n" in said.out and "\n  kept  " in said.out
    assert ("  in.jsonl:3: malformed: is bad" in said.err) == bool(bad)
