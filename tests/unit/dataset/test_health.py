"""What a check finds in real photographs that were spoilt in one way each, and what it says of an epoch."""

import json
import pickle
import re
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.support.images import display_p3, folder_of, make_picture, photograph, recipe_of
from trainer.config.job import DatasetConfig, FolderConfig
from trainer.config.recipe import RecipeConfig
from trainer.dataset import findings
from trainer.dataset.dataset import Dataset, describe, read_dataset
from trainer.dataset.findings import Finding


@cache
def small(source: str, size: tuple[int, int]) -> Image.Image:
    return photograph(source).resize(size)


def save(path: Path, source: str = "astronaut.png", size: tuple[int, int] = (160, 160), **options: object) -> Path:
    small(source, size).save(path, **options)  # type: ignore[arg-type]
    path.with_suffix(".txt").write_text(f"a caption of {path.stem}", encoding="utf-8")
    return path


def check(path: Path, recipe: RecipeConfig | None = None, **facts: object) -> dict[str, Finding]:
    return {f.code: f for f in read_dataset(folder_of(path, **facts), recipe or recipe_of(128)).findings}


def names(finding: Finding) -> list[str]:
    return [path.name for path in finding.paths]


@pytest.fixture
def good(tmp_path: Path) -> Path:
    """Four photographs with which nothing is wrong."""
    for source in ("astronaut.png", "chelsea.png", "coffee.png", "rocket.jpg"):
        save(tmp_path / source.replace("jpg", "png"), source)
    return tmp_path


def test_a_good_dataset_has_nothing_wrong(good: Path) -> None:
    assert not check(good)


def test_turned_animated_and_misnamed_pictures_are_named(good: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    save(good / "turned.jpg", "cell.png", exif=exif)
    frames = [photograph(name).resize((160, 160)) for name in ("coins.png", "page.png")]
    frames[0].save(good / "moving.gif", save_all=True, append_images=frames[1:])
    save(good / "wrong.png", "ihc.png").rename(good / "wrong.jpg")
    (good / "moving.txt").write_text("coins", encoding="utf-8")
    found = check(good)
    assert {code: names(finding) for code, finding in found.items()} == {
        "image.rotated": ["turned.jpg"],
        "image.animated": ["moving.gif"],
        "image.misnamed": ["wrong.jpg"],
    }
    assert {finding.severity for finding in found.values()} == {"info"}


def test_a_phones_second_picture_is_no_animation(good: Path) -> None:
    images = [photograph(name).resize((160, 160)) for name in ("coins.png", "page.png")]
    images[0].save(good / "phone.jpg", format="MPO", save_all=True, append_images=images[1:])
    (good / "phone.txt").write_text("coins", encoding="utf-8")
    assert not check(good)


def test_small_and_tiny_and_much_cropped_pictures(good: Path) -> None:
    save(good / "small.png", "cell.png", (110, 110))
    save(good / "tiny.png", "coins.png", (20, 20))
    save(good / "wide.png", "page.png", (3000, 200))
    found = check(good)
    assert {code: (names(f), f.severity) for code, f in found.items() if code != "bucket.lonely"} == {
        "image.small": (["small.png"], "warning"),
        "image.tiny": (["tiny.png"], "error"),
        "image.cropped": (["wide.png"], "warning"),
    }


def test_a_stored_crop_counts_as_the_picture(good: Path) -> None:
    (good / "impasto.jsonl").write_text('{"file": "chelsea.png", "crop": [0, 0, 0.5, 0.5]}\n', encoding="utf-8")
    found = check(good)
    assert names(found["image.small"]) == ["chelsea.png"]


def test_copies_and_near_copies_are_named_together(good: Path) -> None:
    (good / "copy.png").write_bytes((good / "coffee.png").read_bytes())
    save(good / "again.jpg", "chelsea.png", (200, 200), quality=60)
    (good / "copy.txt").write_text("a copy", encoding="utf-8")
    found = check(good)
    assert names(found["image.same"]) == ["coffee.png", "copy.png"]
    assert names(found["image.near"]) == ["again.jpg", "chelsea.png"]
    assert found["image.same"].sentence == "coffee.png and copy.png are exactly the same."
    assert found["image.near"].sentence == "again.jpg and chelsea.png are nearly the same."


def test_many_groups_of_copies_become_one_finding() -> None:
    groups = [[Path(f"{number}.png"), Path(f"{number}.jpg"), Path("x.png")] for number in range(9)]
    assert len(findings.word_copies(groups[:8], exact=False)) == 8
    (finding,) = findings.word_copies(groups, exact=False)
    assert (finding.code, len(finding.paths)) == ("image.near", 27)
    assert finding.sentence == "27 images in 9 groups are nearly the same."
    (finding,) = findings.word_copies([[Path(f"{number}.png") for number in range(6)]], exact=True)
    assert finding.sentence == "0.png, 1.png, 2.png, 3.png and 2 more images are exactly the same."


def test_a_validation_picture_that_is_nearly_learned(good: Path, tmp_path: Path) -> None:
    held = tmp_path / "held"
    held.mkdir()
    save(held / "cat.jpg", "chelsea.png", (220, 220))
    folders = (FolderConfig(path=str(good)), FolderConfig(path=str(held), kind="validation"))
    dataset = read_dataset(DatasetConfig(folders=folders), recipe_of(128))
    found = {finding.code: names(finding) for finding in dataset.findings}
    assert found["image.held_out_near"] == ["cat.jpg"]


def test_folders_that_overlap(good: Path) -> None:
    (good / "inner").mkdir()
    save(good / "inner" / "cell.png", "cell.png")
    folders = (FolderConfig(path=str(good), recursive=True), FolderConfig(path=str(good / "inner")))
    (finding,) = read_dataset(DatasetConfig(folders=folders), recipe_of(128)).findings
    assert (finding.code, names(finding)) == ("image.twice", ["cell.png"])


def test_captions_longer_than_what_is_read(good: Path) -> None:
    (good / "chelsea.txt").write_text("cat " * 80, encoding="utf-8")
    assert names(check(good)["caption.long"]) == ["chelsea.png"]
    assert not check(good, recipe_of(128, token_chunks=150))
    (good / "chelsea.txt").write_text("cat " * 70, encoding="utf-8")
    assert not check(good)
    assert names(check(good, recipe_of(128, captions={"suffix": "dog " * 8}))["caption.long"])[:1] == ["chelsea.png"]


def test_weights_that_are_not_read_and_brackets_that_are(good: Path) -> None:
    texts = {
        "chelsea": "a (cat:1.2), \\(series\\)",
        "coffee": "(16:9), cup",
        "rocket": "rocket \\(nasa\\)",
        "astronaut": "eva",
    }
    for name, text in texts.items():
        (good / f"{name}.txt").write_text(text, encoding="utf-8")
    assert {code: names(found) for code, found in check(good).items()} == {"caption.weights": ["chelsea.png"]}
    (good / "rocket.txt").write_text("rocket (nasa)", encoding="utf-8")
    (good / "coffee.txt").write_text("[cup]", encoding="utf-8")
    found = check(good, recipe_of(128, weighted_captions=True))
    assert {code: names(one) for code, one in found.items()} == {"caption.brackets": ["coffee.png", "rocket.png"]}
    (good / "chelsea.txt").write_text("(cat:1.2) " * 70, encoding="utf-8")
    assert "caption.long" in check(good)
    assert "caption.long" not in check(good, recipe_of(128, weighted_captions=True))


def test_class_words_longer_than_what_is_read(good: Path) -> None:
    (good / "chelsea.txt").unlink()
    assert names(check(good, class_words="cat " * 80)["caption.long"]) == ["chelsea.png"]


def test_a_trigger_that_captions_lack(good: Path) -> None:
    (good / "chelsea.txt").write_text("a zwx cat", encoding="utf-8")
    finding = check(good, trigger="zwx")["trigger.absent"]
    assert (names(finding), finding.severity) == (["astronaut.png", "coffee.png", "rocket.png"], "info")


def test_a_broken_profile(good: Path) -> None:
    save(good / "odd.png", "cell.png", icc_profile=display_p3()[:300])
    save(good / "fine.png", "coins.png", icc_profile=display_p3())
    assert names(check(good)["image.profile"]) == ["odd.png"]


def test_masks_missing_bent_and_broken(good: Path) -> None:
    Image.new("L", (160, 160), 255).save(good / "coffee-masklabel.png")
    Image.new("L", (60, 160), 255).save(good / "chelsea-masklabel.png")
    (good / "rocket-masklabel.png").write_bytes(b"no mask")
    for masks in ("auto", "files"):
        found = check(good, dataset_masks=masks)
        assert names(found["mask.missing"]) == ["astronaut.png", "rocket.png"]
    assert names(found["mask.size"]) == ["chelsea-masklabel.png"]
    assert names(found["image.unreadable"]) == ["rocket-masklabel.png"]
    dataset = read_dataset(folder_of(good, dataset_masks="files"), recipe_of(128))
    masked = {picture.path.name: picture.mask_path for picture in dataset.images if picture.mask == "file"}
    assert masked == {"coffee.png": good / "coffee-masklabel.png", "chelsea.png": good / "chelsea-masklabel.png"}
    assert all((picture.mask_id is not None) == (picture.mask == "file") for picture in dataset.images)


def test_masks_are_missing_only_where_some_are_painted_or_they_are_asked_for(good: Path) -> None:
    assert "mask.missing" not in check(good)
    assert len(check(good, dataset_masks="files")["mask.missing"].paths) == 4


def test_check_counts_masks_and_warns_of_ignored_ones(good: Path) -> None:
    Image.new("L", (160, 160), 255).save(good / "coffee-masklabel.png")
    assert "1 of 4 images with a mask" in describe(read_dataset(folder_of(good), recipe_of(128)), recipe_of(128))
    found = check(good, dataset_masks="none")
    assert (names(found["mask.unused"]), found["mask.unused"].severity) == (["coffee-masklabel.png"], "warning")


def test_masks_from_transparency(good: Path) -> None:
    image = photograph("cell.png").resize((160, 160)).convert("RGBA")
    image.putalpha(Image.fromarray(np.tile(np.arange(160, dtype=np.uint8), (160, 1))))
    image.save(good / "glass.png")
    (good / "glass.txt").write_text("glass", encoding="utf-8")
    dataset = read_dataset(folder_of(good, dataset_masks="alpha"), recipe_of(128))
    assert [picture.path.name for picture in dataset.images if picture.mask == "alpha"] == ["glass.png"]
    assert len(next(f for f in dataset.findings if f.code == "mask.missing").paths) == 4


def test_lonely_buckets_are_told_where_there_are_several(good: Path) -> None:
    save(good / "wide.png", "cell.png", (384, 128))
    assert names(check(good)["bucket.lonely"]) == ["wide.png"]
    assert "bucket.lonely" not in check(good, repeats=4)
    (good / "wide.png").unlink()
    assert "bucket.lonely" not in check(good, recipe_of(128, effective_batch=9))


def test_errors_come_first(good: Path) -> None:
    (good / "bad.png").write_bytes(b"bad")
    exif = Image.Exif()
    exif[0x0112] = 3
    save(good / "turned.jpg", "cell.png", exif=exif)
    (good / "coffee.txt").unlink()
    severities = [finding.severity for finding in read_dataset(folder_of(good), recipe_of(128)).findings]
    assert severities == ["error", "warning", "info"]


def test_all_pictures_bad_is_still_a_report(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"bad")
    dataset = read_dataset(folder_of(tmp_path), recipe_of(128))
    assert not dataset.images
    assert "image.unreadable" in {finding.code for finding in dataset.findings}


def test_every_mark_that_the_code_sets_has_its_words() -> None:
    source = "".join(path.read_text(encoding="utf-8") for path in Path(findings.__file__).parent.glob("*.py"))
    marked = set(re.findall(r'marks\["([a-z0-9_.-]+)"\]', source)) | set(re.findall(r'_mark\("([a-z0-9_.-]+)"', source))
    assert {"caption.missing", "mask.size", "image.tiny"} <= marked | set(findings.RULES)
    assert marked <= set(findings.RULES)
    for code in findings.RULES:
        for count in (1, 2):
            (finding,) = findings.word_marks({code: [Path("a")] * count})
            assert finding.sentence.startswith(f"{count} ")
            assert "{" not in finding.sentence


def test_every_fault_of_a_file_has_its_words_and_keeps_them_across_json() -> None:
    """A code without words raises KeyError where the engine or the window words it: this meets it before."""
    source = "".join(path.read_text(encoding="utf-8") for path in Path(findings.__file__).parent.glob("*.py"))
    raised = set(re.findall(r'(?:file_fault|Finding)\(\s*"([a-z0-9_.-]+)"', source))
    raised |= set(re.findall(r'"(image\.(?:empty|jpeg_xl|unreadable))"', source))
    assert raised == set(findings.FILE_FAULTS)
    values = {"reason": "torn", "width": 9, "height": 8, "megapixels": 7.2, "limit": 1.0, "seconds": 20.0}
    for code in findings.FILE_FAULTS:
        error = findings.file_fault(code, Path("ü.png"), **values)
        crossed = findings.Finding(code, json.loads(json.dumps(error.values)), severity="error")
        assert "ü.png" in error.sentence and "{" not in error.sentence
        assert (crossed.sentence, crossed.remedy) == (error.sentence, error.remedy)
        assert pickle.loads(pickle.dumps(error)).values == error.values  # decoders run in processes of their own
    with pytest.raises(KeyError, match=r"image\.new"):
        findings.file_fault("image.new", Path("a"))


def test_an_epoch_is_described(good: Path) -> None:
    recipe = recipe_of(128, effective_batch=3)
    dataset = read_dataset(folder_of(good, repeats=2, trigger="zwx", dataset_validation_share=0.25), recipe)
    lines = describe(dataset, recipe, show_captions=True)
    held = next(picture for picture in dataset.images if picture.kind == "validation")
    assert lines[:2] == ["3 images for training, 6 samples per epoch", "1 image held out for validation"]
    assert "  128×128: 4, 0.0%, 0.0%" in lines
    assert "Epoch: 6 samples in 2 steps of up to 3 images" in lines
    assert f"  {held.path.name}: zwx, a caption of {held.path.stem} (held out)" in lines
    assert sum(line.endswith("(×2)") for line in lines) == 3
    assert len(describe(dataset, recipe)) == len(lines) - 6


def test_crops_are_described_by_bucket() -> None:
    pictures = (make_picture(1, width=256), make_picture(2, width=128), make_picture(3, width=64, bucket=(64, 128)))
    lines = describe(Dataset(pictures, ()), recipe_of(128))
    assert "  128×128: 2, 25.0%, 50.0%" in lines
    assert "  64×128: 1, 0.0%, 0.0%" in lines
