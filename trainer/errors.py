"""Every error meant for a user: what happened and why, what to do about it, and the exit code it ends in."""

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
"""The most characters of the sentence or the remedy of an error."""

# What Python says of values of the wrong type, wherever a reader trusts one to be of the right type.
_PYTHONS_WORDS = re.compile(
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
    """Something the user can act on.

    ``code`` is a stable dotted name for programs, ``str(error)`` the sentence, ``remedy`` the next thing to do.
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
        """Let errors pass from one process to another: how they are made again, and what else they hold."""
        return type(self), (self.code, self.sentence, self.remedy), self.__dict__

    @property
    def untold(self) -> tuple[str, ...]:
        """The problems that the sentence does not tell already."""
        return tuple(problem for problem in self.problems if problem not in self.sentence)


class JobError(ImpastoError):
    """A job or preset file that cannot be used; ``problems`` lists every fault of the file at once."""

    def __init__(self, code: str, sentence: str, remedy: str, problems: tuple[str, ...] = ()) -> None:
        super().__init__(code, sentence, remedy)
        self.problems = problems


class BaseModelError(ImpastoError):
    """A base model that is not what the job needs, cannot be read, or cannot be had."""


class DatasetError(ImpastoError):
    """Pictures or captions that leave nothing to train on, or a dataset folder that cannot be read."""

    def __init__(self, code: str, sentence: str, remedy: str, values: Mapping[str, Any] | None = None) -> None:
        """Keep the `values` that the sentence was made of, so that a finding can cross to another process."""
        super().__init__(code, sentence, remedy)
        self.values = {name: _shortened(v) if isinstance(v, str) else v for name, v in (values or {}).items()}


class LoraFileError(ImpastoError):
    """A LoRA file that cannot be read, written, or continued from."""


class RunError(ImpastoError):
    """A run directory that cannot be started, resumed, or spoken to."""


class ResumableError(ImpastoError):
    """The run stopped early but its last checkpoint is good: it can be resumed once the remedy is done."""

    exit_code = EXIT_RESUMABLE


class TrainingFault(ImpastoError):
    """The run cannot go on and repeating it as it is would end the same way."""

    exit_code = EXIT_FAULT


def _shortened(text: str) -> str:
    """Return a text of bounded length: names and values from hostile files may be megabytes long."""
    if len(text) <= LONGEST_MESSAGE:
        return text
    return f"{text[: LONGEST_MESSAGE // 2]} [...] {text[-LONGEST_MESSAGE // 4 :]}"


def joined(sentence: str, remedy: str) -> str:
    """Return what happened and what to do one after the other, where either may be missing.

    A list of problems may end without a full stop.
    """
    return " ".join(filter(None, (sentence and closed(sentence), remedy)))


def closed(text: str) -> str:
    """Return a text as a sentence that has an end."""
    return text if text.endswith((".", "!", "?")) else f"{text}."


def plain_reason(error: BaseException) -> str:
    """Return why contents of a file or input were refused, as a part of a sentence.

    This is the one place where what Python and its libraries say of data becomes words for users: of what pydantic
    found the first fault, of Python's own errors what they mean. Texts that we raise ourselves stay as they are.
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
    if isinstance(error, AttributeError | IndexError) or _PYTHONS_WORDS.search(text) or not text:
        return "a value is of the wrong kind"
    return text


def _first_fault(detail: Mapping[str, Any]) -> str:
    """Return what pydantic found as "key: must be a whole number"."""
    place = ".".join(str(part) for part in detail.get("loc", ()))
    context = detail.get("ctx") or {}
    kind = str(detail.get("type", ""))
    if "error" in context:  # a rule of ours
        reason = str(context["error"])
    elif kind == "json_invalid":
        reason = "is not valid JSON"
    else:
        expected = next((words for start, words in _EXPECTED.items() if kind.startswith(start)), "")
        reason = expected.format(**context) if expected else "has a value that cannot be used"
    return f"{place}: {reason}" if place else reason
