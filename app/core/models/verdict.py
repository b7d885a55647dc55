"""Judges what somebody writes as a base: a path, a link, or an id of the Hugging Face Hub."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import unquote, urlsplit

from app.core.models.found import Found, Told
from app.core.models.telling import tell

Place = Literal["nowhere", "here", "link", "hub"]
_CIVITAI = ("civitai.com", "www.civitai.com", "civitai.green", "civitai.red")
"""What it offers for download lies at /api/download/."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """`place` says where the base lies: on this PC, or where training will bring it from."""

    text: str
    place: Place
    told: Told
    bytes: int = 0


def cleaned(written: str) -> str:
    """Return a text without what comes along when it is copied: blanks, the quotes of Windows, file:// before it."""
    text = written.strip()
    if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'":
        text = text[1:-1].strip()
    if text.lower().startswith("file://"):
        from urllib.request import url2pathname  # loads half of the network; hardly anybody pastes such a text

        text = url2pathname(unquote(urlsplit(text).path))
    return text


def judge(text: str, found: Iterable[Found] = ()) -> Verdict:
    """Say what a text for `base.model` means; reads the file's header, so it belongs on a worker."""
    if not text:
        return Verdict(text, "nowhere", Told())
    if broken := _broken_rule(text):
        return Verdict(text, "nowhere", Told(None, None, f"This {broken}.", "Correct it, or choose a file."))
    if "://" in text:
        return Verdict(text, "link", _told_link(text))
    from trainer.config.paths import is_base_path

    if not is_base_path(text, Path.home()):
        known = next((one for one in found if one.name == text and one.tool == "Impasto"), None)
        return Verdict(text, "hub", known.told if known else Told(), known.bytes if known else 0)
    path = Path(text).expanduser()
    if not path.is_absolute():
        return Verdict(
            text, "nowhere", Told(None, None, "This is no whole path.", "Choose the file, or write all of it.")
        )
    known = next((one for one in found if one.path == path), None)
    return Verdict(text, "here", tell(path), known.bytes if known else _bytes(path))


def _broken_rule(text: str) -> str:
    from pydantic import ValidationError

    from trainer.config.base import BaseConfig
    from trainer.config.problems import problems

    try:
        BaseConfig.model_validate({"model": text})
    except ValidationError as error:
        return problems(error, BaseConfig)[0].partition(": ")[2]
    return ""


def _told_link(link: str) -> Told:
    """Refuse what is known to give a page instead of a file; everything else shows when it is downloaded."""
    parts = urlsplit(link)
    if parts.hostname in ("huggingface.co", "hf.co") and "/blob/" in parts.path:
        right = link.replace("/blob/", "/resolve/", 1)
        return Told(None, None, "This link leads to a web page about the file.", f"The file itself is {right}")
    page = parts.path.strip("/").removesuffix("/tree/main")
    if parts.hostname in ("huggingface.co", "hf.co") and page.count("/") == 1:
        return Told(None, None, "This link leads to the page of a model.", f"Write {page} instead.")
    if parts.hostname in _CIVITAI and parts.path.startswith("/models/"):
        remedy = "Copy the link of the Download button on that page."
        return Told(None, None, "This link leads to the page of a model.", remedy)
    if parts.path.lower().endswith((".ckpt", ".pt", ".bin", ".zip", ".gguf")):
        sentence = f'This link leads to a "{parts.path.rpartition(".")[2]}" file, which is no .safetensors file.'
        return Told(None, None, sentence, "Look for the .safetensors form of this model on the same page.")
    return Told()


def _bytes(path: Path) -> int:
    try:
        return path.stat().st_size if path.is_file() else 0
    except OSError:
        return 0
