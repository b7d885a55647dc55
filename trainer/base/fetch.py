"""Finds a base on this machine, or brings it here: a file, a folder, a Hub id or a direct link."""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from email.message import Message
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import unquote, urldefrag, urlsplit

import httpx2
from huggingface_hub import HfApi, hf_hub_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils.tqdm import tqdm

from trainer.config.credentials import SafeLink, address_of, safe_link
from trainer.config.paths import absolute, is_base_path
from trainer.errors import BaseModelError
from trainer.files.assets import PARTS
from trainer.files.header import read_header
from trainer.files.weights import digest_file, remember_sha256
from trainer.protocol import files, locks, places
from trainer.protocol.events import OnPhase
from trainer.protocol.files import safe_name, write_json
from trainer.protocol.reading import UnusableFileError, read_json, read_record

_COMMIT = re.compile(r"[0-9a-f]{40}")
_WEIGHTS = re.compile(
    r"(?:diffusion_pytorch_model|model)(?P<variant>\.[a-z0-9]+)?(?:-\d+-of-\d+)?\.safetensors(?:\.index\.json)?"
)
_LOG_IN = 401  # what the Hub answers strangers who ask for what is not there, or not public
_GO_ONLINE = "Connect to the internet and start again, or give the path of a base that is on this machine."
_LOOPBACK = {"127.0.0.1", "::1", "localhost"}
_EXPECTED = re.compile(r"sha256=([0-9a-fA-F]{64})")
_TIMEOUT = 30.0  # seconds without a single byte


def fetch_from_hub(
    model: str, revision: str | None = None, progress: OnPhase | None = None, endpoint: str | None = None
) -> tuple[Path, str]:
    """Return where a Hub base lies on this machine, and its commit, downloading what is not here yet.

    A commit that is here needs no network; a branch or tag is looked up, and taken as last seen when the Hub cannot be
    reached. Raises BaseModelError when it does not exist, is closed, holds no usable files, or there is no room,
    and OSError when writing fails.
    """
    key = f"{model}@{revision or 'main'}"
    known = _known(key)
    if known and _COMMIT.fullmatch(revision or ""):
        return known
    try:
        info = HfApi(endpoint=endpoint).model_info(model, revision=revision, files_metadata=True)
        sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
        commit, names = str(info.sha), needed_files(model, list(sizes))
        _check_room(model, sum(sizes[name] for name in names if not _is_cached(model, commit, name)))
        path = _download(model, commit, names, sizes, progress, endpoint)
    except (httpx2.TransportError, OfflineModeIsEnabled, LocalEntryNotFoundError) as error:
        if known:
            return known
        sentence = f'"{model}" is not whole on this machine and the Hugging Face Hub cannot be reached: {error}.'
        raise BaseModelError("base.offline", sentence, _GO_ONLINE) from error
    except (HfHubHTTPError, HFValidationError) as error:
        _refuse(model, revision, error)
    for name in (key, f"{model}@{commit}"):
        _remember(name, path, commit, names)
    return path, commit


def needed_files(model: str, names: Sequence[str]) -> list[str]:
    """Choose what to download of a repository's files: configs and safetensors weights, each model once.

    Where full and half precision lie side by side the full one is taken. Raises BaseModelError when there is nothing to
    take, or several single files between which only the user can choose.
    """
    if "model_index.json" not in names:
        return [_only_single(model, names)]
    chosen = ["model_index.json", *(name for name in names if name == "scheduler/scheduler_config.json")]
    for part in PARTS["sdxl"]:
        inside = [name.removeprefix(f"{part}/") for name in names if name.startswith(f"{part}/")]
        if "config.json" in inside:
            chosen += [f"{part}/{name}" for name in ("config.json", *_weights(model, part, inside))]
    return chosen


def _weights(model: str, part: str, names: Sequence[str]) -> list[str]:
    variants: dict[str, list[str]] = {}
    for name in names:
        if found := _WEIGHTS.fullmatch(name):
            variants.setdefault(found["variant"] or "", []).append(name)
    for variant in ("", ".fp16", ".bf16"):
        if variant in variants:
            return variants[variant]
    sentence = f'"{model}" on the Hub has no .safetensors weights for its {part}.'
    raise BaseModelError("base.pickle", sentence, "Choose a base that comes as .safetensors.")


def _only_single(model: str, names: Sequence[str]) -> str:
    singles = [name for name in names if name.endswith(".safetensors")]
    if len(singles) == 1:
        return singles[0]
    if not singles:
        sentence = f'"{model}" on the Hub holds neither a diffusers model nor a .safetensors file.'
        raise BaseModelError("base.unknown", sentence, "Choose a base that comes as .safetensors.")
    listed = ", ".join(singles[:5]) + (" ..." if len(singles) > 5 else "")
    sentence = f'"{model}" on the Hub holds {len(singles)} models: {listed}.'
    remedy = f"Name one by its link: https://huggingface.co/{model}/resolve/main/{singles[0]}"
    raise BaseModelError("base.several", sentence, remedy)


def _download(
    model: str,
    commit: str,
    names: Sequence[str],
    sizes: dict[str, int],
    progress: OnPhase | None,
    endpoint: str | None,
) -> Path:
    """Fetch the files one after the other; those that are here, whole or in part, are not fetched again."""
    done, total = 0, sum(sizes[name] for name in names)
    paths = []
    for name in names:
        bar = _bar(progress, done, total)
        paths.append(
            hf_hub_download(model, name, revision=commit, cache_dir=_cache(), endpoint=endpoint, tqdm_class=bar)
        )
        done += sizes[name]
        if progress:
            progress("download", done, total)
    return Path(paths[0]).parent if names[0] == "model_index.json" else Path(paths[0])


def _bar(progress: OnPhase | None, before: int, total: int) -> type[tqdm]:
    """Make a class that takes the place of the library's progress bar, writes nothing, and tells `progress`."""

    class Bar(tqdm):
        def update(self, n: float | None = 1) -> bool | None:
            self.n += n or 0
            if progress:
                progress("download", min(total, before + int(self.n)), total)
            return None

        def display(self, msg: str | None = None, pos: int | None = None) -> None:
            pass

    return Bar


def _check_room(model: str, needed: int) -> None:
    free = places.free_bytes(_cache())
    if needed > free:
        sentence = (
            f'"{model}" needs {needed / 1e9:.1f} GB more on the disk of "{_cache()}", which has {free / 1e9:.1f} GB.'
        )
        raise BaseModelError("base.disk_full", sentence, "Make room, or set IMPASTO_HOME to a folder on another disk.")


def _refuse(model: str, revision: str | None, error: HfHubHTTPError | HFValidationError) -> NoReturn:
    """Say why the Hub gave nothing."""
    if isinstance(error, GatedRepoError):
        sentence = f'"{model}" is only given to those who accepted its terms.'
        remedy = f"Accept them on https://huggingface.co/{model}, then run `hf auth login` and start again."
    elif isinstance(error, RevisionNotFoundError):
        sentence, remedy = f'"{model}" has no revision "{revision}".', "Correct base.revision, or remove it."
    elif isinstance(error, RepositoryNotFoundError | HFValidationError) or error.response.status_code == _LOG_IN:
        sentence = f'There is no "{model}" on this machine, nor a public model of that name on the Hugging Face Hub.'
        remedy = "Check the name; for a private model run `hf auth login` first."
    else:
        sentence, remedy = f'The Hugging Face Hub refused "{model}": {error}.', "Try again later."
    raise BaseModelError("base.hub", sentence, remedy) from error


def _cache() -> Path:
    return places.models_folder() / "hub"


def _is_cached(model: str, commit: str, name: str) -> bool:
    return (_cache() / f"models--{model.replace('/', '--')}" / "snapshots" / commit / name).exists()


def _record() -> Path:
    return _cache() / "bases.json"


def _known(key: str) -> tuple[Path, str] | None:
    """Return a base that was downloaded whole before, and is still whole."""
    entry = _entries().get(key)
    if entry is None:
        return None
    path, commit = _cache() / entry["path"], str(entry["commit"])
    whole = all(_is_cached(key.partition("@")[0], commit, name) for name in entry["files"])
    return (path, commit) if whole else None


def _entries() -> dict[str, Any]:
    try:
        return read_record(_record(), "list", _sound_entries)
    except (OSError, UnusableFileError):  # nothing was downloaded yet, or the record is damaged: ask the Hub again
        return {}


def _sound_entries(found: Any) -> dict[str, Any]:
    return {key: entry for key, entry in found.items() if _is_sound(entry)}


def _is_sound(entry: Any) -> bool:
    return (
        isinstance(entry, dict)
        and isinstance(entry.get("path"), str)
        and isinstance(entry.get("commit"), str)
        and isinstance(entry.get("files"), list)
        and all(isinstance(name, str) for name in entry["files"])
    )


def _remember(key: str, path: Path, commit: str, files: Sequence[str]) -> None:
    entry = {"path": path.relative_to(_cache()).as_posix(), "commit": commit, "files": list(files)}
    write_json(_record(), {**_entries(), key: entry})


_PARTIAL, _RANGE_REFUSED = 206, 416  # HTTP


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


@dataclass(frozen=True, slots=True)
class Fetched:
    """A base on this machine, and the commit it is of where it came from the Hub."""

    path: Path
    revision: str | None = None


def fetch_base(model: str, revision: str | None = None, progress: OnPhase | None = None) -> Fetched:
    """Return where the base lies, after downloading it unless it is here already; raises BaseModelError."""
    try:
        if "://" in model:
            return Fetched(fetch_link(model, progress))
        if not is_base_path(model, Path.cwd()):
            return Fetched(*fetch_from_hub(model, revision, progress))
    except OSError as error:
        raise _storage_error(model, error) from error
    path = Path(absolute(model, Path.cwd()))
    if path.exists():
        return Fetched(path)
    near = difflib.get_close_matches(path.name, _neighbours(path), n=1)
    remedy = f'Did you mean "{near[0]}", in the same folder?' if near else "Check the path for a typing mistake."
    raise BaseModelError("base.missing", f'"{model}" does not exist.', remedy)


def _storage_error(model: str, error: OSError) -> BaseModelError:
    """Say why a download could not be written; the link is shown without its secrets and query."""
    shown, folder = safe_link(model).text.partition("?")[0], places.models_folder()
    if places.is_disk_full(error):
        sentence = f'The disk of "{folder}" filled up while "{shown}" was downloaded; what is here of it is kept.'
        remedy = "Make room and start again: the download goes on where it stopped."
        return BaseModelError("base.disk_full", sentence, remedy)
    sentence = f'"{shown}" cannot be downloaded to "{folder}": {error.strerror or error}.'
    return BaseModelError("base.not_writable", sentence, "Set IMPASTO_HOME to a folder that you may write to.")


def _neighbours(path: Path) -> list[str]:
    try:
        return [entry.name for entry in path.parent.iterdir()]
    except OSError:  # the folder itself is missing or closed to us
        return []
