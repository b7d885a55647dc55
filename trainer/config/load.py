"""Reads a job file: TOML to a checked Job, with everything that is wrong with it named at once."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from trainer.config.credentials import protect, safe_link
from trainer.config.job import SCHEMA, Job
from trainer.config.paths import make_absolute
from trainer.config.problems import faults_sentence, problems
from trainer.config.recipe import LENGTH_KEYS
from trainer.config.toml_file import FileKind, parse_toml, read_text
from trainer.errors import JobError
from trainer.protocol import files, reading
from trainer.protocol.reading import UnusableFileError

Data = dict[str, Any]
OLDEST = 1
REMEDY = "Correct what is named and start again; `python -m trainer new` writes a job file with every key explained."
# A shorter secret may be part of other words in the file's comments.
_SHORTEST_SECRET = 6
JOB_FILE = FileKind(
    word="job",
    largest=1024 * 1024,
    limit="1 MiB",
    remedy=REMEDY,
    wrong_file="Name the job.toml itself, not a model or a picture.",
    missing="Check the path, or write a new job with `python -m trainer new`.",
)


def _state_unused_masks(data: Data) -> Data:
    """Write out what schema 1 meant by an absent `dataset.masks`: mask files are ignored."""
    dataset = data.get("dataset")
    return {**data, "dataset": {"masks": "none", **dataset}} if isinstance(dataset, dict) else data


MIGRATIONS: dict[int, Callable[[Data], Data]] = {1: _state_unused_masks}
"""For each older schema, the function that turns its data into that of the next one; it need not set ``schema``."""


def migrate(data: Data) -> Data:
    """Return ``data`` as the present schema has it; a file that names no schema is taken for the oldest.

    Raises JobError for a schema this version does not know: newer ones, and older ones without a migration.
    """
    version = data.get("schema", OLDEST)
    if not isinstance(version, int) or isinstance(version, bool):
        return data  # validation names the key and says what it must be
    if version > SCHEMA:
        raise JobError(
            "job.newer",
            f"The file is written for schema {version}, by a newer Impasto; this one reads schemas up to {SCHEMA}.",
            "Update Impasto (python run.py update), or let the newer one run this job.",
        )
    while version < SCHEMA:
        step = MIGRATIONS.get(version)
        if step is None:
            raise JobError(
                "job.schema",
                f"The file names schema {version}, which never was one; the present schema is {SCHEMA}.",
                f"Write schema = {SCHEMA}.",
            )
        data = {**step(data), "schema": version + 1}
        version += 1
    return data


def apply_overrides(data: Data, overrides: Sequence[str]) -> list[str]:
    """Set each ``key=value`` in ``data``, in order, and return what could not be set, one sentence each.

    Places in lists are counted from 0 (``dataset.folders.0.repeats=3``). Whether a key exists and suits its value is
    left to validation, which then names it. A length of the run replaces the length that the file states.
    """
    faults = []
    for text in overrides:
        key, equals, value = text.partition("=")
        key = key.strip()
        if not equals or not all(key.split(".")):
            faults.append(f"--set {text}: must be written key=value, such as recipe.rank=32")
        elif reason := _set(data, key.split("."), _value(value.strip())):
            faults.append(f"{key}: {reason}")
    return faults


def _value(text: str) -> Any:
    """Read a TOML value; a bare word is text, so that no quotes need to survive the shell."""
    try:
        data = reading.parse_toml(f"value = {text}", finite=False)
    except UnusableFileError:
        return text
    return data["value"] if len(data) == 1 else text


def _set(data: Data, steps: list[str], value: Any) -> str | None:
    """Put ``value`` in its place, making the tables on the way; the reason when there is no such place."""
    place: Any = data
    for number, step in enumerate(steps[:-1]):
        if isinstance(place, dict):
            place = place.setdefault(step, {})
        elif isinstance(place, list):
            if not _index(step, place):
                return _no_item(".".join(steps[:number]), place)
            place = place[int(step)]
        else:
            return f"{'.'.join(steps[:number])} is a single value and has no keys of its own"
    return _put(place, steps, value)


def _put(place: Any, steps: list[str], value: Any) -> str | None:
    *parents, last = steps
    if isinstance(place, dict):
        if parents == ["recipe"] and last in LENGTH_KEYS:
            for other in LENGTH_KEYS:
                place.pop(other, None)
        place[last] = value
        return None
    if isinstance(place, list):
        if not _index(last, place):
            return _no_item(".".join(parents), place)
        place[int(last)] = value
        return None
    return f"{'.'.join(parents)} is a single value and has no keys of its own"


def _index(step: str, items: list[Any]) -> bool:
    return step.isascii() and step.isdigit() and int(step) < len(items)


def _no_item(key: str, items: list[Any]) -> str:
    return f"there is no such item; {key} has {len(items)}, counted from 0"


def load_job(path: Path, overrides: Sequence[str] = (), text: str | None = None) -> Job:
    """Read the job file at ``path``; ``overrides`` are ``key=value`` texts that win over the file.

    ``text`` is what the file said when it was put into the queue, and then the file itself is not read.
    Paths in the result are absolute, those of the file counted from its folder.
    Raises JobError, whose ``problems`` name every fault: unreadable file, wrong encoding, broken TOML, bad keys.
    """
    if text is None:
        text = read_job_text(path)
    return parse_job(text, path.name, path.absolute().parent, overrides)


def read_job_text(path: Path) -> str:
    """Read a job file, first rewritten without a password or token in its base link; raises JobError."""
    secure_job_file(path)
    return read_text(path, JOB_FILE)


def secure_job_file(path: Path) -> str | None:
    """Rewrite a job file whose base link contains a password or token; return a message for the user where it did.

    Comments and everything else stay as they are. Raises JobError when the file cannot be read or written; broken TOML
    is left to `load_job`.
    """
    text = read_text(path, JOB_FILE)
    model = _base_of(text)
    if model is None or safe_link(model).text == model:
        return None
    safe, message = protect(model)
    rewritten = _without_secrets(text, model, safe)
    if _base_of(rewritten) != safe:  # such as escapes in an inline table
        sentence = f"Could not remove the password or token from the link in {path}: it is written in an unusual way."
        raise JobError("job.secret", sentence, "Replace it with ${NAME} yourself and set that variable.")
    try:
        files.write_text(path, rewritten)
    except OSError as error:
        sentence = f"Could not remove the password or token from the link in {path}: {error.strerror or error}."
        remedy = "Allow writing there, or remove it from the link yourself."
        raise JobError("job.unwritable", sentence, remedy) from None
    return f"{path.name}: {message}"


def _base_of(text: str) -> str | None:
    """Return `base.model` of a job's text; None where it has none or the text is not TOML."""
    try:
        base = parse_toml(text, "job", JOB_FILE).get("base")
    except JobError:
        return None
    model = base.get("model") if isinstance(base, dict) else None
    return model if isinstance(model, str) and _is_parsable(model) else None


def _is_parsable(link: str) -> bool:
    try:
        safe_link(link)
    except ValueError:  # validation refuses it by name
        return False
    return True


def _without_secrets(text: str, model: str, safe: str) -> str:
    """Replace a link in a job's text, in whichever way TOML wrote it, and its secrets in comments."""
    rewritten = text.replace(model, safe)
    for name, secret in safe_link(model).secrets.items():
        if len(secret) >= _SHORTEST_SECRET:
            rewritten = rewritten.replace(secret, f"${{{name}}}")
    if _base_of(rewritten) != safe:  # written with escapes
        line = re.compile(r"(?m)^(\s*(?:base\s*\.\s*)?model\s*=\s*).*$")
        rewritten = line.sub(lambda match: match[1] + json.dumps(safe), rewritten)
    return rewritten


def _protect_base(data: dict[str, Any]) -> None:
    """Take the secrets out of `base.model`, whoever wrote them there: the command line too."""
    base = data.get("base")
    if isinstance(base, dict) and isinstance(base.get("model"), str) and _is_parsable(base["model"]):
        base["model"], _ = protect(base["model"])


def parse_job(text: str, source: str, folder: Path, overrides: Sequence[str] = ()) -> Job:
    """Make a Job of TOML ``text``; ``source`` names it in errors, ``folder`` is what its paths are relative to."""
    data = migrate(parse_toml(text, source, JOB_FILE))
    faults = apply_overrides(data, overrides)
    _protect_base(data)
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
