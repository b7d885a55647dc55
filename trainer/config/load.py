"""Read job files: convert TOML to a validated Job and report all errors at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from trainer.config.credentials import protect, safe_link
from trainer.config.edit import edit_toml
from trainer.config.job import ALTERNATIVES, SCHEMA, Job
from trainer.config.paths import make_absolute
from trainer.config.problems import faults_sentence, problems
from trainer.config.toml_file import FileKind, parse_toml, read_text, table_lines
from trainer.errors import JobError
from trainer.protocol import files, reading
from trainer.protocol.reading import UnusableFileError
from trainer.protocol.records import RENAMED_KEYS, renamed, renamed_key

Data = dict[str, Any]
OLDEST = 1
REMEDY = "Fix this and start again. `python -m trainer new` writes a job file that explains every key."
# Shorter secrets are not replaced in comments: they may be part of ordinary words.
_SHORTEST_SECRET = 6
JOB_FILE = FileKind(
    word="job",
    largest=1024 * 1024,
    limit="1 MiB",
    remedy=REMEDY,
    wrong_file="Use the job.toml itself, not a model or an image.",
    missing="Check the path, or create a job with `python -m trainer new`.",
)


def _state_unused_masks(data: Data) -> Data:
    """Set `dataset.masks` to "none" if it is missing, because schema 1 ignored mask files by default."""
    dataset = data.get("dataset")
    return {**data, "dataset": {"masks": "none", **dataset}} if isinstance(dataset, dict) else data


MIGRATIONS: dict[int, Callable[[Data], Data]] = {1: _state_unused_masks, 2: renamed}
"""For each older schema, the function that converts job data to the next schema; it need not set ``schema``."""


def migrate(data: Data) -> Data:
    """Return ``data`` converted to the current schema; data without ``schema`` is treated as the oldest.

    Raises JobError for an unknown schema: a newer one, or an older one without a migration.
    """
    version = data.get("schema", OLDEST)
    if not isinstance(version, int) or isinstance(version, bool):
        return data  # validation reports it
    if version > SCHEMA:
        raise JobError(
            "job.newer",
            f"The file was written by a newer Impasto (schema {version}); this version reads up to schema {SCHEMA}.",
            "Update Impasto with `python run.py update`.",
        )
    while version < SCHEMA:
        step = MIGRATIONS.get(version)
        if step is None:
            raise JobError(
                "job.schema",
                f"Schema {version} does not exist; the current schema is {SCHEMA}.",
                f"Set schema = {SCHEMA}.",
            )
        data = {**step(data), "schema": version + 1}
        version += 1
    return data


def apply_overrides(data: Data, overrides: Sequence[str]) -> list[str]:
    """Apply each ``key=value`` to ``data`` in order; return a message for each one that could not be set.

    List indexes start at 0 (``dataset.folders.0.repeats=3``). Keys and values are validated later. One of several
    ALTERNATIVES, such as a run length in steps, replaces the one in the file.
    """
    faults = []
    for text in overrides:
        key, equals, value = text.partition("=")
        key = renamed_key(key.strip())  # a queue entry of an earlier version may hold former names
        if not equals or not all(key.split(".")):
            faults.append(f"--set {text}: must have the form key=value, such as recipe.rank=32")
        elif reason := _set(data, key.split("."), _value(value.strip())):
            faults.append(f"{key}: {reason}")
    return faults


def _value(text: str) -> Any:
    """Parse a TOML value; a bare word is a string, so users need no quotes in the shell."""
    try:
        data = reading.parse_toml(f"value = {text}", finite=False)
    except UnusableFileError:
        return text
    return data["value"] if len(data) == 1 else text


def _set(data: Data, steps: list[str], value: Any) -> str | None:
    """Set the value at the key path ``steps``, creating missing tables; return None, or the reason for a failure."""
    place: Any = data
    for number, step in enumerate(steps[:-1]):
        if isinstance(place, dict):
            place = place.setdefault(step, {})
        elif isinstance(place, list):
            if not _index(step, place):
                return _no_item(".".join(steps[:number]), place)
            place = place[int(step)]
        else:
            return f"{'.'.join(steps[:number])} is a single value, not a table"
    return _put(place, steps, value)


def _put(place: Any, steps: list[str], value: Any) -> str | None:
    *parents, last = steps
    if isinstance(place, dict):
        if last in (others := ALTERNATIVES.get(".".join(parents), ())):
            for other in others:
                place.pop(other, None)
        place[last] = value
        return None
    if isinstance(place, list):
        if not _index(last, place):
            return _no_item(".".join(parents), place)
        place[int(last)] = value
        return None
    return f"{'.'.join(parents)} is a single value, not a table"


def _index(step: str, items: list[Any]) -> bool:
    return step.isascii() and step.isdigit() and int(step) < len(items)


def _no_item(key: str, items: list[Any]) -> str:
    return f"no such item; {key} has {len(items)}, starting at 0"


def load_job(path: Path, overrides: Sequence[str] = (), text: str | None = None) -> Job:
    """Read the job file at ``path``; ``overrides`` are ``key=value`` strings that replace values in the file.

    If ``text`` (the file's content when the job was queued) is given, the file itself is not read. Paths in the result
    are absolute; those in the file are relative to its folder.
    Raises JobError, whose ``problems`` list every error: unreadable file, wrong encoding, invalid TOML, invalid keys.
    """
    if text is None:
        text = read_job_text(path)
    return parse_job(text, path.name, path.absolute().parent, overrides)


def read_job_text(path: Path) -> str:
    """Read a job file after removing any password or token from its base link; raises JobError."""
    secure_job_file(path)
    return read_text(path, JOB_FILE)


def secure_job_file(path: Path) -> str | None:
    """Remove a password or token from the base link in a job file; return a message for the user, or None.

    The rest of the file is unchanged. Raises JobError if the file cannot be read or written; invalid TOML is
    reported by `load_job`.
    """
    text = read_text(path, JOB_FILE)
    model = _base_of(text)
    if model is None or safe_link(model).text == model:
        return None
    safe, message = protect(model)
    rewritten = _without_secrets(text, model, safe)
    if _base_of(rewritten) != safe:  # such as escapes in a file that is too long to edit
        sentence = f"Could not remove the password or token from the link in {path}: its notation is not supported."
        raise JobError("job.secret", sentence, "Replace it with ${NAME} yourself and set that variable.")
    try:
        files.write_text(path, rewritten)
    except OSError as error:
        sentence = f"Could not remove the password or token from the link in {path}: {error.strerror or error}."
        remedy = "Make the file writable, or replace the secret with ${NAME} yourself."
        raise JobError("job.unwritable", sentence, remedy) from None
    return f"{path.name}: {message}"


def _base_of(text: str) -> str | None:
    """Return `base.model` from a job's text; None if it is missing or the text is not TOML."""
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
    """Return a job's text with the base link ``model``, in any TOML notation, replaced by ``safe``.

    The link's secrets are replaced everywhere else too, for example in comments.
    """
    rewritten = text.replace(model, safe)
    for name, secret in safe_link(model).secrets.items():
        if len(secret) >= _SHORTEST_SECRET:
            rewritten = rewritten.replace(secret, f"${{{name}}}")
    if _base_of(rewritten) != safe:  # written with escapes
        with suppress(JobError):
            values = parse_toml(rewritten, "job", JOB_FILE)
            values["base"]["model"] = safe
            rewritten = edit_toml(rewritten, values) or rewritten
    return rewritten


def _protect_base(data: dict[str, Any]) -> None:
    """Remove secrets from `base.model`, whether it comes from the file or from the command line."""
    base = data.get("base")
    if isinstance(base, dict) and isinstance(base.get("model"), str) and _is_parsable(base["model"]):
        base["model"], _ = protect(base["model"])


def parse_job(text: str, source: str, folder: Path, overrides: Sequence[str] = ()) -> Job:
    """Parse TOML ``text`` as a Job; errors call the text ``source``, and paths in it are relative to ``folder``."""
    data = migrate(parse_toml(text, source, JOB_FILE))
    faults = apply_overrides(data, overrides)
    _protect_base(data)
    faults += make_absolute(data, folder)
    return _validated(data, source, faults)


def text_with_overrides(text: str, source: str, overrides: Sequence[str]) -> str:
    """Return a job's TOML ``text`` with ``key=value`` strings written into it; its relative paths stay relative.

    Comments are kept unless the text cannot be edited. Raises JobError if it is not TOML or a key cannot be set;
    keys and values are validated by `parse_job`.
    """
    data = migrate(parse_toml(text, source, JOB_FILE))
    faults = apply_overrides(data, overrides)
    _protect_base(data)
    if faults:
        raise JobError("job.invalid", faults_sentence(source, faults), REMEDY, tuple(faults))
    return edit_toml(text, data, RENAMED_KEYS) or "\n".join(table_lines(data, "")) + "\n"


def changed_job(job: Job, overrides: Sequence[str]) -> Job:
    """Return a job with ``key=value`` strings applied; raises JobError like `parse_job`, with "--set" as the source."""
    data = job.model_dump(mode="json", by_alias=True, exclude_unset=True)
    return _validated(data, "--set", apply_overrides(data, overrides))


def _validated(data: Data, source: str, faults: list[str]) -> Job:
    """Return the job that ``data`` describes; raise JobError with ``faults`` and everything that is invalid in it."""
    try:
        job = Job.model_validate(data)
    except ValidationError as error:
        faults = [*faults, *problems(error, Job)]
    if faults:
        # A command line may contain undecodable bytes (surrogates), which a terminal cannot print.
        faults = [fault.encode("utf-8", "backslashreplace").decode("utf-8") for fault in faults]
        raise JobError("job.invalid", faults_sentence(source, faults), REMEDY, tuple(faults))
    return job
