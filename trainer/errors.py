"""Every error meant for a user: what happened and why, what to do about it, and the exit code it ends in."""

from __future__ import annotations

EXIT_DONE = 0
EXIT_FAULT = 1
EXIT_BAD_INPUT = 2
EXIT_RESUMABLE = 75


class ImpastoError(Exception):
    """Something the user can act on.

    ``code`` is a stable dotted name for programs, ``str(error)`` the sentence, ``remedy`` the next thing to do.
    """

    exit_code = EXIT_BAD_INPUT
    problems: tuple[str, ...] = ()

    def __init__(self, code: str, sentence: str, remedy: str) -> None:
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


def joined(sentence: str, remedy: str) -> str:
    """Return what happened and what to do one after the other, where either may be missing.

    A list of problems may end without a full stop.
    """
    return " ".join(filter(None, (sentence and closed(sentence), remedy)))


def closed(text: str) -> str:
    """Return a text as a sentence that has an end."""
    return text if text.endswith((".", "!", "?")) else f"{text}."
