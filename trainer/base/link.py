"""Brings a base from a direct link: resumable, checked, and never twice."""

from __future__ import annotations

import hashlib
import re
from email.message import Message
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import unquote, urldefrag, urlsplit

import httpx2

from trainer.config.credentials import SafeLink, address_of, safe_link
from trainer.errors import BaseModelError
from trainer.files.hashing import digest_file, remember_sha256
from trainer.files.header import read_header
from trainer.protocol import files, locks, places
from trainer.protocol.events import OnPhase
from trainer.protocol.files import safe_name
from trainer.protocol.reading import UnusableFileError, read_json

_LOOPBACK = {"127.0.0.1", "::1", "localhost"}
_EXPECTED = re.compile(r"sha256=([0-9a-fA-F]{64})")
_PARTIAL, _RANGE_REFUSED = 206, 416  # HTTP
_TIMEOUT = 30.0  # seconds without a single byte


def fetch_link(link: str, progress: OnPhase | None = None) -> Path:
    """Return where the file of an https link lies on this machine, downloading what is not here yet.

    An interrupted download goes on where it stopped if the server lets it. With `#sha256=...` at the link's end the
    file must have that hash. Raises BaseModelError when the file cannot be had, is no .safetensors file, is not the one
    expected, or there is no room, and OSError when writing fails.
    """
    safe = safe_link(link)
    stated = _EXPECTED.fullmatch(urlsplit(safe.text).fragment)
    address = urlsplit(safe.text)
    _check_scheme(address.scheme, address.hostname or "")
    download = _Download(safe, stated[1].lower() if stated else None, progress)
    return download.finished() or download.run()


class _Download:
    """One link's folder: the file once it is whole, before that the part that is here."""

    def __init__(self, link: SafeLink, expected: str | None, progress: OnPhase | None) -> None:
        self.link = link
        text = urldefrag(link.text).url
        self.shown = text.partition("?")[0]
        self.expected = expected
        self.progress = progress
        self.folder = places.models_folder() / "links" / hashlib.sha256(text.encode()).hexdigest()[:16]
        self.part = self.folder / "download.part"
        self.notes = self.folder / "download.json"

    def finished(self) -> Path | None:
        """Return the file if it was downloaded whole before; raises BaseModelError when it is not the one expected."""
        notes = self._read_notes()
        path = self.folder / safe_name(str(notes.get("name", "")))
        if "sha256" not in notes or not path.is_file() or path.stat().st_size != notes.get("size"):
            return None
        self._check_hash(str(notes["sha256"]))
        return path

    def run(self) -> Path:
        """Download until the file is whole, as often as another try brings more of it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            with locks.held(self.folder / "lock", patience=0):
                return self._run()
        except locks.LockBusyError as error:
            sentence = f'"{self.shown}" is being downloaded by another process.'
            raise BaseModelError("base.download_busy", sentence, "Wait for it, then start again.") from error

    def _run(self) -> Path:
        while True:
            before = self._have()
            try:
                name = self._attempt()
                return self._accept(name)
            except httpx2.InvalidURL:  # its message quotes the address
                sentence = f'"{self.shown}" is not a valid link.'
                raise BaseModelError("base.link", sentence, "Copy the link again.") from None
            except httpx2.TransportError as error:
                if self._have() <= before:
                    self._refuse_interrupted(error)

    def _attempt(self) -> str:
        """Ask for what is missing and append it; returns the file's name."""
        headers = {"Accept-Encoding": "identity", **self._range()}
        with (
            httpx2.Client(follow_redirects=True, timeout=_TIMEOUT, event_hooks={"request": [_check_request]}) as client,
            client.stream("GET", urldefrag(address_of(self.link)).url, headers=headers) as response,
        ):
            if response.status_code == _RANGE_REFUSED and self.part.exists():
                self.part.unlink()  # it is longer than the file that is now there
                return self._attempt()
            self._check_response(response)
            name = self._name(response)
            start = self._have() if response.status_code == _PARTIAL else 0
            length = response.headers.get("content-length")
            total = start + int(length) if length else 0
            self._check_room(total - start)
            self._write_notes({"name": name, "validator": _validator(response)})
            with self.part.open("ab" if start else "wb") as file:
                for block in response.iter_raw():
                    file.write(block)
                    start += len(block)
                    if self.progress:
                        self.progress("download", start, max(start, total))
            return name

    def _accept(self, name: str) -> Path:
        """Check the whole file and give it its name."""
        digest = digest_file(self.part)
        try:
            self._check_hash(digest)
            read_header(self.part)
        except BaseModelError:
            self.part.unlink()  # there is nothing in it to go on from
            raise
        target = self.folder / name
        files.replace(self.part, target)
        self._write_notes({"name": name, "address": self.shown, "size": target.stat().st_size, "sha256": digest})
        remember_sha256(target, digest)
        return target

    def _range(self) -> dict[str, str]:
        """Ask for the rest only of the very file that the part is of; without a validator it is begun anew."""
        validator, have = self._read_notes().get("validator"), self._have()
        return {"Range": f"bytes={have}-", "If-Range": str(validator)} if validator and have else {}

    def _have(self) -> int:
        return self.part.stat().st_size if self.part.exists() else 0

    def _name(self, response: httpx2.Response) -> str:
        message = Message()
        message["content-disposition"] = response.headers.get("content-disposition", "")
        name = safe_name(message.get_filename() or unquote(Path(response.url.path).name))
        if not name.lower().endswith(".safetensors"):
            sentence = f'"{self.shown}" gives "{name}", which is no .safetensors file.'
            raise BaseModelError("base.not_safetensors", sentence, "Use the download link of the .safetensors file.")
        return name

    def _check_response(self, response: httpx2.Response) -> None:
        status, kind = response.status_code, response.headers.get("content-type", "")
        if status in (401, 403):
            reason, remedy = "wants you to log in", "Download the file in your browser, and give its path as the base."
        elif status in (404, 410):
            reason, remedy = "has no file there", "Check the link."
        elif status >= 400:
            reason, remedy = f"answered with error {status}", "Try again later."
        elif kind.startswith(("text/html", "application/xhtml")):
            reason, remedy = "gives a web page, not a file", "Copy the link of the download button, not of the page."
        else:
            return
        raise BaseModelError("base.link", f'"{self.shown}": the server {reason}.', remedy)

    def _check_room(self, needed: int) -> None:
        free = places.free_bytes(self.folder)
        if needed > free:
            room = f'{needed / 1e9:.1f} GB more on the disk of "{self.folder}", which has {free / 1e9:.1f} GB'
            sentence = f'"{self.shown}" needs {room}.'
            raise BaseModelError(
                "base.disk_full", sentence, "Make room, or set IMPASTO_HOME to a folder on another disk."
            )

    def _check_hash(self, digest: str) -> None:
        if self.expected and digest != self.expected:
            sentence = f'"{self.shown}" has the SHA-256 {digest}, not {self.expected} as the link says.'
            raise BaseModelError(
                "base.wrong_hash", sentence, "The file was changed or damaged: check the link's source."
            )

    def _refuse_interrupted(self, error: Exception) -> NoReturn:
        sentence = f'The download of "{self.shown}" stopped: {error}. {self._have():,} bytes of it are kept.'
        raise BaseModelError("base.interrupted", sentence, "Check the connection and start again.") from error

    def _read_notes(self) -> dict[str, Any]:
        try:
            notes = read_json(self.notes, "record")
        except (OSError, UnusableFileError):  # none yet, or damaged: the file is downloaded again
            return {}
        return notes if isinstance(notes, dict) else {}

    def _write_notes(self, notes: dict[str, Any]) -> None:
        files.write_json(self.notes, notes)


def _validator(response: httpx2.Response) -> str | None:
    """Return what tells one version of the file from another; weak ETags may not be used for ranges."""
    etag = response.headers.get("etag")
    return etag if etag and not etag.startswith("W/") else response.headers.get("last-modified")


def _check_request(request: httpx2.Request) -> None:
    _check_scheme(request.url.scheme, request.url.host)


def _check_scheme(scheme: str, host: str) -> None:
    """Refuse links and redirects that others on the network could change; on this machine itself http will do."""
    if scheme == "https" or (scheme == "http" and host in _LOOPBACK):
        return
    sentence = f'"{scheme}://{host}" is not https: what comes from it can be changed on the way.'
    raise BaseModelError("base.link", sentence, "Use an https link, or download the file yourself and give its path.")
