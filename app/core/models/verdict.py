"""Judge a value of `base.model`: a path, a link, or a Hugging Face Hub id."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import unquote, urlsplit

from trainer.errors import ImpastoError
from trainer.protocol.files import long_path
from trainer.protocol.records import json_keys

Family = Literal["sd15", "sdxl"]
Tool = Literal[
    "ComfyUI",
    "Fooocus",
    "A1111/Forge",
    "InvokeAI",
    "SwarmUI",
    "Stability Matrix",
    "kohya_ss",
    "OneTrainer",
    "Hugging Face",
    "Impasto",
    "",
]
"""Tool that a folder of models belongs to; "" for a folder that the user added."""
_ENDINGS = (".safetensors", ".ckpt")
_DEEPEST = 4
"""Maximum depth of subfolders to list."""
_MOST = 5_000
"""Maximum number of models to list below one folder."""
_CIVITAI = ("civitai.com", "www.civitai.com", "civitai.green", "civitai.red")
"""Hosts of Civitai, which serves downloads below /api/download/."""


@json_keys("family", "velocity", "problem", "remedy")
@dataclass(frozen=True, slots=True)
class BaseDescription:
    """Facts from a base's header or configs; `problem` says why it cannot be trained on, or is ""."""

    family: Family | None = None
    velocity: bool | None = None
    """Whether the base predicts velocity (v) instead of noise; None if unknown."""
    problem: str = ""
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class FoundBase:
    """A base on this PC, used in place: a .safetensors file or a diffusers folder."""

    path: Path
    tool: Tool
    bytes: int
    description: BaseDescription
    name: str
    """Name to show: the file's stem, the folder's name, or the Hub id."""


@dataclass(frozen=True, slots=True)
class Destination:
    """A folder that a tool loads LoRAs from. `kind` is the tool's name, "" for a folder that the user chose."""

    kind: Tool
    folder: Path


def describe_base(path: Path) -> BaseDescription:
    """Return the description of a base from its header or configs; problems name the file without its folder."""
    from trainer.files.identify import identify_base  # imported late to keep the start of the window fast

    try:
        identity = identify_base(path)
    except ImpastoError as error:
        return BaseDescription(None, None, error.sentence.replace(str(path), path.name), error.remedy)
    except OSError as error:
        return BaseDescription(
            None, None, f"Could not read this base: {error.strerror}.", "Check the disk and the file permissions."
        )
    velocity = None if identity.prediction is None else identity.prediction == "v"
    return BaseDescription(identity.family, velocity)


def state_of(path: Path) -> tuple[int, int]:
    """Return a base's size in bytes and modification time in ns, which identify its version.

    For a folder, these are the total size and the latest time of its configs and weights. Raises OSError if the base
    is gone.
    """
    if not long_path(path).is_dir():
        state = long_path(path).stat()
        return state.st_size, state.st_mtime_ns
    inside = [one.stat() for one in _weights(long_path(path))]
    if not inside:
        raise FileNotFoundError(path)
    return sum(one.st_size for one in inside), max(one.st_mtime_ns for one in inside)


def models_in(place: Path, stopped: Callable[[], bool]) -> Iterator[Path]:
    """Yield the models in `place` and its subfolders, or `place` itself if it is a model."""
    if not place.is_dir() or (place / "model_index.json").is_file():
        yield place
        return
    waiting, found = [(place, 0)], 0
    while waiting and found < _MOST and not stopped():
        folder, depth = waiting.pop()
        files, below = _listed(folder)
        for path in files:
            found += 1
            yield path
        if depth < _DEEPEST:
            waiting.extend((one, depth + 1) for one in reversed(below))


def _listed(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return the models of one folder, and the subfolders to search."""
    try:
        with os.scandir(long_path(folder)) as entries:
            listed = sorted(((entry.name, entry.is_dir()) for entry in entries), key=lambda pair: pair[0].casefold())
    except OSError:
        return [], []
    models = [folder / name for name, is_dir in listed if not is_dir and name.lower().endswith(_ENDINGS)]
    below = [folder / name for name, is_dir in listed if is_dir and not name.startswith(".")]
    whole = [one for one in below if (one / "model_index.json").is_file()]
    return models + whole, [one for one in below if one not in whole]


def _weights(folder: Path) -> list[Path]:
    return [path for pattern in ("*.json", "*/*.json", "*/*.safetensors") for path in folder.glob(pattern)]


Place = Literal["nowhere", "here", "link", "hub"]


@dataclass(frozen=True, slots=True)
class BaseVerdict:
    """Verdict on a value of `base.model`; `place` is where the base is, such as "here" for this PC."""

    text: str
    place: Place
    description: BaseDescription
    bytes: int = 0


def cleaned(written: str) -> str:
    """Return a pasted path without surrounding spaces, the quotes that Windows adds, and file://."""
    text = written.strip()
    if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'":
        text = text[1:-1].strip()
    if text.lower().startswith("file://"):
        from urllib.request import url2pathname  # slow import, rarely needed

        text = url2pathname(unquote(urlsplit(text).path))
    return text


def judge(text: str, found: Iterable[FoundBase] = ()) -> BaseVerdict:
    """Return the verdict on a value of `base.model`. Reads the file's header, so call it on a worker."""
    if not text:
        return BaseVerdict(text, "nowhere", BaseDescription())
    if broken := _broken_rule(text):
        return BaseVerdict(
            text, "nowhere", BaseDescription(None, None, f"This {broken}.", "Correct it, or choose a file.")
        )
    if "://" in text:
        return BaseVerdict(text, "link", _describe_link(text))
    from trainer.config.paths import is_base_path

    if not is_base_path(text, Path.home()):
        known = next((one for one in found if one.name == text and one.tool == "Impasto"), None)
        return BaseVerdict(text, "hub", known.description if known else BaseDescription(), known.bytes if known else 0)
    path = Path(text).expanduser()
    if not path.is_absolute():
        return BaseVerdict(
            text,
            "nowhere",
            BaseDescription(None, None, "This is not a full path.", "Choose the file, or enter its full path."),
        )
    known = next((one for one in found if one.path == path), None)
    return BaseVerdict(text, "here", describe_base(path), known.bytes if known else _bytes(path))


def _broken_rule(text: str) -> str:
    from pydantic import ValidationError

    from trainer.config.base import BaseConfig
    from trainer.config.problems import problems

    try:
        BaseConfig.model_validate({"model": text})
    except ValidationError as error:
        return problems(error, BaseConfig)[0].partition(": ")[2]
    return ""


def _describe_link(link: str) -> BaseDescription:
    """Describe the problem if a link leads to a web page or to an unsupported file.

    All other problems with a link are found and reported only when it is downloaded.
    """
    parts = urlsplit(link)
    if parts.hostname in ("huggingface.co", "hf.co") and "/blob/" in parts.path:
        right = link.replace("/blob/", "/resolve/", 1)
        return BaseDescription(None, None, "This link leads to a web page about the file.", f"Use {right} instead.")
    page = parts.path.strip("/").removesuffix("/tree/main")
    if parts.hostname in ("huggingface.co", "hf.co") and page.count("/") == 1:
        return BaseDescription(None, None, "This link leads to a model page, not to a file.", f"Enter {page} instead.")
    if parts.hostname in _CIVITAI and parts.path.startswith("/models/"):
        remedy = "Copy the link of the Download button on that page."
        return BaseDescription(None, None, "This link leads to a model page, not to a file.", remedy)
    if parts.path.lower().endswith((".ckpt", ".pt", ".bin", ".zip", ".gguf")):
        sentence = f'This link leads to a "{parts.path.rpartition(".")[2]}" file, not to a .safetensors file.'
        return BaseDescription(None, None, sentence, "Look for a .safetensors version of this model on the same page.")
    return BaseDescription()


def _bytes(path: Path) -> int:
    try:
        return path.stat().st_size if path.is_file() else 0
    except OSError:
        return 0
