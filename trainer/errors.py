"""Errors for users: what happened, why, what to do, and the exit code of the process."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

EXIT_DONE = 0
EXIT_FAULT = 1
EXIT_BAD_INPUT = 2
EXIT_RESUMABLE = 75

LONGEST_MESSAGE = 20_000
"""Maximum length of an error's sentence or remedy in characters."""

# Messages of Python's own exceptions for values of a wrong type, which users should not see.
_PYTHON_MESSAGES = re.compile(
    r"unsupported operand|object (is|has|of|cannot|does)|argument (must|of|should)|keyword argument|positional argument"
    r"|indices must|iterable|unhashable|unpack|invalid literal|could not convert|not supported between"
    r"|cannot convert|must be (str|int|a string|real)|expected str|too large to|embedded null|Exceeds the limit"
)
_EXPECTED: Mapping[str, str] = {
    "missing": "is missing",
    "extra_forbidden": "is not known",
    "int": "must be a whole number",
    "bool": "must be true or false",
    "float": "must be a number",
    "finite_number": "must be a finite number",
    "string_too_long": "has more than {max_length} characters",
    "string_too_short": "must not be empty",
    "string": "must be text",
    "literal_error": "must be {expected}",
    "greater_than_equal": "must be at least {ge}",
    "greater_than": "must be above {gt}",
    "less_than_equal": "must be at most {le}",
    "less_than": "must be below {lt}",
    "multiple_of": "must be a multiple of {multiple_of}",
    "list": "must be a list",
    "tuple": "must be a list",
    "too_long": "must have at most {max_length} items",
    "too_short": "must have at least {min_length} items",
    "dict": "must be a table",
    "model": "must be a table",
}


class ImpastoError(Exception):
    """An error that the user can fix.

    ``code`` is a stable dotted name for programs, ``str(error)`` the sentence, and ``remedy`` what to do next.
    """

    exit_code = EXIT_BAD_INPUT
    problems: tuple[str, ...] = ()

    def __init__(self, code: str, sentence: str, remedy: str) -> None:
        sentence, remedy = (_shortened(text) for text in (sentence, remedy))
        super().__init__(sentence)
        self.code = code
        self.sentence = sentence
        self.remedy = remedy

    def __reduce__(self) -> tuple[object, ...]:
        """Return what pickle needs to rebuild the error, including extra attributes."""
        return type(self), (self.code, self.sentence, self.remedy), self.__dict__

    @property
    def unlisted_problems(self) -> tuple[str, ...]:
        """Return the problems that the sentence does not already contain."""
        return tuple(problem for problem in self.problems if problem not in self.sentence)


class JobError(ImpastoError):
    """A job or preset file cannot be used; ``problems`` lists all problems in the file."""

    def __init__(self, code: str, sentence: str, remedy: str, problems: tuple[str, ...] = ()) -> None:
        super().__init__(code, sentence, remedy)
        self.problems = problems


class BaseModelError(ImpastoError):
    """A base model cannot be read or downloaded, or is not what the job needs."""


class DatasetError(ImpastoError):
    """A dataset or one of its files cannot be used, or there is nothing to train on."""

    def __init__(self, code: str, sentence: str, remedy: str, values: Mapping[str, Any] | None = None) -> None:
        """Create an error; `values` are those that the sentence contains, as plain data for other processes."""
        super().__init__(code, sentence, remedy)
        self.values = {name: _shortened(v) if isinstance(v, str) else v for name, v in (values or {}).items()}


class LoraFileError(ImpastoError):
    """A LoRA file cannot be read or written, or training cannot continue from it."""


class RunError(ImpastoError):
    """A run cannot be started or resumed, or cannot be sent a command."""


class ResumableError(ImpastoError):
    """The run stopped early with a valid checkpoint; it can be resumed after the cause is fixed."""

    exit_code = EXIT_RESUMABLE


class TrainingError(ImpastoError):
    """The run cannot continue, and running it again unchanged would fail the same way."""

    exit_code = EXIT_FAULT


def _shortened(text: str) -> str:
    """Return a text shortened to the maximum length; names and values in hostile files may be megabytes long."""
    if len(text) <= LONGEST_MESSAGE:
        return text
    return f"{text[: LONGEST_MESSAGE // 2]} [...] {text[-LONGEST_MESSAGE // 4 :]}"


def sentence_and_remedy(sentence: str, remedy: str) -> str:
    """Return sentence and remedy as one text; either may be empty, and the sentence gets a period if needed."""
    return " ".join(filter(None, (sentence and with_period(sentence), remedy)))


def with_period(text: str) -> str:
    """Return a text with a period at the end, unless it already ends with punctuation."""
    return text if text.endswith((".", "!", "?")) else f"{text}."


def plain_reason(error: BaseException) -> str:
    """Return why a file or an input was rejected, as part of a sentence.

    Only this function turns exceptions of Python and its libraries into text for users: the first problem that pydantic
    found, or the meaning of Python's own exceptions. Messages that Impasto raises itself are returned unchanged.
    """
    if callable(details := getattr(error, "errors", None)) and (found := details()):
        return _first_fault(found[0])
    if isinstance(error, json.JSONDecodeError):
        return f"it is not valid JSON at line {error.lineno}, column {error.colno}"
    if isinstance(error, UnicodeError):
        return "it is not UTF-8 text"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, KeyError):
        return f'"{error.args[0]}" is missing' if error.args else "a key is missing"
    if isinstance(error, OSError):
        return error.strerror or str(error)
    text = str(error)
    if isinstance(error, AttributeError | IndexError) or _PYTHON_MESSAGES.search(text) or not text:
        return "a value has the wrong type"
    return text


def _first_fault(detail: Mapping[str, Any]) -> str:
    """Return a problem found by pydantic as text, such as "key: must be a whole number"."""
    place = ".".join(str(part) for part in detail.get("loc", ()))
    context = detail.get("ctx") or {}
    kind = str(detail.get("type", ""))
    if "error" in context:  # raised by one of our validators
        reason = str(context["error"])
    elif kind == "json_invalid":
        reason = "is not valid JSON"
    else:
        expected = next((words for start, words in _EXPECTED.items() if kind.startswith(start)), "")
        reason = expected.format(**context) if expected else "has a value that cannot be used"
    return f"{place}: {reason}" if place else reason
