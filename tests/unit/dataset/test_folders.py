"""What folders say of their pictures: repeats, class words, triggers, captions, masks, exclusion; and bad folders."""

import os
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from tests.support.images import folder_of
from trainer.config.job import DatasetConfig, FolderConfig
from trainer.dataset.folders import ImageFile, Scan, require_images, scan_folders
from trainer.dataset.sidecar import Sidecar, write_sidecar
from trainer.errors import DatasetError


def fill(folder: Path, **texts: str) -> Path:
    """Make empty files (no scan opens a picture): names with "_" for "." as keyword, their text as value."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / ".".join(name.rsplit("_", 1))).write_text(text, encoding="utf-8")
    return folder


def scan(path: Path, **facts: object) -> Scan:
    return scan_folders(folder_of(path, **facts), {})


def only(path: Path, **facts: object) -> ImageFile:
    (candidate,) = scan(path, **facts).candidates
    return candidate


def names(paths: list[Path]) -> list[str]:
    return [path.name for path in paths]


def test_all_kinds_in_the_order_of_their_names_and_nothing_else(tmp_path: Path) -> None:
    for name in ("B.PNG", "a.jpg", "c.Jpeg", "d.webp", "e.bmp", "f.tif", "g.TIFF", "h.avif", "i.jxl", "j.gif"):
        (tmp_path / name).touch()
    for name in ("notes.md", ".hidden.png", "._a.jpg", "a-masklabel.png", "a-condlabel.png", "a.safetensors"):
        (tmp_path / name).touch()
    (tmp_path / "folder.png").mkdir()
    found = [candidate.path.name for candidate in scan(tmp_path).candidates]
    assert found == ["B.PNG", "a.jpg", "c.Jpeg", "d.webp", "e.bmp", "f.tif", "g.TIFF", "h.avif", "i.jxl", "j.gif"]


def test_kohya_names_give_repeats_and_class_words(tmp_path: Path) -> None:
    folder = only(fill(tmp_path / "10_sks dog", a_png="")).folder
    assert (folder.repeats, folder.class_words, folder.kind) == (10, "sks dog", "train")
    folder = only(tmp_path / "10_sks dog", repeats=2, class_words="cat").folder
    assert (folder.repeats, folder.class_words) == (2, "cat")


@pytest.mark.parametrize("name", ["dog", "_dog", "dog_10", "0_dog", "99999_dog", "1.5_dog"])
def test_other_names_give_nothing(tmp_path: Path, name: str) -> None:
    folder = only(fill(tmp_path / name, a_png="")).folder
    assert (folder.repeats, folder.class_words) == (1, "")


def test_a_kohya_root_is_read_by_its_folders(tmp_path: Path) -> None:
    fill(tmp_path / "2_dog", a_png="", b_png="")
    fill(tmp_path / "3_cat", c_png="")
    fill(tmp_path / "other", d_png="")
    found = {candidate.path.name: candidate.folder.repeats for candidate in scan(tmp_path).candidates}
    assert found == {"a.png": 2, "b.png": 2, "c.png": 3}


def test_a_year_in_the_name_is_doubted(tmp_path: Path) -> None:
    path = fill(tmp_path / "2023_holidays", a_png="")
    assert scan(path).marks["folder.many_repeats"] == [path]
    assert not scan(path, repeats=1).marks["folder.many_repeats"]


def test_recursion_takes_facts_from_the_nearest_folder(tmp_path: Path) -> None:
    fill(tmp_path / "pictures" / "4_dog" / "puppies" / ".thumbnails", x_png="")
    fill(tmp_path / "pictures" / "4_dog" / "puppies", a_png="")
    fill(tmp_path / "pictures" / "4_dog" / "2_old", b_png="")
    fill(tmp_path / "pictures", c_png="")
    write_sidecar(tmp_path / "pictures", Sidecar().with_folder(trigger="zwx", repeats=7))
    write_sidecar(tmp_path / "pictures" / "4_dog" / "2_old", Sidecar().with_folder(regularization=True, trigger=""))
    found = {c.path.name: c.folder for c in scan(tmp_path / "pictures", recursive=True).candidates}
    assert {name: (f.repeats, f.class_words, f.trigger, f.kind) for name, f in found.items()} == {
        "a.png": (4, "dog", "zwx", "train"),
        "b.png": (2, "old", "", "regularization"),
        "c.png": (7, "", "zwx", "train"),
    }


def test_the_job_comes_before_the_notes(tmp_path: Path) -> None:
    fill(tmp_path, a_png="")
    write_sidecar(tmp_path, Sidecar().with_folder(trigger="zwx", repeats=7))
    folder = only(tmp_path, trigger="abc", repeats=2, weight=0.5).folder
    assert (folder.trigger, folder.repeats, folder.kind, folder.weight) == ("abc", 2, "train", 0.5)


def test_captions_in_their_order_of_precedence(tmp_path: Path) -> None:
    fill(tmp_path, a_png="", a_txt="from txt", b_png="", b_caption="from caption", c_png="", D_png="", D_TXT="loud")
    (tmp_path / "metadata.jsonl").write_text(
        '{"file_name": "c.png", "text": "listed"}\n{"file_name": "a.png", "text": "from txt"}\n', encoding="utf-8"
    )
    result = scan(tmp_path)
    assert [c.captions for c in result.candidates] == [("loud",), ("from txt",), ("from caption",), ("listed",)]
    assert not any(result.marks.values())


def test_clashes_are_marked_and_the_first_that_says_something_is_used(tmp_path: Path) -> None:
    fill(tmp_path, a_png="", a_txt="one", a_caption="two", b_png="", b_txt=" ", b_caption="two")
    result = scan(tmp_path)
    assert [candidate.captions for candidate in result.candidates] == [("one",), ("two",)]
    assert names(result.marks["caption.clash"]) == ["a.png", "b.png"]


def test_stated_sources_are_read_in_their_order(tmp_path: Path) -> None:
    fill(tmp_path, a_png="", a_txt="txt", a_caption="caption", a_wd14="tags", b_png="", b_txt="txt", stray_wd14="tags")
    fill(tmp_path, c_png="", c_WD14=" ", stray_txt="txt")
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "c.png", "text": "listed"}\n', encoding="utf-8")
    found = scan(tmp_path, dataset_caption_sources=(".wd14", ".caption", "filename"))
    assert [candidate.captions for candidate in found.candidates] == [("tags",), ("b",), ("c",)]
    assert [(code, names(files)) for code, files in found.marks.items()] == [("caption.orphan", ["stray.wd14"])]
    found = scan(tmp_path, dataset_caption_sources=("filename",), caption_sources=("metadata",))
    assert [candidate.captions for candidate in found.candidates] == [(), (), ("listed",)]
    assert names(found.marks["caption.missing"]) == ["a.png", "b.png"]


def test_variants_when_the_dataset_says_so(tmp_path: Path) -> None:
    fill(tmp_path, a_png="", a_txt="one\ntwo\n")
    assert only(tmp_path).captions == ("one two",)
    assert only(tmp_path, dataset_lines="variants").captions == ("one", "two")


def test_missing_and_empty_captions_are_counted(tmp_path: Path) -> None:
    fill(tmp_path, a_png="", b_png="", b_txt="\n")
    marks = scan(tmp_path).marks
    assert (names(marks["caption.missing"]), names(marks["caption.empty"])) == (["a.png"], ["b.png"])
    marks = scan(tmp_path, trigger="zwx").marks
    assert names(marks["caption.words"]) == ["a.png", "b.png"]
    assert not marks["caption.missing"] + marks["caption.empty"]


def test_other_encodings_are_marked_and_the_file_is_left(tmp_path: Path) -> None:
    fill(tmp_path, a_png="", b_png="")
    (tmp_path / "a.txt").write_bytes("Käthe".encode("cp1252"))
    (tmp_path / "b.txt").write_bytes("Käthe".encode("utf-16"))
    result = scan(tmp_path)
    assert [candidate.captions for candidate in result.candidates] == [("Käthe",), ("Käthe",)]
    assert (names(result.marks["caption.cp1252"]), names(result.marks["caption.utf-16"])) == (["a.txt"], ["b.txt"])
    assert (tmp_path / "a.txt").read_bytes() == "Käthe".encode("cp1252")


def test_a_caption_that_is_none_is_an_error_of_its_own(tmp_path: Path) -> None:
    fill(tmp_path, a_png="")
    (tmp_path / "a.txt").write_bytes(b"\0\1\2")
    result = scan(tmp_path)
    assert [(finding.code, finding.severity) for finding in result.findings] == [("caption.unreadable", "error")]
    assert names(result.marks["caption.missing"]) == ["a.png"]


def test_metadata_above_speaks_of_folders_inside(tmp_path: Path) -> None:
    fill(tmp_path / "train", a_png="")
    lines = '{"file_name": "train/a.png", "text": "above"}\n{"file_name": "gone.png", "text": "x"}\nbroken\n'
    (tmp_path / "metadata.jsonl").write_text(lines, encoding="utf-8")
    result = scan(tmp_path, recursive=True)
    assert [candidate.captions for candidate in result.candidates] == [("above",)]
    assert names(result.marks["metadata.orphan"]) == ["gone.png"]
    assert [finding.code for finding in result.findings] == ["metadata.damaged"]


def test_imported_captions_come_first(tmp_path: Path) -> None:
    fill(tmp_path, a_png="", a_txt="file", b_png="", b_txt="file")
    result = scan_folders(folder_of(tmp_path), {tmp_path / "a.png": ("imported",)})
    assert [candidate.captions for candidate in result.candidates] == [("imported",), ("file",)]


def test_exclusion_and_crops_from_the_notes(tmp_path: Path) -> None:
    fill(tmp_path, a_png="", b_png="")
    notes = Sidecar().with_image("a.png", excluded=True).with_image("b.png", crop=(0.1, 0.2, 0.9, 1.0))
    write_sidecar(tmp_path, notes)
    result = scan(tmp_path)
    assert [(c.path.name, c.crop) for c in result.candidates] == [("b.png", (0.1, 0.2, 0.9, 1.0))]
    assert names(result.marks["image.excluded"]) == ["a.png"]


def test_masks_beside_pictures(tmp_path: Path) -> None:
    fill(tmp_path, a_png="", b_png="")
    (tmp_path / "a-masklabel.PNG").touch()
    (tmp_path / "c-masklabel.png").touch()
    for result in (scan(tmp_path), scan(tmp_path, dataset_masks="files")):
        assert [c.mask_path and c.mask_path.name for c in result.candidates] == ["a-masklabel.PNG", None]
        assert names(result.marks["mask.orphan"]) == ["c-masklabel.png"]
    result = scan(tmp_path, dataset_masks="none")
    assert [candidate.mask_path for candidate in result.candidates] == [None, None]
    assert names(result.marks["mask.unused"]) == ["a-masklabel.PNG"]


def test_masks_in_a_folder_of_their_own(tmp_path: Path) -> None:
    images, masks = tmp_path / "images", tmp_path / "masks"
    fill(images, a_png="", b_jpg="", c_png="", d_png="").joinpath("c-masklabel.png").touch()
    fill(masks, a_png="", b_webp="", lost_png="", d_txt="")
    result = scan(images, mask_folder=str(masks))
    found = {candidate.path.name: candidate.mask_path for candidate in result.candidates}
    assert found == {
        "a.png": masks / "a.png", "b.jpg": masks / "b.webp", "c.png": images / "c-masklabel.png", "d.png": None,
    }  # fmt: skip
    assert result.marks["mask.orphan"] == [masks / "lost.png"]
    for off in ("none", "alpha"):
        result = scan(images, mask_folder=str(masks), masks=off)
        assert not any(candidate.mask_path for candidate in result.candidates)
        assert result.marks["mask.unused"] == [images / "c-masklabel.png"]
    assert refusal(images, mask_folder=str(tmp_path / "gone")).code == "dataset.folder_missing"


def test_masks_of_subfolders_are_in_subfolders_and_no_images(tmp_path: Path) -> None:
    masks = tmp_path / "masks"
    fill(tmp_path / "cat", a_png="")
    fill(tmp_path / "dog", a_png="")
    fill(masks / "cat", a_png="")
    result = scan(tmp_path, recursive=True, mask_folder=str(masks))
    assert [(candidate.path.parent.name, candidate.mask_path) for candidate in result.candidates] == [
        ("cat", masks / "cat" / "a.png"),
        ("dog", None),
    ]
    require_images(folder_of(tmp_path, recursive=True, mask_folder=str(masks)))
    with pytest.raises(ValidationError, match="masks need a folder of their own"):
        folder_of(masks, mask_folder=str(masks))


def test_strays_are_marked(tmp_path: Path) -> None:
    fill(tmp_path, a_png="", a_jpg="", lost_txt="", raw_heic="")
    marks = scan(tmp_path).marks
    assert names(marks["image.same_stem"]) == ["a.jpg", "a.png"]
    assert names(marks["caption.orphan"]) == ["lost.txt"]
    assert names(marks["image.other_kind"]) == ["raw.heic"]


def test_spaces_and_letters_of_other_scripts(tmp_path: Path) -> None:
    folder = fill(tmp_path / "Käthes Bilder 猫")
    (folder / "mein bild ü.png").touch()
    (folder / "mein bild ü.txt").write_text("猫", encoding="utf-8")
    assert only(folder).captions == ("猫",)


def refusal(*folders: Path, **facts: object) -> DatasetError:
    stated = [FolderConfig.model_validate({"path": str(path), **facts}) for path in folders]
    config = DatasetConfig(folders=tuple(stated))
    with pytest.raises(DatasetError) as caught:
        scan_folders(config, {})
    assert caught.value.remedy
    return caught.value


@pytest.mark.parametrize("recursive", [False, True])
@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("gone/far", "dataset.folder_missing"),
        ("picturs", "dataset.folder_missing"),
        ("a.png", "dataset.no_folder"),
        ("damaged", "sidecar.damaged"),
    ],
    ids=["a missing folder", "a misspelled folder", "a file in place of a folder", "damaged notes"],
)
def test_what_cannot_be_scanned_is_refused(tmp_path: Path, name: str, code: str, recursive: bool) -> None:
    fill(tmp_path / "pictures", a_png="")
    fill(tmp_path / "damaged", a_png="", impasto_jsonl="{")
    (tmp_path / "a.png").touch()
    assert refusal(tmp_path / name, recursive=recursive).code == code


def test_a_missing_folder_names_the_nearest(tmp_path: Path) -> None:
    fill(tmp_path / "pictures", a_png="")
    assert str(refusal(tmp_path / "picturs")).endswith("Did you mean pictures?")


def test_a_folder_without_pictures(tmp_path: Path) -> None:
    error = refusal(fill(tmp_path / "empty", notes_md=""))
    assert error.code == "dataset.folder_empty"
    fill(tmp_path / "outer" / "inner", a_png="", b_png="")
    error = refusal(tmp_path / "outer")
    assert "but 2 in its subfolders" in str(error)
    assert "recursive = true" in error.remedy


def test_all_bad_folders_at_once(tmp_path: Path) -> None:
    error = refusal(tmp_path / "one", fill(tmp_path / "good", a_png=""), tmp_path / "two")
    assert "one" in str(error)
    assert "two" in str(error)


@pytest.mark.parametrize("recursive", [False, True])
def test_an_unreadable_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recursive: bool) -> None:
    """The error is made where the system's call fails, since root may read everything."""
    fill(tmp_path, a_png="")

    def refuse(path: object = ".") -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "scandir", refuse)
    assert refusal(tmp_path, recursive=recursive).code == "dataset.folder_unreadable"


def test_a_file_name_that_is_no_unicode(tmp_path: Path) -> None:
    if sys.platform != "linux":
        return  # only Linux has such names
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.png")).touch()
    assert len(scan(tmp_path).candidates) == 1
    assert only(tmp_path, caption_sources=("filename",)).captions == ("\ufffd",)


def test_words_of_a_folder_whose_name_is_no_unicode_are_refused_and_stated_ones_taken(tmp_path: Path) -> None:
    if sys.platform != "linux":
        return  # only Linux has such names
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/5_c\xfft"))
    fill(folder, a_png="")
    assert refusal(tmp_path).code == "dataset.folder_name"
    assert only(tmp_path, class_words="cat").folder.class_words == "cat"
