"""Scan dataset folders for images, captions, masks and crops, and for settings in names and sidecars."""

from __future__ import annotations

import difflib
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, NoReturn

from trainer.config.job import DatasetConfig, FolderConfig, Lines, Masks, RecipeOverlay
from trainer.dataset import caption_files
from trainer.dataset.findings import Finding
from trainer.dataset.image import Crop, Kind
from trainer.dataset.pixels import SUFFIXES
from trainer.dataset.sidecar import FILE_NAME, FolderSettings, Sidecar, read_sidecar
from trainer.errors import DatasetError
from trainer.protocol.files import Links, long_path

MASK = "-masklabel"
"""Text that follows the image's stem in the name of its mask, which is a PNG file."""
_CONDITION = "-condlabel"
_KOHYA_NAME = re.compile(r"([1-9]\d{0,3})_(.*)")
_MANY_REPEATS = 200
_OTHER_SUFFIXES = frozenset(
    {".heic", ".heif", ".psd", ".tga", ".jp2", ".svg", ".ico", ".exr", ".hdr", ".dng", ".cr2", ".nef", ".arw"}
)

Captions = tuple[str, ...]
Imported = Mapping[Path, Captions]


@dataclass(frozen=True, slots=True)
class FolderFacts:
    """Settings that apply to all images of one directory."""

    kind: Kind
    repeats: int
    weight: float
    trigger: str
    class_words: str
    lines: Lines
    caption_sources: tuple[str, ...] | None
    """Places of captions that the job sets; None for those of `caption_files.SOURCES`."""
    masks: Masks
    overlays: tuple[RecipeOverlay | None, ...]
    """Settings that differ from the recipe's, for each of the folder's resolutions."""


class FolderMarks(NamedTuple):
    """Settings from the names and sidecars of a directory and its parents; None for settings not found there."""

    repeats: int | None
    named: int | None
    """Repeats from the nearest kohya folder name, regardless of sidecars."""
    regularization: bool
    trigger: str | None
    class_words: str | None


@dataclass(frozen=True, slots=True)
class ImageFile:
    """An image file that was found by its name and has not been opened yet."""

    path: Path
    folder: FolderFacts
    captions: Captions
    mask_path: Path | None
    crop: Crop | None


@dataclass
class Scan:
    """Result of a scan; `marks` maps the code of a finding (see findings.py) to the files concerned."""

    candidates: list[ImageFile] = field(default_factory=list)
    marks: defaultdict[str, list[Path]] = field(default_factory=lambda: defaultdict(list))
    findings: list[Finding] = field(default_factory=list)


class _Directory:
    """Files of one directory, its sidecar, captions from metadata files, and masks in a folder of their own by stem."""

    def __init__(
        self, path: Path, files: list[Path], notes: Sidecar, metadata: Mapping[str, str], masks: Mapping[str, Path]
    ) -> None:
        self.path, self.files, self.notes, self.metadata, self.masks = path, files, notes, metadata, masks
        self._by_stem: defaultdict[str, list[Path]] = defaultdict(list)
        for file in files:
            self._by_stem[file.stem].append(file)

    def find(self, stem: str, suffix: str) -> Path | None:
        """Return the file with this stem and extension, ignoring the extension's case."""
        return next((file for file in self._by_stem.get(stem, ()) if file.suffix.lower() == suffix), None)

    def images(self, stem: str) -> list[Path]:
        """Return the images with this stem."""
        return [file for file in self._by_stem.get(stem, ()) if is_image(file)]


def scan_folders(dataset: DatasetConfig, imported: Imported) -> Scan:
    """Find every image in the dataset's folders, ordered by folder and name, without opening images.

    `imported` captions (by image) take precedence over caption files. Raises DatasetError if folders are missing, not
    folders, unreadable or without images (reported all at once), or if a sidecar is damaged.
    """
    scan, links = Scan(), _links_of(dataset)
    _look_into(dataset, lambda config: _scan_folder(config, dataset, imported, scan, links))
    if links.refused:
        scan.marks["file.outside"] = sorted(links.refused)
    return scan


def require_images(dataset: DatasetConfig) -> None:
    """Raise DatasetError for unusable folders like `scan_folders`, but check only file names, which is fast."""
    links = _links_of(dataset)
    _look_into(
        dataset,
        lambda config: list(_directories(Path(config.path).absolute(), config.recursive, links, _mask_folder(config))),
    )


def _look_into(dataset: DatasetConfig, look: Callable[[FolderConfig], object]) -> None:
    """Call ``look`` for every folder, and raise all errors together as one."""
    problems: list[DatasetError] = []
    for config in dataset.folders:
        try:
            look(config)
        except DatasetError as error:
            problems.append(error)
    if len(problems) > 1:
        sentences = " ".join(dict.fromkeys(problem.sentence for problem in problems))
        remedies = " ".join(dict.fromkeys(problem.remedy for problem in problems))
        raise DatasetError("dataset.folders", sentences, remedies)
    if problems:
        raise problems[0]


def image_files(folder: Path, recursive: bool = False, links: Links | None = None) -> list[Path]:
    """Return a folder's images sorted by name, with subfolders if ``recursive``; raises DatasetError as a scan does.

    If `links` is None, only links to places in the folder itself are followed.
    """
    followed = links or Links([folder])
    return [file for _, files in _directories(folder, recursive, followed) for file in files if is_image(file)]


def _scan_folder(config: FolderConfig, dataset: DatasetConfig, imported: Imported, scan: Scan, links: Links) -> None:
    root = Path(config.path).absolute()
    has_metadata = "metadata" in (dataset.caption_sources_of(config) or caption_files.SOURCES)
    whole = _read_metadata(root, scan, links) if has_metadata else {}
    mask_folder = _mask_folder(config)
    for path, files in _directories(root, config.recursive, links, mask_folder):
        above = {} if path == root else below(whole, path.relative_to(root).as_posix())
        own = whole if path == root or not has_metadata else _read_metadata(path, scan, links)
        masks = _masks_for(path, root, mask_folder, links) if dataset.has_mask_files(config) else {}
        directory = _Directory(path, files, _read_notes(path, links), {**above, **own}, masks)
        facts = _folder_facts(config, dataset, root, path, scan, links)
        for file in files:
            if is_image(file):
                _scan_image(file, directory, facts, imported, scan)
        _mark_strays(directory, facts, scan)


def _mask_folder(config: FolderConfig) -> Path | None:
    return Path(config.mask_folder).absolute() if config.mask_folder else None


def _masks_for(path: Path, root: Path, folder: Path | None, links: Links) -> dict[str, Path]:
    """Return the masks of a directory's images by stem; masks of subfolders are in subfolders of the same names."""
    if folder is None:
        return {}
    place = folder / path.relative_to(root)
    if place != folder and not place.is_dir():
        return {}
    return {file.stem: file for file in reversed(_files(place, links)) if file.suffix.lower() in SUFFIXES}


def _directories(
    root: Path, recursive: bool, links: Links, masks: Path | None = None
) -> Iterator[tuple[Path, list[Path]]]:
    """Yield the directories that contain the folder's images, each with its files sorted by name.

    The folder ``masks`` and its subfolders are left out.

    If a folder has no images but kohya-style subfolders, such as 10_cat, the images are read from these. Directories
    are listed one by one: the paths of all files together take much more memory than the images' records.
    """
    if recursive:
        walked = [Path(path) for path, _, _ in os.walk(root, onerror=_refuse)]
        # os.walk follows Windows junctions on Python 3.11.
        visible = [folder for folder in sorted(walked) if not _hidden(folder, root) and links.allow(folder)]
    else:
        visible = [root]
        if not any(is_image(file) for file in _files(root, links)):
            named = [folder for folder in _subfolders(root) if _KOHYA_NAME.fullmatch(folder.name)]
            visible = [folder for folder in named if links.allow(folder)]
    empty = True
    for folder in (each for each in visible if masks is None or not each.is_relative_to(masks)):
        files = _files(folder, links)
        if any(is_image(file) for file in files):
            empty = False
            yield folder, files
    if empty:
        raise _no_images(root)


def _files(folder: Path, links: Links) -> list[Path]:
    """Return a folder's files without hidden files (macOS creates some) and links that are not allowed."""
    try:
        with os.scandir(long_path(folder)) as entries:
            visible = [entry for entry in entries if entry.is_file() and not entry.name.startswith(".")]
            # Resolve only entries that are symbolic links: resolving every file would take seconds.
            names = [each.name for each in visible if not each.is_symlink() or links.allow(folder / each.name)]
    except OSError as fault:
        _refuse(fault)
    return [folder / name for name in sorted(names)]


def _refuse(fault: OSError) -> NoReturn:
    folder = Path(fault.filename)
    if isinstance(fault, FileNotFoundError):
        raise _missing(folder) from fault
    if isinstance(fault, NotADirectoryError):
        remedy = "Use the folder that contains the images."
        raise DatasetError("dataset.no_folder", f"{folder} is a file, not a folder.", remedy) from fault
    sentence = f"Could not read the folder {folder}: {fault.strerror or fault}."
    remedy = "Change the folder's permissions, or copy the images elsewhere."
    raise DatasetError("dataset.folder_unreadable", sentence, remedy) from fault


def _subfolders(root: Path) -> list[Path]:
    with os.scandir(long_path(root)) as entries:
        return sorted(root / entry.name for entry in entries if entry.is_dir())


def _hidden(path: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(root).parts)


def _missing(folder: Path) -> DatasetError:
    siblings = [entry.name for entry in folder.parent.iterdir() if entry.is_dir()] if folder.parent.is_dir() else []
    near = difflib.get_close_matches(folder.name, siblings, n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    return DatasetError(
        "dataset.folder_missing",
        f"The folder {folder} does not exist.{hint}",
        "Fix the folder's path; in a job it is relative to the job file.",
    )


def _no_images(root: Path) -> DatasetError:
    below = sum(is_image(Path(name)) for _, _, names in os.walk(root) for name in names)
    if below:
        sentence = f"The folder {root} has no images itself, but {below} in its subfolders."
        return DatasetError(
            "dataset.folder_empty", sentence, "Set recursive = true for this folder, or use the subfolders."
        )
    return DatasetError(
        "dataset.folder_empty",
        f"The folder {root} has no images.",
        f"Add images to it ({', '.join(sorted(suffix[1:] for suffix in SUFFIXES))}), or use another folder.",
    )


def _folder_facts(
    config: FolderConfig, dataset: DatasetConfig, root: Path, path: Path, scan: Scan, links: Links
) -> FolderFacts:
    """Return a directory's settings: from the job, else from the directory or its nearest parent that has them."""
    marks = folder_marks([(folder.name, _read_notes(folder, links).folder) for folder in chain_of(root, path)])
    if marks.named and not config.repeats and marks.named >= _MANY_REPEATS:
        scan.marks["folder.many_repeats"].append(path)
    class_words = _first(config.class_words, marks.class_words).strip()
    _require_unicode(class_words, path)
    return FolderFacts(
        kind="regularization" if config.kind == "train" and marks.regularization else config.kind,
        repeats=config.repeats or marks.repeats or 1,
        weight=config.weight,
        trigger=_first(config.trigger, marks.trigger).strip(),
        class_words=class_words,
        lines=dataset.lines_of(config),
        caption_sources=dataset.caption_sources_of(config),
        masks=dataset.masks_of(config),
        overlays=config.overlays,
    )


def _require_unicode(words: str, path: Path) -> None:
    """Raise DatasetError for class words from a directory name that is not valid Unicode (possible on Linux)."""
    try:
        words.encode("utf-8")
    except UnicodeEncodeError as fault:
        sentence = f"Could not use the name of the folder {path} as class words: it is not valid Unicode."
        remedy = "Rename the folder, or set class_words for it in the job."
        raise DatasetError("dataset.folder_name", sentence, remedy) from fault


def chain_of(root: Path, path: Path) -> list[Path]:
    """Return a directory and its parents up to the dataset folder, nearest first."""
    return [path, *(parent for parent in path.parents if parent.is_relative_to(root))]


def folder_marks(chain: Sequence[tuple[str, FolderSettings]]) -> FolderMarks:
    """Return a directory's settings from names and sidecars; the nearest value is used.

    `chain` has the name and sidecar of the directory and of its parents, nearest first.
    """
    names = [_KOHYA_NAME.fullmatch(name) for name, _ in chain]
    repeats = [note.repeats or (int(name[1]) if name else None) for (_, note), name in zip(chain, names, strict=True)]
    named = next((name for name in names if name), None)
    return FolderMarks(
        repeats=next((number for number in repeats if number), None),
        named=int(named[1]) if named else None,
        regularization=any(note.regularization for _, note in chain),
        trigger=next((note.trigger for _, note in chain if note.trigger is not None), None),
        class_words=named[2] if named else None,
    )


def _first(*texts: str | None) -> str:
    return next((text for text in texts if text is not None), "")


def _scan_image(file: Path, directory: _Directory, facts: FolderFacts, imported: Imported, scan: Scan) -> None:
    notes = directory.notes.of(file.name)
    if notes.excluded:
        scan.marks["image.excluded"].append(file)
        return
    if len(directory.images(file.stem)) > 1:
        scan.marks["image.same_stem"].append(file)
    mask = directory.masks.get(file.stem) or directory.find(file.stem + MASK, ".png")
    if mask and facts.masks not in ("auto", "files"):
        scan.marks["mask.unused"].append(mask)
        mask = None
    captions = imported.get(file) or _captions(file, directory, facts, scan)
    scan.candidates.append(ImageFile(file, facts, captions, mask, notes.crop))


def _captions(file: Path, directory: _Directory, facts: FolderFacts, scan: Scan) -> Captions:
    """Return an image's captions from the first nonempty source; add findings."""
    sources = facts.caption_sources or caption_files.SOURCES
    texts = [text for source in sources if (text := _text_from(source, file, directory, scan)) is not None]
    found = [caption_files.split_caption(text, facts.lines) for text in texts]
    if len(set(found)) > 1 and facts.caption_sources is None:
        scan.marks["caption.clash"].append(file)
    if used := next((alternatives for alternatives in found if alternatives), ()):
        return used
    if facts.class_words or facts.trigger:
        scan.marks["caption.words"].append(file)
    else:
        scan.marks["caption.empty" if found else "caption.missing"].append(file)
    return ()


def _text_from(source: str, file: Path, directory: _Directory, scan: Scan) -> str | None:
    """Return the text that a caption source has for an image, or None."""
    if source == "filename":
        # Bytes that are not valid Unicode (possible on Linux) become question marks, which a caption can hold.
        return os.fsencode(file.stem).decode("utf-8", "replace")
    if source == "metadata":
        return directory.metadata.get(file.name)
    path = directory.find(file.stem, source.lower())
    return _caption_text(path, scan) if path else None


def _caption_text(path: Path, scan: Scan) -> str | None:
    try:
        caption = caption_files.read_caption_file(path)
    except caption_files.NotACaptionError as fault:
        values = {"file": str(path), "reason": str(fault)}
        scan.findings.append(Finding("caption.unreadable", values, (path,), "error"))
        return None
    if caption.encoding != "utf-8":
        scan.marks[f"caption.{caption.encoding}"].append(path)
    return caption.text


def _read_notes(folder: Path, links: Links) -> Sidecar:
    return read_sidecar(folder) if links.allow_file(folder / FILE_NAME) else Sidecar()


def _read_metadata(folder: Path, scan: Scan, links: Links) -> dict[str, str]:
    path = folder / caption_files.METADATA_NAME
    if not links.allow_file(path):
        return {}
    captions, faults = caption_files.read_metadata(path)
    for fault in faults:
        values = {"file": str(path), "reason": fault}
        scan.findings.append(Finding("metadata.damaged", values, (path,), "error"))
    for name in captions:
        if not (folder / name).is_file():
            scan.marks["metadata.orphan"].append(folder / name)
    return captions


def below(metadata: Mapping[str, str], inside: str) -> dict[str, str]:
    """Return the captions in a parent's metadata file for images in the subdirectory `inside`, by file name."""
    start = inside + "/"
    return {name.removeprefix(start): text for name, text in metadata.items() if name.startswith(start)}


def _mark_strays(directory: _Directory, facts: FolderFacts, scan: Scan) -> None:
    """Add findings for captions and masks without an image, and for images in unsupported formats."""
    sources = [source.lower() for source in facts.caption_sources or caption_files.SOURCES]
    for file in directory.files:
        suffix = file.suffix.lower()
        if suffix in sources and not directory.images(file.stem):
            scan.marks["caption.orphan"].append(file)
        elif suffix in _OTHER_SUFFIXES:
            scan.marks["image.other_kind"].append(file)
        elif file.stem.endswith(MASK) and not directory.images(file.stem.removesuffix(MASK)):
            scan.marks["mask.orphan"].append(file)
    for stem, file in directory.masks.items():
        if not directory.images(stem):
            scan.marks["mask.orphan"].append(file)


def is_image(path: Path) -> bool:
    """Return whether a file's name is that of a training image, not of a mask or another kind of file."""
    return is_image_name(path.stem, path.suffix)


def is_image_name(stem: str, suffix: str) -> bool:
    """Return the result of `is_image` for a file's stem and extension, which is faster for very many names."""
    return suffix.lower() in SUFFIXES and not stem.endswith((MASK, _CONDITION))


def _links_of(dataset: DatasetConfig) -> Links:
    folders = [path for folder in dataset.folders for path in (folder.path, folder.mask_folder) if path]
    return Links([*folders, *dataset.linked_folders])
