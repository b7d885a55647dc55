"""Reads a job file: TOML to a checked Job, with everything that is wrong with it named at once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from trainer.config.job import Job
from trainer.config.migrate import migrate
from trainer.config.overrides import apply_overrides
from trainer.config.paths import make_absolute
from trainer.config.problems import faults_sentence, problems
from trainer.config.toml_file import FileKind, parse_toml, read_text
from trainer.errors import JobError

REMEDY = "Correct what is named and start again; `python -m trainer new` writes a job file with every key explained."
JOB_FILE = FileKind(
    word="job",
    largest=1024 * 1024,
    limit="1 MiB",
    remedy=REMEDY,
    wrong_file="Name the job.toml itself, not a model or a picture.",
    missing="Check the path, or write a new job with `python -m trainer new`.",
)


def load_job(path: Path, overrides: Sequence[str] = (), text: str | None = None) -> Job:
    """Read the job file at ``path``; ``overrides`` are ``key=value`` texts that win over the file.

    ``text`` is what the file said when it was put into the queue, and then the file itself is not read.
    Paths in the result are absolute, those of the file counted from its folder.
    Raises JobError, whose ``problems`` name every fault: unreadable file, wrong encoding, broken TOML, bad keys.
    """
    said = read_text(path, JOB_FILE) if text is None else text
    return parse_job(said, path.name, path.absolute().parent, overrides)


def parse_job(text: str, source: str, folder: Path, overrides: Sequence[str] = ()) -> Job:
    """Make a Job of TOML ``text``; ``source`` names it in errors, ``folder`` is what its paths are relative to."""
    data = migrate(parse_toml(text, source, JOB_FILE))
    faults = apply_overrides(data, overrides)
    faults += make_absolute(data, folder)
    try:
        job = Job.model_validate(data)
    except ValidationError as error:
        faults = [*faults, *problems(error, Job)]
    if faults:
        # A command line may hold bytes that are no text, which no terminal would print.
        faults = [fault.encode("utf-8", "backslashreplace").decode("utf-8") for fault in faults]
        raise JobError("job.invalid", faults_sentence(source, faults), REMEDY, tuple(faults))
    return job
