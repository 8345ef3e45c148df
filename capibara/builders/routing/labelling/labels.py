"""Labels a text with a domain: by what its record declares, by its run, its imports, its words or its language."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence

from capibara.builders.routing.labelling.domains import Domain, Outcome
from capibara.builders.routing.labelling.facts import Facts

_MOST_SEARCHED = 100_000  # characters of a text in which words are searched
_FEWEST_WITH_CODE = 2  # different words that outweigh the language of code


class LabelSource(enum.StrEnum):
    """What a label rests on, the first that holds.

    DECLARED: the record names the domain.
    KIND: its run failed, or was fixed, and a domain takes such runs.
    IMPORTS: what its code imports.
    WORDS: words that are typical of the domain; of a text with code, only for domains that are no languages.
    LANGUAGE: the language of most of its code.
    """

    DECLARED = "declared"
    KIND = "kind"
    IMPORTS = "imports"
    WORDS = "words"
    LANGUAGE = "language"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Label:
    """The domain of a text.

    Attributes:
      domain: its name.
      source: what it rests on.
      confidence: from 0 to 1.
    """

    domain: str
    source: LabelSource
    confidence: float


class Labels:
    """Labels texts with one of the domains.

    Args:
      domains: in any order.
    """

    def __init__(self, domains: Sequence[Domain]):
        self._domains = tuple(domains)
        self._names = {name.lower(): domain.name for domain in domains for name in (domain.name, *domain.names)}

    def declared(self, name: str) -> str | None:
        """The domain that a record means by a name; None: none of them."""
        return self._names.get(name.strip().lower())

    def of(self, facts: Facts) -> Label | None:
        """The label of a text; None: nothing speaks for any domain.

        Declared: 1. Of a run: 1 with its fix, 0.9 if it failed. Imports: 0.8 + 0.05 for each module, at most 0.95, times
        n / (n + m), where m modules speak for the second best domain. Words: n / (n + 1) times n / (n + m), for n
        different words. Language: the confidence of the language times its share of the code.
        """
        if facts.declared is not None and (name := self.declared(facts.declared)) is not None:
            return Label(domain=name, source=LabelSource.DECLARED, confidence=1.0)
        return self._of_run(facts) or self._of_imports(facts) or self._of_words(facts) or self._of_language(facts)

    def _of_run(self, facts: Facts) -> Label | None:
        for domain in self._domains:
            if facts.outcome is not None and facts.outcome in domain.outcomes:
                confidence = 1.0 if facts.outcome is Outcome.FIXED else 0.9
                return Label(domain=domain.name, source=LabelSource.KIND, confidence=confidence)
        return None

    def _of_imports(self, facts: Facts) -> Label | None:
        modules = facts.imports
        packages = modules | {name.partition("/")[0] for name in modules if not name.startswith(("@", "."))}
        counts = {domain.name: len(packages & {*domain.imports}) for domain in self._domains}
        name, count, share = _best(counts)
        if not count:
            return None
        return _label(name, LabelSource.IMPORTS, min(0.95, 0.8 + 0.05 * count) * share)

    def _of_words(self, facts: Facts) -> Label | None:
        text, has_code = facts.text[:_MOST_SEARCHED], bool(facts.codes)
        counts = {
            domain.name: sum(pattern.search(text) is not None for pattern in domain.patterns)
            for domain in self._domains
            if not (has_code and domain.languages)
        }
        name, count, share = _best(counts)
        if count < (_FEWEST_WITH_CODE if has_code else 1):
            return None
        return _label(name, LabelSource.WORDS, count / (count + 1) * share)

    def _of_language(self, facts: Facts) -> Label | None:
        def size(domain: Domain) -> int:
            return sum(len(code.text) for code in facts.codes if code.language in domain.languages)

        best = max(self._domains, key=size)  # the first of several
        if not size(best):
            return None
        sure = sum(code.confidence * len(code.text) for code in facts.codes if code.language in best.languages)
        return _label(best.name, LabelSource.LANGUAGE, sure / sum(len(code.text) for code in facts.codes))


def _best(counts: Mapping[str, int]) -> tuple[str, int, float]:
    """The name with the largest count, the count, and its share of it and the second largest."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    if not ordered or not ordered[0][1]:
        return "", 0, 0.0
    second = ordered[1][1] if len(ordered) > 1 else 0
    return ordered[0][0], ordered[0][1], ordered[0][1] / (ordered[0][1] + second)


def _label(domain: str, source: LabelSource, confidence: float) -> Label:
    return Label(domain=domain, source=source, confidence=round(confidence, 4))
