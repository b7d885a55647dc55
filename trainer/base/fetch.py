"""Find base models on this machine or download them, given a file, folder, Hub id or direct link."""

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
_LOG_IN = 401  # the Hub's answer without login for models that are missing or private
_GO_ONLINE = "Connect to the internet and start again, or use the path of a base on this PC."
_LOOPBACK = {"127.0.0.1", "::1", "localhost"}
_EXPECTED = re.compile(r"sha256=([0-9a-fA-F]{64})")
_TIMEOUT = 30.0  # seconds without receiving a byte


def fetch_from_hub(
    model: str, revision: str | None = None, progress: OnPhase | None = None, endpoint: str | None = None
) -> tuple[Path, str]:
    """Return the local path and commit of a base from the Hub, downloading the files that are missing.

    If the given commit has already been downloaded completely, the network is not used. A branch or tag is looked up;
    if the Hub cannot be reached, the last known commit is used. Raises BaseModelError if the base does not exist, is
    not accessible, has no usable files or does not fit on the disk, and OSError if writing fails.
    """
    key = f"{model}@{revision or 'main'}"
    known = _known(key)
    if known and _COMMIT.fullmatch(revision or ""):
        return known
    try:
        info = HfApi(endpoint=endpoint).model_info(model, revision=revision, files_metadata=True)
        sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
        commit, names = str(info.sha), needed_files(model, list(sizes))
        _check_space(model, sum(sizes[name] for name in names if not _is_cached(model, commit, name)))
        path = _download(model, commit, names, sizes, progress, endpoint)
    except (httpx2.TransportError, OfflineModeIsEnabled, LocalEntryNotFoundError) as error:
        if known:
            return known
        sentence = f'Could not download "{model}": the Hugging Face Hub cannot be reached ({error}).'
        raise BaseModelError("base.offline", sentence, _GO_ONLINE) from error
    except (HfHubHTTPError, HFValidationError) as error:
        _refuse(model, revision, error)
    for name in (key, f"{model}@{commit}"):
        _remember(name, path, commit, names)
    return path, commit


def needed_files(model: str, names: Sequence[str]) -> list[str]:
    """Return which of a repository's files to download: configs, and one set of safetensors weights per model.

    If a model exists in full and half precision, the full one is chosen. Raises BaseModelError if there is nothing to
    download, or if there are several single-file models, among which the user must choose.
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
    raise BaseModelError("base.pickle", sentence, "Choose a base in .safetensors format.")


def _only_single(model: str, names: Sequence[str]) -> str:
    singles = [name for name in names if name.endswith(".safetensors")]
    if len(singles) == 1:
        return singles[0]
    if not singles:
        sentence = f'"{model}" on the Hub contains neither a diffusers model nor a .safetensors file.'
        raise BaseModelError("base.unknown", sentence, "Choose a base in .safetensors format.")
    listed = ", ".join(singles[:5]) + (" ..." if len(singles) > 5 else "")
    sentence = f'"{model}" on the Hub contains {len(singles)} models: {listed}.'
    remedy = f"Use the link of one of them, such as https://huggingface.co/{model}/resolve/main/{singles[0]}"
    raise BaseModelError("base.several", sentence, remedy)


def _download(
    model: str,
    commit: str,
    names: Sequence[str],
    sizes: dict[str, int],
    progress: OnPhase | None,
    endpoint: str | None,
) -> Path:
    """Download the files one by one and return the base's path; partial downloads are continued."""
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
    """Return a replacement for huggingface_hub's progress bar class that prints nothing and calls `progress`."""

    class Bar(tqdm):
        def update(self, n: float | None = 1) -> bool | None:
            self.n += n or 0
            if progress:
                progress("download", min(total, before + int(self.n)), total)
            return None

        def display(self, msg: str | None = None, pos: int | None = None) -> None:
            pass

    return Bar


def _check_space(model: str, needed: int) -> None:
    free = places.free_bytes(_cache())
    if needed > free:
        sentence = (
            f'Could not download "{model}": it needs {needed / 1e9:.1f} GB more on the disk of "{_cache()}", which has '
            f"{free / 1e9:.1f} GB free."
        )
        raise BaseModelError(
            "base.disk_full", sentence, "Free up disk space, or set IMPASTO_HOME to a folder on another disk."
        )


def _refuse(model: str, revision: str | None, error: HfHubHTTPError | HFValidationError) -> NoReturn:
    """Raise BaseModelError with the reason why the Hub refused the request."""
    if isinstance(error, GatedRepoError):
        sentence = f'"{model}" can only be downloaded after you accept its terms.'
        remedy = f"Accept them at https://huggingface.co/{model}, then run `hf auth login` and start again."
    elif isinstance(error, RevisionNotFoundError):
        sentence, remedy = f'"{model}" has no revision "{revision}".', "Correct base.revision, or remove it."
    elif isinstance(error, RepositoryNotFoundError | HFValidationError) or error.response.status_code == _LOG_IN:
        sentence = f'Could not find "{model}": it is neither on this PC nor a public model on the Hugging Face Hub.'
        remedy = "Check the name; for a private model run `hf auth login` first."
    else:
        sentence, remedy = f'Could not download "{model}" from the Hugging Face Hub: {error}.', "Try again later."
    raise BaseModelError("base.hub", sentence, remedy) from error


def _cache() -> Path:
    return places.models_folder() / "hub"


def _is_cached(model: str, commit: str, name: str) -> bool:
    return (_cache() / f"models--{model.replace('/', '--')}" / "snapshots" / commit / name).exists()


def _record() -> Path:
    return _cache() / "bases.json"


def _known(key: str) -> tuple[Path, str] | None:
    """Return the path and commit of a base that was fully downloaded and still has all files; otherwise None."""
    entry = _entries().get(key)
    if entry is None:
        return None
    path, commit = _cache() / entry["path"], str(entry["commit"])
    is_complete = all(_is_cached(key.partition("@")[0], commit, name) for name in entry["files"])
    return (path, commit) if is_complete else None


def _entries() -> dict[str, Any]:
    try:
        return read_record(_record(), "list", _valid_entries)
    except (OSError, UnusableFileError):  # nothing downloaded yet, or a damaged record: the Hub is asked again
        return {}


def _valid_entries(found: Any) -> dict[str, Any]:
    return {key: entry for key, entry in found.items() if _is_valid(entry)}


def _is_valid(entry: Any) -> bool:
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
    """Return the local path of the file behind an https link, downloading it if needed.

    An interrupted download continues where it stopped if the server supports ranges. If the link ends with
    `#sha256=...`, the file must have that hash. Raises BaseModelError if the file is unavailable, is not a .safetensors
    file, has another hash or does not fit on the disk, and OSError if writing fails.
    """
    safe = safe_link(link)
    stated = _EXPECTED.fullmatch(urlsplit(safe.text).fragment)
    address = urlsplit(safe.text)
    _check_scheme(address.scheme, address.hostname or "")
    download = _Download(safe, stated[1].lower() if stated else None, progress)
    return download.finished() or download.run()


class _Download:
    """Download from one link; its own folder holds the partial and then the finished file."""

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
        """Return the file if it was downloaded before, else None; raise BaseModelError if its hash is wrong."""
        notes = self._read_notes()
        path = self.folder / safe_name(str(notes.get("name", "")))
        if "sha256" not in notes or not path.is_file() or path.stat().st_size != notes.get("size"):
            return None
        self._check_hash(str(notes["sha256"]))
        return path

    def run(self) -> Path:
        """Download the file under a lock; raise BaseModelError if that fails or another process is downloading it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            with locks.hold_lock(self.folder / "lock", patience=0):
                return self._run()
        except locks.LockBusyError as error:
            sentence = f'Another process is downloading "{self.shown}".'
            raise BaseModelError(
                "base.download_busy", sentence, "Wait until it has finished, then start again."
            ) from error

    def _run(self) -> Path:
        """Repeat interrupted attempts until the file is complete; raise BaseModelError if an attempt adds no bytes."""
        while True:
            before = self._size()
            try:
                name = self._attempt()
                return self._accept(name)
            except httpx2.InvalidURL:  # `from None`: its message contains the address, which may hold a secret
                sentence = f'"{self.shown}" is not a valid link.'
                raise BaseModelError("base.link", sentence, "Copy the link again.") from None
            except httpx2.TransportError as error:
                if self._size() <= before:
                    self._refuse_interrupted(error)

    def _attempt(self) -> str:
        """Request the missing bytes, append them to the partial file, and return the file's name."""
        headers = {"Accept-Encoding": "identity", **self._range()}
        with (
            httpx2.Client(follow_redirects=True, timeout=_TIMEOUT, event_hooks={"request": [_check_request]}) as client,
            client.stream("GET", urldefrag(address_of(self.link)).url, headers=headers) as response,
        ):
            if response.status_code == _RANGE_REFUSED and self.part.exists():
                self.part.unlink()  # longer than the file that the server has now
                return self._attempt()
            self._check_response(response)
            name = self._name(response)
            start = self._size() if response.status_code == _PARTIAL else 0
            length = response.headers.get("content-length")
            total = start + int(length) if length else 0
            self._check_space(total - start)
            self._write_notes({"name": name, "validator": _validator(response)})
            with self.part.open("ab" if start else "wb") as file:
                for block in response.iter_raw():
                    file.write(block)
                    start += len(block)
                    if self.progress:
                        self.progress("download", start, max(start, total))
            return name

    def _accept(self, name: str) -> Path:
        """Check the finished file, then rename it to its final name."""
        digest = digest_file(self.part)
        try:
            self._check_hash(digest)
            read_header(self.part)
        except BaseModelError:
            self.part.unlink()  # a wrong file cannot be continued
            raise
        target = self.folder / name
        files.replace(self.part, target)
        self._write_notes({"name": name, "address": self.shown, "size": target.stat().st_size, "sha256": digest})
        remember_sha256(target, digest)
        return target

    def _range(self) -> dict[str, str]:
        """Return the headers that request only the missing bytes; none if the download has to start over.

        If-Range makes the server send the whole file if it has changed; this requires a validator (see `_validator`).
        """
        validator, size = self._read_notes().get("validator"), self._size()
        return {"Range": f"bytes={size}-", "If-Range": str(validator)} if validator and size else {}

    def _size(self) -> int:
        return self.part.stat().st_size if self.part.exists() else 0

    def _name(self, response: httpx2.Response) -> str:
        message = Message()
        message["content-disposition"] = response.headers.get("content-disposition", "")
        name = safe_name(message.get_filename() or unquote(Path(response.url.path).name))
        if not name.lower().endswith(".safetensors"):
            sentence = f'"{self.shown}" is "{name}", not a .safetensors file.'
            raise BaseModelError("base.not_safetensors", sentence, "Use the download link of the .safetensors file.")
        return name

    def _check_response(self, response: httpx2.Response) -> None:
        status, kind = response.status_code, response.headers.get("content-type", "")
        if status in (401, 403):
            reason, remedy = "requires a login", "Download the file in your browser, then use its path as the base."
        elif status in (404, 410):
            reason, remedy = "has no such file", "Check the link."
        elif status >= 400:
            reason, remedy = f"returned error {status}", "Try again later."
        elif kind.startswith(("text/html", "application/xhtml")):
            reason, remedy = "returned a web page, not a file", "Copy the link of the download button, not of the page."
        else:
            return
        raise BaseModelError("base.link", f'Could not download "{self.shown}": the server {reason}.', remedy)

    def _check_space(self, needed: int) -> None:
        free = places.free_bytes(self.folder)
        if needed > free:
            space = f'{needed / 1e9:.1f} GB more on the disk of "{self.folder}", which has {free / 1e9:.1f} GB free'
            sentence = f'Could not download "{self.shown}": it needs {space}.'
            raise BaseModelError(
                "base.disk_full", sentence, "Free up disk space, or set IMPASTO_HOME to a folder on another disk."
            )

    def _check_hash(self, digest: str) -> None:
        if self.expected and digest != self.expected:
            sentence = f'"{self.shown}" has the SHA-256 {digest}, but the link says {self.expected}.'
            raise BaseModelError(
                "base.wrong_hash", sentence, "The file was modified or damaged: check where the link comes from."
            )

    def _refuse_interrupted(self, error: Exception) -> NoReturn:
        sentence = f'Could not finish the download of "{self.shown}": {error}. {self._size():,} bytes are kept.'
        raise BaseModelError(
            "base.interrupted",
            sentence,
            "Check the connection, then start again to continue the download.",
        ) from error

    def _read_notes(self) -> dict[str, Any]:
        try:
            notes = read_json(self.notes, "record")
        except (OSError, UnusableFileError):  # no notes yet, or damaged: the file is downloaded again
            return {}
        return notes if isinstance(notes, dict) else {}

    def _write_notes(self, notes: dict[str, Any]) -> None:
        files.write_json(self.notes, notes)


def _validator(response: httpx2.Response) -> str | None:
    """Return a strong ETag (weak ones do not work for ranges), else the modification date, else None."""
    etag = response.headers.get("etag")
    return etag if etag and not etag.startswith("W/") else response.headers.get("last-modified")


def _check_request(request: httpx2.Request) -> None:
    _check_scheme(request.url.scheme, request.url.host)


def _check_scheme(scheme: str, host: str) -> None:
    """Raise BaseModelError for links and redirects that are not https; http is allowed only to this machine itself."""
    if scheme == "https" or (scheme == "http" and host in _LOOPBACK):
        return
    sentence = f'"{scheme}://{host}" is not https: others on the network could change the file.'
    raise BaseModelError("base.link", sentence, "Use an https link, or download the file yourself and use its path.")


@dataclass(frozen=True, slots=True)
class Fetched:
    """Local path of a base, and its commit if it came from the Hub."""

    path: Path
    revision: str | None = None


def fetch_base(model: str, revision: str | None = None, progress: OnPhase | None = None) -> Fetched:
    """Return where the base is on this machine, downloading it if needed; raise BaseModelError if unavailable."""
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
    near = difflib.get_close_matches(path.name, _neighbors(path), n=1)
    remedy = f'Did you mean "{near[0]}" in the same folder?' if near else "Check the path for typos."
    raise BaseModelError("base.missing", f'"{model}" does not exist.', remedy)


def _storage_error(model: str, error: OSError) -> BaseModelError:
    """Return the error for a download that could not be written; it omits the link's secrets and query."""
    shown, folder = safe_link(model).text.partition("?")[0], places.models_folder()
    if places.is_disk_full(error):
        sentence = f'The disk of "{folder}" became full while "{shown}" was downloaded. The part received is kept.'
        remedy = "Free up disk space, then start again: the download continues where it stopped."
        return BaseModelError("base.disk_full", sentence, remedy)
    sentence = f'Could not write "{shown}" to "{folder}": {error.strerror or error}.'
    return BaseModelError("base.not_writable", sentence, "Set IMPASTO_HOME to a folder that you can write to.")


def _neighbors(path: Path) -> list[str]:
    try:
        return [entry.name for entry in path.parent.iterdir()]
    except OSError:  # the folder does not exist or is not readable
        return []
