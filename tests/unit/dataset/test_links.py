"""Links in a dataset: followed inside the folders that the user named, left out and reported everywhere else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from trainer.config.job import DatasetConfig, FolderConfig
from trainer.dataset.findings import word_marks
from trainer.dataset.folders import image_files, scan_folders
from trainer.errors import DatasetError
from trainer.importers.onetrainer.concepts import import_concepts

Link = Callable[[Path, Path], None]
SECRET = "export TOKEN=sEcReT"


@pytest.fixture
def link(tmp_path: Path) -> Link:
    try:
        (tmp_path / "probe").symlink_to(tmp_path)
    except OSError:
        pytest.skip("this user may not make symbolic links")
    return lambda at, to: at.symlink_to(to, target_is_directory=to.is_dir())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "images ü"
    folder.mkdir()
    for name in ("a", "b"):
        Image.new("RGB", (64, 64), (name == "a" and "red") or "blue").save(folder / f"{name}.png")
    return folder


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    outside = tmp_path / "home"
    outside.mkdir()
    (outside / ".bashrc").write_text(SECRET, encoding="utf-8")
    Image.new("RGB", (64, 64), "green").save(outside / "private.png")
    (outside / "notes.jsonl").write_text('{"impasto": 1, "trigger": "sEcReT"}\n', encoding="utf-8")
    (outside / "list.jsonl").write_text('{"file_name": "b.png", "text": "sEcReT"}\n', encoding="utf-8")
    inner = outside / "5_inner"
    inner.mkdir()
    Image.new("RGB", (64, 64), "white").save(inner / "inner.png")
    return outside


def job(*folders: Path, linked: tuple[Path, ...] = (), recursive: bool = False) -> DatasetConfig:
    configs = tuple(FolderConfig(path=str(path), recursive=recursive) for path in folders)
    return DatasetConfig(folders=configs, linked_folders=tuple(map(str, linked)))


# Each kind of file that a dataset folder can hold, as a link: its name, and what it leads to.
LINKS = {
    "a.txt": ".bashrc",
    "a.caption": ".bashrc",
    "c.png": "private.png",
    "a-masklabel.png": "private.png",
    "impasto.jsonl": "notes.jsonl",
    "metadata.jsonl": "list.jsonl",
}


@pytest.mark.parametrize("name", LINKS)
def test_a_link_out_of_the_dataset_is_reported_and_not_read(name: str, folder, outside, link: Link) -> None:
    link(folder / name, outside / LINKS[name])
    scan = scan_folders(job(folder), {})
    assert scan.marks["file.outside"] == [folder / name]
    assert [candidate.path.name for candidate in scan.candidates] == ["a.png", "b.png"]
    assert "sEcReT" not in repr(scan.candidates)
    assert all(candidate.mask_path is None for candidate in scan.candidates)


@pytest.mark.parametrize("name", LINKS)
def test_a_link_into_a_folder_that_the_user_named_is_followed(name: str, folder, outside, link: Link) -> None:
    link(folder / name, outside / LINKS[name])
    scan = scan_folders(job(folder, linked=(outside,)), {})
    assert scan.marks["file.outside"] == []
    seen = repr(scan.candidates)
    assert "sEcReT" in seen or "c.png" in seen or "masklabel" in seen


def test_links_between_the_folders_of_a_job_are_followed(folder, outside, link: Link) -> None:
    link(folder / "c.png", outside / "private.png")
    link(folder / "b.txt", folder / "a.txt")
    (folder / "a.txt").write_text("a cat", encoding="utf-8")
    scan = scan_folders(job(folder, outside), {})
    assert scan.marks["file.outside"] == []
    captions = {candidate.path.name: candidate.captions for candidate in scan.candidates}
    assert captions["b.png"] == ("a cat",)
    assert "c.png" in captions


def test_a_folder_that_is_itself_a_link_is_where_it_leads(folder, tmp_path, link: Link) -> None:
    link(tmp_path / "other drive", folder)
    (folder / "a.txt").write_text("a cat", encoding="utf-8")
    link(folder / "b.txt", tmp_path / "other drive" / "a.txt")
    for path in (folder, tmp_path / "other drive"):
        scan = scan_folders(job(path), {})
        assert scan.marks["file.outside"] == []
        assert [candidate.captions for candidate in scan.candidates] == [("a cat",)] * 2


def test_a_name_that_only_begins_like_the_dataset_is_outside(folder, tmp_path, link: Link) -> None:
    other = tmp_path / f"{folder.name} 2"
    other.mkdir()
    (other / "x.txt").write_text(SECRET, encoding="utf-8")
    link(folder / "a.txt", other / "x.txt")
    assert scan_folders(job(folder), {}).marks["file.outside"] == [folder / "a.txt"]


def test_subfolders_that_lead_out_are_not_entered(folder, outside, link: Link, tmp_path) -> None:
    link(folder / "5_inner", outside / "5_inner")
    assert [path.name for path in image_files(folder, recursive=True)] == ["a.png", "b.png"]
    root = tmp_path / "kohya"
    (root / "1_own").mkdir(parents=True)
    Image.new("RGB", (64, 64)).save(root / "1_own" / "own.png")
    link(root / "5_inner", outside / "5_inner")
    scan = scan_folders(job(root), {})
    assert [candidate.path.name for candidate in scan.candidates] == ["own.png"]
    assert scan.marks["file.outside"] == [root / "5_inner"]


def test_the_report_says_what_was_left_out_and_what_to_do(folder, outside, link: Link) -> None:
    link(folder / "a.txt", outside / ".bashrc")
    (finding,) = (each for each in word_marks(scan_folders(job(folder), {}).marks) if each.code == "file.outside")
    assert finding.sentence == "1 file left out: links that point outside the dataset."
    assert "dataset.linked_folders" in finding.remedy


@pytest.mark.parametrize("prompts", [".bashrc", "linked.txt"])
def test_a_list_of_another_trainer_names_no_other_file_as_prompts(prompts: str, folder, outside, link: Link) -> None:
    link(outside / "linked.txt", outside / ".bashrc")
    text = {"prompt_source": "concept", "prompt_path": str(outside / prompts)}
    concepts = folder.parent / "concepts.json"
    concepts.write_text(json.dumps([{"path": str(folder), "text": text}]), encoding="utf-8")
    with pytest.raises(DatasetError, match=r"is not a \.txt file"):
        import_concepts(concepts)
