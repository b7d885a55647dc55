"""Finds the pictures of a dataset's folders, with what names, neighbours and notes say about them."""

from __future__ import annotations

import difflib
import os
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, NoReturn

from trainer.config.job import DatasetConfig, FolderConfig
from trainer.dataset import caption_files
from trainer.dataset.findings import Finding
from trainer.dataset.links import Links
from trainer.dataset.picture import Crop, Kind
from trainer.dataset.pixels import SUFFIXES
from trainer.dataset.sidecar import FILE_NAME, FolderNotes, Sidecar, read_sidecar
from trainer.errors import DatasetError
from trainer.protocol.files import long_path

MASK = "-masklabel"
"""What a mask adds to the stem of its picture's name; a mask is a PNG."""
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
    """What holds for all pictures of one directory."""

    kind: Kind
    repeats: int
    weight: float
    trigger: str
    class_words: str


class FolderMarks(NamedTuple):
    """What the names and notes of a directory and of those above it say, None where they say nothing."""

    repeats: int | None
    named: int | None
    """The repeats that the nearest kohya name gives, whatever the notes say."""
    regularisation: bool
    trigger: str | None
    class_words: str | None


@dataclass(frozen=True, slots=True)
class ImageFile:
    """A file that looks like a picture, before anybody has opened it."""

    path: Path
    folder: FolderFacts
    captions: Captions
    mask_path: Path | None
    crop: Crop | None


@dataclass
class Scan:
    """What was found; `marks` holds the files concerned by the code of a finding, whose words are in health.py."""

    candidates: list[ImageFile] = field(default_factory=list)
    marks: defaultdict[str, list[Path]] = field(default_factory=lambda: defaultdict(list))
    findings: list[Finding] = field(default_factory=list)


class _Directory:
    """The files of one directory, its notes, and the captions that its metadata file holds."""

    def __init__(self, path: Path, files: list[Path], notes: Sidecar, metadata: Mapping[str, str]) -> None:
        self.path, self.files, self.notes, self.metadata = path, files, notes, metadata
        self._by_stem: defaultdict[str, list[Path]] = defaultdict(list)
        for file in files:
            self._by_stem[file.stem].append(file)

    def beside(self, stem: str, suffix: str) -> Path | None:
        """Return the file of this stem and ending, the ending in capitals or not."""
        return next((file for file in self._by_stem.get(stem, ()) if file.suffix.lower() == suffix), None)

    def pictures(self, stem: str) -> list[Path]:
        """Return the pictures of this stem."""
        return [file for file in self._by_stem.get(stem, ()) if is_picture(file)]


def scan_folders(dataset: DatasetConfig, imported: Imported) -> Scan:
    """Return every picture of the dataset's folders, by folder and then by name; no picture is opened.

    `imported` captions, by picture, come before those beside the pictures. Raises DatasetError when a folder is
    missing, no folder, unreadable or without pictures (all such folders at once), or when its notes are damaged.
    """
    scan, links = Scan(), Links.of(dataset)
    _look_into(dataset, lambda config: _scan_folder(config, dataset, imported, scan, links))
    if links.refused:
        scan.marks["file.outside"] = sorted(links.refused)
    return scan


def require_pictures(dataset: DatasetConfig) -> None:
    """Raises DatasetError for folders as a scan does, but looks at the names of files alone: it takes a moment."""
    links = Links.of(dataset)
    _look_into(dataset, lambda config: picture_files(Path(config.path).absolute(), config.recursive, links))


def _look_into(dataset: DatasetConfig, look: Callable[[FolderConfig], object]) -> None:
    """Looks into every folder; what is wrong with any is raised together."""
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


def picture_files(folder: Path, recursive: bool = False, links: Links | None = None) -> list[Path]:
    """Return a folder's images by name, those of folders inside too if asked; raises DatasetError like a scan.

    Without `links`, those that lead into the folder itself are followed.
    """
    followed = links or Links([folder])
    return [file for _, files in _directories(folder, recursive, followed) for file in files if is_picture(file)]


def _scan_folder(config: FolderConfig, dataset: DatasetConfig, imported: Imported, scan: Scan, links: Links) -> None:
    root = Path(config.path).absolute()
    whole = _read_metadata(root, scan, links)
    for path, files in _directories(root, config.recursive, links):
        above = {} if path == root else below(whole, path.relative_to(root).as_posix())
        own = whole if path == root else _read_metadata(path, scan, links)
        directory = _Directory(path, files, _read_notes(path, links), {**above, **own})
        facts = _folder_facts(config, root, path, scan, links)
        for file in files:
            if is_picture(file):
                _scan_picture(file, directory, facts, dataset, imported, scan)
        _mark_strays(directory, scan)


def _directories(root: Path, recursive: bool, links: Links) -> list[tuple[Path, list[Path]]]:
    """Return the directories that hold the folder's pictures, each with its files in the order of their names.

    A folder without pictures of its own but with folders inside that are named as kohya does, such as 10_cat, is
    taken for a kohya root: those are read.
    """
    if recursive:
        walked = [Path(path) for path, _, _ in os.walk(root, onerror=_refuse)]
        # os.walk follows Windows' junctions on Python 3.11.
        visible = [folder for folder in sorted(walked) if not _hidden(folder, root) and links.allow(folder)]
        listed = [(folder, _files(folder, links)) for folder in visible]
    else:
        listed = [(root, _files(root, links))]
        if not any(is_picture(file) for file in listed[0][1]):
            named = [folder for folder in _subfolders(root) if _KOHYA_NAME.fullmatch(folder.name)]
            listed = [(folder, _files(folder, links)) for folder in named if links.allow(folder)]
    filled = [(folder, files) for folder, files in listed if any(is_picture(file) for file in files)]
    if not filled:
        raise _no_pictures(root)
    return filled


def _files(folder: Path, links: Links) -> list[Path]:
    """Return the files of a folder without hidden ones, such as macOS leaves beside others, and links to elsewhere."""
    try:
        with os.scandir(long_path(folder)) as entries:
            visible = [entry for entry in entries if entry.is_file() and not entry.name.startswith(".")]
            # Only what the directory itself calls a link is resolved: for every file that would take seconds.
            names = [each.name for each in visible if not each.is_symlink() or links.allow(folder / each.name)]
    except OSError as fault:
        _refuse(fault)
    return [folder / name for name in sorted(names)]


def _refuse(fault: OSError) -> NoReturn:
    folder = Path(fault.filename)
    if isinstance(fault, FileNotFoundError):
        raise _missing(folder) from fault
    if isinstance(fault, NotADirectoryError):
        remedy = "Name the folder that holds the pictures."
        raise DatasetError("dataset.no_folder", f"{folder} is a file, not a folder.", remedy) from fault
    sentence = f"The folder {folder} cannot be read ({fault.strerror or fault})."
    remedy = "Change the folder's permissions, or copy the pictures elsewhere."
    raise DatasetError("dataset.folder_unreadable", sentence, remedy) from fault


def _subfolders(root: Path) -> list[Path]:
    with os.scandir(long_path(root)) as entries:
        return sorted(root / entry.name for entry in entries if entry.is_dir())


def _hidden(path: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(root).parts)


def _missing(folder: Path) -> DatasetError:
    siblings = [entry.name for entry in folder.parent.iterdir() if entry.is_dir()] if folder.parent.is_dir() else []
    near = difflib.get_close_matches(folder.name, siblings, n=1)
    hint = f" Beside it there is {near[0]}." if near else ""
    return DatasetError(
        "dataset.folder_missing",
        f"The folder {folder} does not exist.{hint}",
        "Correct the folder's path; in a job it is counted from the job file.",
    )


def _no_pictures(root: Path) -> DatasetError:
    below = sum(is_picture(Path(name)) for _, _, names in os.walk(root) for name in names)
    if below:
        sentence = f"The folder {root} holds no pictures itself, but {below} lie in folders inside it."
        return DatasetError("dataset.folder_empty", sentence, "Set recursive = true for this folder, or name those.")
    return DatasetError(
        "dataset.folder_empty",
        f"The folder {root} holds no pictures.",
        f"Put pictures into it ({', '.join(sorted(suffix[1:] for suffix in SUFFIXES))}), or name another folder.",
    )


def _folder_facts(config: FolderConfig, root: Path, path: Path, scan: Scan, links: Links) -> FolderFacts:
    """Return what holds for a directory: as the job says, else it, or the nearest directory above it in the folder."""
    marks = folder_marks([(folder.name, _read_notes(folder, links).folder) for folder in chain_of(root, path)])
    if marks.named and not config.repeats and marks.named >= _MANY_REPEATS:
        scan.marks["folder.many_repeats"].append(path)
    class_words = _first(config.class_words, marks.class_words).strip()
    _require_unicode(class_words, path)
    return FolderFacts(
        kind="regularisation" if config.kind == "train" and marks.regularisation else config.kind,
        repeats=config.repeats or marks.repeats or 1,
        weight=config.weight,
        trigger=_first(config.trigger, marks.trigger).strip(),
        class_words=class_words,
    )


def _require_unicode(words: str, path: Path) -> None:
    """Refuse words from a directory's name that is no Unicode, as Linux allows: no text encoder can read them."""
    try:
        words.encode("utf-8")
    except UnicodeEncodeError as fault:
        sentence = f"The name of the folder {path} gives words to learn that are no Unicode text."
        remedy = "Rename the folder, or state class_words for it in the job."
        raise DatasetError("dataset.folder_name", sentence, remedy) from fault


def chain_of(root: Path, path: Path) -> list[Path]:
    """Return a directory and those above it up to the dataset's folder, nearest first."""
    return [path, *(parent for parent in path.parents if parent.is_relative_to(root))]


def folder_marks(chain: Sequence[tuple[str, FolderNotes]]) -> FolderMarks:
    """Return what names and notes say of a directory: the nearest that says something counts.

    `chain` has the name and the notes of the directory and of those above it, nearest first.
    """
    names = [_KOHYA_NAME.fullmatch(name) for name, _ in chain]
    repeats = [note.repeats or (int(name[1]) if name else None) for (_, note), name in zip(chain, names, strict=True)]
    named = next((name for name in names if name), None)
    return FolderMarks(
        repeats=next((number for number in repeats if number), None),
        named=int(named[1]) if named else None,
        regularisation=any(note.regularisation for _, note in chain),
        trigger=next((note.trigger for _, note in chain if note.trigger is not None), None),
        class_words=named[2] if named else None,
    )


def _first(*texts: str | None) -> str:
    return next((text for text in texts if text is not None), "")


def _scan_picture(
    file: Path, directory: _Directory, facts: FolderFacts, dataset: DatasetConfig, imported: Imported, scan: Scan
) -> None:
    notes = directory.notes.of(file.name)
    if notes.excluded:
        scan.marks["picture.excluded"].append(file)
        return
    if len(directory.pictures(file.stem)) > 1:
        scan.marks["picture.same_stem"].append(file)
    mask = directory.beside(file.stem + MASK, ".png")
    if mask and dataset.masks not in ("auto", "files"):
        scan.marks["mask.unused"].append(mask)
        mask = None
    captions = imported.get(file) or _captions(file, directory, facts, dataset, scan)
    scan.candidates.append(ImageFile(file, facts, captions, mask, notes.crop))


def _captions(file: Path, directory: _Directory, facts: FolderFacts, dataset: DatasetConfig, scan: Scan) -> Captions:
    """Return a picture's captions from the first of .txt, .caption and metadata.jsonl, and mark what is doubtful."""
    sources = [path for suffix in caption_files.SUFFIXES if (path := directory.beside(file.stem, suffix))]
    texts = [text for path in sources if (text := _caption_text(path, scan)) is not None]
    if (listed := directory.metadata.get(file.name)) is not None:
        texts.append(listed)
    found = [caption_files.split_caption(text, dataset.lines) for text in texts]
    if len(set(found)) > 1:
        scan.marks["caption.clash"].append(file)
    if used := next((alternatives for alternatives in found if alternatives), ()):
        return used
    if facts.class_words or facts.trigger:
        scan.marks["caption.words"].append(file)
    else:
        scan.marks["caption.empty" if found else "caption.missing"].append(file)
    return ()


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
    """Return the captions of a metadata file higher up for the pictures of a directory inside, by their bare names."""
    start = inside + "/"
    return {name.removeprefix(start): text for name, text in metadata.items() if name.startswith(start)}


def _mark_strays(directory: _Directory, scan: Scan) -> None:
    """Mark files that belong to no picture, and pictures of kinds that are not read."""
    for file in directory.files:
        suffix = file.suffix.lower()
        if suffix in caption_files.SUFFIXES and not directory.pictures(file.stem):
            scan.marks["caption.orphan"].append(file)
        elif suffix in _OTHER_SUFFIXES:
            scan.marks["picture.other_kind"].append(file)
        elif file.stem.endswith(MASK) and not directory.pictures(file.stem.removesuffix(MASK)):
            scan.marks["mask.orphan"].append(file)


def is_picture(path: Path) -> bool:
    """Tell by its name whether a file is a picture to train on, neither a mask nor something else."""
    return is_picture_name(path.stem, path.suffix)


def is_picture_name(stem: str, suffix: str) -> bool:
    """Do the same for a name taken apart, where there are very many."""
    return suffix.lower() in SUFFIXES and not stem.endswith((MASK, _CONDITION))
