"""Builds training sets from playbooks: a consolidated playbook, its bullets, and conversations, for each domain."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import itertools
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from capibara.builders.files import fingerprints
from capibara.builders.files.fingerprints import Input
from capibara.builders.files.manifest import Manifest
from capibara.builders.files.problems import Problems
from capibara.builders.files.reading import common_folder
from capibara.builders.playbooks import chats, reading, selection, text
from capibara.builders.playbooks.agents import Agent
from capibara.builders.playbooks.bullets import Bullet, domain_name, normalised, one_line, section_name
from capibara.builders.playbooks.chats import PlaybookChats
from capibara.builders.playbooks.filters import AgentFilter, BulletFilter
from capibara.builders.playbooks.merging import BulletMerging
from capibara.builders.playbooks.ranking import BulletRanking
from capibara.builders.playbooks.selection import Entry
from capibara.builders.redaction.redact import Json, Redaction
from capibara.builders.workers import Workers
from capibara.builders.writing import Output, Parts
from capibara.storage import packed

KIND = "playbooks"
_AT_ONCE = 200  # bullets that are redacted together
_FOLDERS = ("agents", "bullets")  # of what was read


@dataclasses.dataclass(frozen=True, kw_only=True)
class Playbooks:
    """The settings of a build.

    Attributes:
      agents: whose bullets are used.
      merging: which bullets are merged.
      bullets: which bullets are kept.
      ranking: how they are ranked, and how many are kept.
      chats: which conversations are made.
      redaction: what is replaced.
    """

    agents: AgentFilter = AgentFilter()
    merging: BulletMerging = BulletMerging()
    bullets: BulletFilter = BulletFilter()
    ranking: BulletRanking = BulletRanking()
    chats: PlaybookChats = PlaybookChats()
    redaction: Redaction = Redaction()


def build(
    paths: Sequence[str],
    folder: str,
    settings: Playbooks,
    *,
    num_workers: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
    problems: Problems | None = None,
) -> Manifest:
    """Writes playbooks/, bullets/ and chats/ into a folder, a file of each per domain, statistics.json and a manifest.

    What an earlier run has read whole is kept; the bytes depend neither on that nor on `num_workers`.

    Args:
      paths: playbooks and agents.
      folder: where to write.
      settings: what is kept and made.
      num_workers: processes that each read one file at a time; 0: this one.
      progress: called with the number of files that are read, and of all.
      problems: what was left out of the input before.

    Raises:
      UserError: a package is not installed, or the folder holds another build or cannot be written.
      TryAgain: a worker process was killed.
    """
    inputs = fingerprints.inputs_of(paths)
    with Output(folder, KIND, dataclasses.asdict(settings), inputs) as output:
        if (manifest := output.done()) is not None:
            return manifest
        _read(inputs, output.scratch, settings.redaction, num_workers, progress)
        counts, result = collections.Counter[str](), Problems()
        result.merge(problems or Problems())
        for name in (name for number in range(len(inputs)) for name in _names(number)):
            if (part := output.scratch.done(name)) is not None:
                counts.update(part.counts)
                result.merge(part.problems)
        domains = _entries(output.scratch, inputs, settings, counts)
        _write(output, domains, settings, counts)
        return output.finish({name: count for name, count in counts.items() if count}, result)


def _write(
    output: Output, domains: Mapping[str, list[Entry]], settings: Playbooks, counts: collections.Counter[str]
) -> None:
    """Writes the files of all domains, and their statistics."""
    result: dict[str, Json] = {}
    for domain, entries in sorted(domains.items()):
        retained, about = selection.select(entries, domain, settings.merging, settings.bullets, settings.ranking)
        name = _file_name(domain)
        with output.part(f"playbooks/{name}.md") as part:
            for line in text.written(selection.playbook_order(retained)):
                part.write(f"{line}\n".encode())
            part.records = len(retained)
        with output.part(f"bullets/{name}.jsonl") as part:
            for item in retained:
                part.write_record(item.as_json())
        with output.part(f"chats/{name}.jsonl") as part:
            for chat in chats.of_domain(retained, settings.chats):
                part.write_record(chat)
                about.conversations[str(chat["kind"])] += 1
        result[domain] = about.as_json(retained)
        counts.update({"bullets": len(retained), "bullets merged": about.merged, "domains": 1})
        counts.update({f"excluded by {reason}": count for reason, count in about.excluded.items()})
        counts.update({f"conversations {kind}": count for kind, count in about.conversations.items()})
        counts["conversations"] += about.conversations.total()
    with output.part("statistics.json") as part:
        part.write(json.dumps({"domains": result}, indent=1, sort_keys=True, ensure_ascii=False).encode() + b"\n")
        part.records = 1


def _file_name(domain: str) -> str:
    """A file name that no other domain has."""
    name = re.sub(r"[^a-z0-9_-]+", "-", domain)[:60]
    return name if name == domain else f"{name.strip('-')}-{_key(domain)[:8]}".lstrip("-")


# --- reading ---------------------------------------------------------------------------------------------------------


def _names(number: int) -> list[str]:
    return [f"{folder}/{number:05d}.jsonl" for folder in _FOLDERS]


def _key(*values: str) -> str:
    """A hash of a name, by which bullets and agents are joined: the name itself may be a secret."""
    return hashlib.blake2b("\n".join(values).casefold().encode("utf-8", "replace"), digest_size=16).hexdigest()


def _read(
    inputs: Sequence[Input],
    scratch: Parts,
    redaction: Redaction,
    num_workers: int,
    progress: Callable[[int, int], None],
) -> None:
    """Writes what every file has, redacted; files that an earlier run has read are kept."""
    paths = [item.path for item in inputs]
    reader = _Reader(parts=scratch, redaction=redaction, common=common_folder(paths))
    todo = [(i, path) for i, path in enumerate(paths) if any(scratch.done(name) is None for name in _names(i))]
    done = itertools.count(len(paths) - len(todo) + 1)
    progress(len(paths) - len(todo), len(paths))
    with Workers(min(num_workers, len(todo)) if len(todo) > 1 else 0) as workers:
        workers.each(reader, todo, lambda: progress(next(done), len(paths)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Reader:
    """Writes the agents and bullets of one file; can be sent to a worker process."""

    parts: Parts
    redaction: Redaction
    common: str

    def __call__(self, task: tuple[int, str]) -> None:
        number, path = task
        agents_name, bullets_name = _names(number)
        name, plain = os.path.relpath(os.path.abspath(path), self.common), packed.plain_name(path)
        keys = [_key("file", plain), _key("agent", os.path.splitext(plain)[0])]
        with self.parts.write(agents_name) as agents, self.parts.write(bullets_name) as bullets:
            result = reading.read(path, bullets.problems, bullets.counts)
            scope = self.redaction.scope()
            while batch := list(itertools.islice(result, _AT_ONCE)):
                redacted: collections.Counter[str] = collections.Counter()
                texts = iter(scope.redact_texts([name, *(entry for item in batch for entry in _texts(item))], redacted))
                shown = next(texts)
                bullets.counts.update({f"redacted {kind}": count for kind, count in redacted.items()})
                for item in batch:
                    if isinstance(item, Agent):
                        agents.write_record(_agent_json(item, texts))
                        agents.counts["agents"] += 1
                    else:
                        bullets.write_record(_bullet_json(item, texts, keys, f"{shown}:{item.line}"))
                        bullets.counts["bullets read"] += 1


def _texts(item: Bullet | Agent) -> list[str]:
    """The texts that are redacted."""
    if isinstance(item, Agent):
        return [item.name, *item.expertise]
    return [item.section, item.content, item.domain or "", item.agent or ""]


def _agent_json(agent: Agent, texts: Iterator[str]) -> dict[str, Json]:
    name = one_line(next(texts))
    expertise: dict[str, Json] = {}
    for skill in agent.expertise.values():
        domain = domain_name(next(texts))
        known = expertise.get(domain)
        expertise[domain] = max(skill, known if isinstance(known, float) else 0.0)
    keys: list[Json] = [_key("agent", agent.name)]
    if agent.playbook is not None:
        keys.append(_key("file", packed.plain_name(agent.playbook)))
    return {
        "name": name,
        "graduation_score": agent.graduation_score,
        "interactions": agent.interactions,
        "success_rate": agent.success_rate,
        "expertise": expertise,
        "line": agent.line,
        "keys": keys,
    }


def _bullet_json(bullet: Bullet, texts: Iterator[str], keys: Sequence[str], source: str) -> dict[str, Json]:
    section, content, domain, agent = itertools.islice(texts, 4)
    return {
        "section": section_name(section),
        "content": normalised(content),
        "helpful": bullet.helpful,
        "harmful": bullet.harmful,
        "domain": domain_name(domain) if domain else None,
        "agent": one_line(agent) or None,
        "line": bullet.line,
        "source": source,
        "keys": [_key("agent", bullet.agent)] if bullet.agent else list(keys),
        "id": _key("id", bullet.id),
    }


# --- joining ---------------------------------------------------------------------------------------------------------


def _records(scratch: Parts, name: str) -> Iterator[dict[str, Json]]:
    with open(scratch.path(name), encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)


def _agents(scratch: Parts, count: int) -> dict[str, Agent]:
    """The agents by the keys of their names and files; of several records of one, the one with most interactions."""
    result: dict[str, Agent] = {}
    for number in range(count):
        for record in _records(scratch, _names(number)[0]):
            keys = record.pop("keys")
            agent = Agent(**record)  # type: ignore[arg-type]  # the record is one of ours
            for key in keys:  # type: ignore[union-attr]  # the record is one of ours
                known = result.get(str(key))
                if known is None or (agent.interactions or 0) > (known.interactions or 0):
                    result[str(key)] = agent
    return result


def _entries(
    scratch: Parts, inputs: Sequence[Input], settings: Playbooks, counts: collections.Counter[str]
) -> dict[str, list[Entry]]:
    """The bullets of the agents that are used, by domain.

    Copies of a file count once. Of one bullet in several states of an agent's playbook (the same identifier and text), the
    largest numbers of votes count, since the later ones include the earlier ones.
    """
    agents = _agents(scratch, len(inputs))
    rejected = {key: settings.agents.rejects(agent) for key, agent in agents.items()}
    of_unknown = settings.agents.rejects(None)
    entries: list[Entry] = []
    states: dict[tuple[str, str, str], int] = {}
    used: set[str] = set()
    for number, item in enumerate(inputs):
        if item.sha256 in used:
            counts["copies of files"] += 1
            counts["bullets in copies of files"] += sum(1 for _ in _records(scratch, _names(number)[1]))
            continue
        for record in _records(scratch, _names(number)[1]):
            keys, name, source = record.pop("keys"), str(record.pop("id")), str(record.pop("source"))
            bullet = Bullet(id="", **record)  # type: ignore[arg-type]  # the record is one of ours
            key = next((str(key) for key in keys if key in agents), None)  # type: ignore[union-attr]  # the record is one of ours
            agent = None if key is None else agents[key]
            if (reason := of_unknown if key is None else rejected[key]) is not None:
                counts[f"excluded by agent {reason}"] += 1
                continue
            used.add(item.sha256)
            owner = key or (str(keys[0]) if bullet.agent else None)  # type: ignore[index]  # the record is one of ours
            entry = Entry(
                bullet=dataclasses.replace(bullet, domain=settings.ranking.domain(bullet, agent)),
                source=source,
                agent=bullet.agent if agent is None else agent.name,
                standing=(0.0, 0.0) if agent is None else (agent.graduation_score or 0.0, agent.success_rate or 0.0),
            )
            state = (owner or "", name, bullet.content)
            if owner is None or state not in states:
                states[state] = len(entries)
                entries.append(entry)
            else:
                counts["earlier states of bullets"] += 1
                entries[states[state]] = _larger(entries[states[state]], entry)
    domains: dict[str, list[Entry]] = collections.defaultdict(list)
    for entry in entries:
        domains[entry.bullet.domain or ""].append(entry)
    return domains


def _larger(entry: Entry, other: Entry) -> Entry:
    """The entry with the largest numbers of votes of two states."""
    helpful, harmful = max(entry.bullet.helpful, other.bullet.helpful), max(entry.bullet.harmful, other.bullet.harmful)
    return dataclasses.replace(entry, bullet=dataclasses.replace(entry.bullet, helpful=helpful, harmful=harmful))
