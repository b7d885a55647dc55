"""Brings job files written by older versions to the present schema, one version at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trainer.config.job import SCHEMA
from trainer.errors import JobError

Data = dict[str, Any]


def _state_unused_masks(data: Data) -> Data:
    """Write out what schema 1 meant by an absent `dataset.masks`: mask files are ignored."""
    dataset = data.get("dataset")
    return {**data, "dataset": {"masks": "none", **dataset}} if isinstance(dataset, dict) else data


OLDEST = 1
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
