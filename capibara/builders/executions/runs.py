"""An execution with what is known of it: its language, patterns and scores."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from capibara.builders.executions import languages, patterns, scores, syntax
from capibara.builders.executions.languages import Detected
from capibara.builders.executions.patterns import Patterns
from capibara.builders.executions.reading import Execution, Form
from capibara.builders.executions.scores import Scores
from capibara.builders.redaction.redact import Json

NO_PATTERNS = Patterns(counts={})
_MOST_PARSED = 1 << 16  # characters of code that is parsed; the default filter excludes longer code
_MOST_WRONG = 0.5  # share of code that does not parse, above which its patterns say nothing


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A redacted execution with what is known of it.

    Attributes:
      execution: the execution; its code has no fence.
      source: its file, relative to the folder of all inputs, and line.
      language: the language of its code.
      patterns: what the code uses; empty where there is no grammar for the language.
      error_share: the part of the code that does not parse; None: there is no grammar for the language.
      scores: its quality and success.
      earlier_imports: modules that earlier cells of its session import, and whose names its code uses.
    """

    execution: Execution
    source: str
    language: Detected
    patterns: Patterns
    error_share: float | None
    scores: Scores
    earlier_imports: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Json]:
        """The record of the run as the builder writes it."""
        execution, language = self.execution, self.language
        failure = execution.failure
        return {
            "source": self.source,
            "form": str(execution.form),
            "session": execution.session,
            "time_s": execution.time_s,
            "execution_count": execution.execution_count,
            "task": execution.task,
            "language": language.name,
            "language_source": str(language.source),
            "language_confidence": language.confidence,
            "code": execution.code,
            "stdout": execution.stdout,
            "stderr": execution.stderr,
            "results": [
                {"texts": dict(result.texts), "formats": list(result.formats), "is_main": result.is_main}
                for result in execution.results
            ],
            "error": None if failure is None else dataclasses.asdict(failure),
            "exit_code": execution.exit_code,
            "passed": execution.passed,
            "patterns": _numbers(self.patterns.counts),
            "functions": list(self.patterns.functions),
            "classes": list(self.patterns.classes),
            "imports": list(self.patterns.imports),
            "earlier_imports": list(self.earlier_imports),
            "tables": list(self.patterns.tables),
            "error_share": self.error_share,
            "success": self.scores.success,
            "quality": self.scores.quality,
            "quality_parts": _numbers(self.scores.parts),
        }


def _numbers(values: Mapping[str, int] | Mapping[str, float]) -> dict[str, Json]:
    return dict(values.items())


def analysed(execution: Execution, source: str) -> Run:
    """Finds the language, patterns and scores of an execution.

    Args:
      execution: the execution, redacted.
      source: its file and line.

    Raises:
      UserError: tree-sitter or a grammar is not installed.
    """
    declared = "shell" if execution.form is Form.COMMAND else execution.language
    language = languages.detect(execution.code, declared)
    execution = dataclasses.replace(execution, code=language.code)
    parsed = syntax.parse(language.code, language.name or "") if len(language.code) <= _MOST_PARSED else None
    result = NO_PATTERNS
    if parsed is not None and parsed.error_share <= _MOST_WRONG:
        result = patterns.extract(parsed)
    share = None if parsed is None else round(parsed.error_share, 6)
    return Run(
        execution=execution,
        source=source,
        language=language,
        patterns=result,
        error_share=share,
        scores=scores.of(execution, language, result, share),
    )
