"""Finds out what a base predicts (noise or velocity) and whether its schedule ends in pure noise."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trainer.errors import BaseModelError
from trainer.files.header import Header
from trainer.protocol.reading import open_file

Prediction = Literal["epsilon", "v"]

_SPELLINGS: Mapping[str, Prediction] = {"epsilon": "epsilon", "eps": "epsilon", "v": "v", "v_prediction": "v"}
_NAMED: Mapping[Prediction, str] = {"epsilon": "the noise (epsilon)", "v": "the velocity (v)"}
_HINT = re.compile(r"v[-_ ]?pred|v[-_ ]?param|z(?:t|ero)?[-_ ]?(?:terminal[-_ ]?)?snr", re.IGNORECASE)
_YAML = re.compile(r"^\s*parameterization:\s*[\"']?(eps|v)\b|\b(EpsScaling|VScaling)\b", re.MULTILINE)
_YAML_ZERO_SNR = re.compile(
    r"^\s*\w*(?:zero_terminal_snr|rescale_betas_zero_snr|ztsnr|zsnr):\s*(true|false)\b", re.M | re.I
)
_LARGEST_YAML = 1 << 20


@dataclass(frozen=True, slots=True)
class Target:
    """What a base was trained to predict; None where nothing decides it. `evidence` says how each was found."""

    prediction: Prediction | None
    zero_terminal_snr: bool | None
    evidence: tuple[str, ...]


def single_file_target(path: Path, header: Header) -> Target:
    """Decide by marker tensors, then metadata, then a .yaml of the same name; without any of them by custom epsilon.

    A file name such as "vpred" is a hint that custom does not hold: then nothing is decided.
    """
    return (
        _from_markers(header)
        or _from_metadata(header.metadata)
        or _from_yaml(path.with_suffix(".yaml"))
        or _by_custom(path.name)
    )


def folder_target(folder: Path, scheduler: Mapping[str, Any] | None) -> Target:
    """Decide by a diffusers folder's scheduler config; raises BaseModelError for a base that predicts neither."""
    stated = (scheduler or {}).get("prediction_type")
    if scheduler is None or stated is None:
        return _by_custom(folder.name)
    prediction = _SPELLINGS.get(str(stated))
    if prediction is None:
        sentence = f'"{folder}" predicts "{stated}" according to its scheduler; Impasto trains epsilon and v bases.'
        raise BaseModelError("base.prediction_unsupported", sentence, "Choose another base.")
    zero_snr = bool(scheduler.get("rescale_betas_zero_snr", False))
    ending = " with zero terminal SNR" if zero_snr else ""
    return Target(prediction, zero_snr, (f"It predicts {_NAMED[prediction]}{ending}: its scheduler config says so.",))


def _from_markers(header: Header) -> Target | None:
    """Read the zero-size tensors by which NoobAI and others mark a file; ztsnr means nothing without v_pred."""
    if "v_pred" not in header.tensors:
        return None
    zero_snr = "ztsnr" in header.tensors
    names = '"v_pred" and "ztsnr"' if zero_snr else '"v_pred"'
    ending = " with zero terminal SNR" if zero_snr else ""
    return Target("v", zero_snr, (f"It predicts {_NAMED['v']}{ending}: the file is marked {names}.",))


def _from_metadata(metadata: Mapping[str, str]) -> Target | None:
    prediction = _SPELLINGS.get(metadata.get("modelspec.prediction_type", "").lower())
    if prediction is None:
        return None
    evidence = f"It predicts {_NAMED[prediction]}: modelspec.prediction_type in its metadata says so."
    stated = {"true": True, "false": False}.get(metadata.get("ss_zero_terminal_snr", "").lower())
    return Target(prediction, False if prediction == "epsilon" and stated is None else stated, (evidence,))


def _from_yaml(path: Path) -> Target | None:
    try:
        with open_file(path, "stream") as file:
            text = file.read(_LARGEST_YAML).decode("utf-8", errors="replace")
    except (OSError, ValueError):  # most bases have none
        return None
    found = _YAML.search(text)
    if not found:
        return None
    prediction: Prediction = "v" if found[1] == "v" or found[2] == "VScaling" else "epsilon"
    stated = _YAML_ZERO_SNR.search(text)
    zero_snr = stated[1].lower() == "true" if stated else (False if prediction == "epsilon" else None)
    return Target(prediction, zero_snr, (f"It predicts {_NAMED[prediction]}: {path.name} beside it says so.",))


def _by_custom(name: str) -> Target:
    if hint := _HINT.search(name):
        evidence = f'Its name says "{hint[0]}", but nothing inside or beside it tells what it predicts.'
        return Target(None, None, (evidence,))
    return Target("epsilon", False, (f"It predicts {_NAMED['epsilon']}: nothing marks it as anything else.",))
