"""Find out what a base predicts (noise or velocity) and whether its noise schedule ends in pure noise."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.files.header import Header
from trainer.files.statements import (
    METADATA,
    SAMPLING,
    SCHEDULER,
    YAML,
    JobKey,
    Prediction,
    Statement,
    doubts,
    predicted,
)
from trainer.protocol.reading import open_file

_NAMED: Mapping[Prediction, str] = {"epsilon": "the noise (epsilon)", "v": "the velocity (v)"}
_HINT = re.compile(r"v[-_ ]?pred|v[-_ ]?param|z(?:t|ero)?[-_ ]?(?:terminal[-_ ]?)?snr", re.IGNORECASE)
_YAML_LINE = re.compile(r"^[ \t]*(?:-[ \t]+)?(\w+)[ \t]*:[ \t]*(\S[^\n]*?)[ \t]*$", re.MULTILINE)
_YAML_TARGET = re.compile(r"\.(\w*(scaling|discretization|sampling)\w*)$", re.IGNORECASE)
_YAML_ZERO_SNR = ("zero_terminal_snr", "rescale_betas_zero_snr", "ztsnr", "zsnr")
_LARGEST_YAML = 1 << 20


@dataclass(frozen=True, slots=True)
class Target:
    """What a base was trained to predict; None if the user has to decide. `evidence` says how each was found."""

    prediction: Prediction | None
    zero_terminal_snr: bool | None
    evidence: tuple[str, ...]


def single_file_target(path: Path, header: Header, scheduler: Mapping[str, Any] | None) -> Target:
    """Decide by marker tensors, then metadata, a .yaml of the same name, and the scheduler config that a file carries.

    Without any of them a base predicts noise, unless its name says otherwise: then nothing is decided. Raises
    BaseModelError for a process that Impasto does not train, whichever of them states it.
    """
    yaml = path.with_suffix(".yaml")
    beside = tuple(_yaml_statements(yaml))
    metadata = [Statement("its metadata", key, header.metadata[key]) for key in METADATA if key in header.metadata]
    unknown = doubts(str(path), metadata, METADATA)
    unknown |= doubts(str(path), beside, YAML)
    unknown |= _scheduler_doubts(str(path), scheduler, "the scheduler config in its metadata")
    target = (
        _from_markers(header)
        or _from_metadata(header.metadata)
        or _from_yaml(yaml.name, beside)
        or _from_scheduler(scheduler, "the scheduler config in its metadata says so")
        or _by_custom(path.name)
    )
    return _with_doubts(target, unknown)


def folder_target(folder: Path, scheduler: Mapping[str, Any] | None, index: Mapping[str, Any]) -> Target:
    """Decide by a diffusers folder's scheduler config and the scheduler that its model_index.json names.

    Raises BaseModelError for a process that Impasto does not train.
    """
    unknown = doubts(str(folder), _named_in_index(index), SCHEDULER)
    unknown |= _scheduler_doubts(str(folder), scheduler, "scheduler_config.json")
    target = _from_scheduler(scheduler, "its scheduler config says so") or _by_custom(folder.name)
    return _with_doubts(target, unknown)


def _with_doubts(target: Target, unknown: Mapping[JobKey, str]) -> Target:
    """Leave to the user what an unknown statement makes uncertain."""
    if not unknown:
        return target
    prediction = None if "prediction" in unknown else target.prediction
    zero_snr = None if "zero_terminal_snr" in unknown else target.zero_terminal_snr
    return Target(prediction, zero_snr, (*target.evidence, *(_capitalized(text) for text in unknown.values())))


def _capitalized(text: str) -> str:
    return text[0].upper() + text[1:]


def _named_in_index(index: Mapping[str, Any]) -> Iterator[Statement]:
    """Yield the scheduler class of `"scheduler": [library, class]`; both are null in a folder without a scheduler."""
    named = index.get("scheduler")
    if named is not None and named != [None, None]:
        value = named[1] if isinstance(named, list) and len(named) == 2 else named
        yield Statement("model_index.json", "_class_name", value)


def _scheduler_doubts(base: str, scheduler: Mapping[str, Any] | None, source: str) -> dict[JobKey, str]:
    stated = (scheduler or {}).items()
    return doubts(base, [Statement(source, key, value) for key, value in stated if key not in SAMPLING], SCHEDULER)


def _from_scheduler(scheduler: Mapping[str, Any] | None, evidence: str) -> Target | None:
    stated = scheduler or {}
    prediction = predicted(stated.get("prediction_type"))
    if prediction is None:
        return None
    return _target(prediction, stated.get("rescale_betas_zero_snr", False) is True, evidence)


def _from_markers(header: Header) -> Target | None:
    """Read the zero-size tensors by which NoobAI and others mark a file; ztsnr means nothing without v_pred."""
    if "v_pred" not in header.tensors:
        return None
    zero_snr = "ztsnr" in header.tensors
    names = '"v_pred" and "ztsnr"' if zero_snr else '"v_pred"'
    return _target("v", zero_snr, f"the file is marked {names}")


def _from_metadata(metadata: Mapping[str, str]) -> Target | None:
    prediction = predicted(metadata.get("modelspec.prediction_type"))
    if prediction is None:
        return None
    stated = {"true": True, "false": False}.get(metadata.get("ss_zero_terminal_snr", "").lower())
    return _target(prediction, stated, "modelspec.prediction_type in its metadata says so")


def _from_yaml(name: str, statements: Sequence[Statement]) -> Target | None:
    stated = {statement.key: statement.value for statement in statements}
    prediction = predicted(stated.get("parameterization")) or predicted(stated.get("scaling"))
    if prediction is None:
        return None
    zero_snr = next((stated[key] for key in _YAML_ZERO_SNR if isinstance(stated.get(key), bool)), None)
    return _target(prediction, zero_snr, f"{name} beside it says so")


def _target(prediction: Prediction, zero_snr: bool | None, evidence: str) -> Target:
    if prediction == "epsilon" and zero_snr is None:
        zero_snr = False  # no base learns to predict noise in pure noise
    ending = " with zero terminal SNR" if zero_snr else ""
    return Target(prediction, zero_snr, (f"It predicts {_NAMED[prediction]}{ending}: {evidence}.",))


def _by_custom(name: str) -> Target:
    if hint := _HINT.search(name):
        evidence = f'Its name says "{hint[0]}", but nothing inside or beside it says what it predicts.'
        return Target(None, None, (evidence,))
    return Target("epsilon", False, (f"It predicts {_NAMED['epsilon']}: nothing marks it as anything else.",))


def _yaml_statements(path: Path) -> Iterator[Statement]:
    """Read the lines of a .yaml that state the process; most bases have none beside them."""
    try:
        with open_file(path, "stream") as file:
            text = file.read(_LARGEST_YAML).decode("utf-8", errors="replace")
    except (OSError, ValueError):
        return
    for key, value in _YAML_LINE.findall(text):
        scalar = _yaml_scalar(value)
        if key == "target" and (found := _YAML_TARGET.search(str(scalar))):
            yield Statement(path.name, found[2].lower(), found[1])
        elif key in YAML:
            yield Statement(path.name, key, scalar)


def _yaml_scalar(text: str) -> Any:
    """Return the value of a plain or quoted YAML scalar."""
    if quoted := re.match(r"""(["'])(.*?)\1""", text):
        return quoted[2]
    text = re.sub(r"\s+#.*", "", text)
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if text.lower() in ("null", "~"):
        return None
    with contextlib.suppress(ValueError):
        return float(text)
    return text
