"""What a look at the disk shows of captions, masks and shapes is judged while it changes, as the trainer judges it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from app.core.disk.datasets import Datasets
from app.core.health import findings, inspector
from app.core.health.groups import JudgingTarget
from app.core.health.health import Health
from app.core.library import FolderChange
from app.core.tags.index import TagIndex
from app.core.tags.splitting import Lines
from tests.support.desk import Desk, a_desk
from tests.support.processes import no_process_starts
from trainer.config.job import DatasetConfig, FolderConfig
from trainer.config.recipe import RecipeConfig
from trainer.dataset import decoders
from trainer.dataset.dataset import read_dataset
from trainer.dataset.sidecar import FolderSettings, Sidecar, write_sidecar

CODES = (
    "file.outside",
    "caption.clash",
    "mask.size",
    "bucket.lonely",
    "caption.orphan",
    "mask.orphan",
    "caption.long",
    "trigger.absent",
)
SIDE = 256


class Watched:
    """An open folder with its health."""

    def __init__(self, desk: Desk, folder: Path) -> None:
        self.desk, self.folder, self.library = desk, folder, desk.library
        self.datasets = Datasets(desk.library, desk.tasks)
        self.health = Health(
            desk.library, TagIndex(desk.library), desk.tasks, desk.post, JudgingTarget(resolution=SIDE)
        )
        self.datasets.orphans_changed.connect(self.health.set_orphan_files)
        self.datasets.closed.connect(self.health.forget_dataset)
        self.datasets.captions_changed.connect(self.health.inspect_again)
        self.datasets.known.connect(lambda _: self.health.start_inspection())
        self.datasets.scanned.connect(lambda _: self.health.retry_missing())
        self.datasets.open(folder)
        self.settle()

    def look(self) -> None:
        self.datasets.refresh(whole=True)
        self.settle()

    def settle(self) -> None:
        self.desk.until(self.idle)

    def idle(self) -> bool:
        state = self.health.current_progress()
        looks = any(each.scanning or each.sizing for each in self.datasets._open.values())
        busy = looks or state.judging or state.inspecting or self.health._report_scheduled
        return bool(self.health.judge) and not busy

    def found(self) -> dict[str, list[str]]:
        """Which pictures or files are told of, by code."""
        pictures = self.library.images
        return {
            one.code: sorted([*(pictures[number].name for number in one.ids), *(path.name for path in one.files)])
            for one in self.health.current_findings
            if one.code in CODES
        }

    def of_trainer(self, lines: Lines = "caption") -> dict[str, list[str]]:
        """What the trainer's check tells; of a mask it names the file, where we name the picture."""
        folders = (FolderConfig(path=str(self.folder), recursive=True),)
        config = DatasetConfig(folders=folders, validation_share=0.0, masks="files", lines=lines)
        told: dict[str, list[str]] = {}
        for finding in read_dataset(config, RecipeConfig(resolution=SIDE)).findings:
            if finding.code in CODES:
                names = [path.name for path in finding.paths]
                of_masks = finding.code == "mask.size"
                told[finding.code] = sorted(n.replace("-masklabel", "") if of_masks else n for n in names)
        return told


def save(path: Path, size: tuple[int, int] = (SIDE, SIDE), color: str = "teal") -> None:
    Image.new("RGB", size, color).save(path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "ein Ordner é"
    folder.mkdir()
    for number, color in enumerate(("teal", "navy", "olive", "coral", "khaki")):
        save(folder / f"{number}.png", color=color)
        (folder / f"{number}.txt").write_text("a cat", encoding="utf-8")
    return folder


@pytest.fixture
def watched(folder: Path) -> Iterator[Watched]:
    with a_desk() as desk:
        made = Watched(desk, folder)
        yield made
        made.health.close()


def test_captions_that_differ_are_told_until_they_agree(watched: Watched, folder: Path) -> None:
    assert watched.found() == {} == watched.of_trainer()
    (folder / "1.caption").write_text("a dog", encoding="utf-8")
    (folder / "2.caption").write_text(" a cat\n", encoding="utf-8")
    watched.look()
    assert watched.found() == {"caption.clash": ["1.png"]} == watched.of_trainer()
    (folder / "1.txt").write_text("a dog", encoding="utf-8")
    watched.look()
    assert watched.found() == {} == watched.of_trainer()


def test_each_line_is_judged_where_lines_are_alternatives(watched: Watched, folder: Path) -> None:
    (folder / "0.txt").write_text("a cat, " * 20 + "\n" + "zok, a dog, " * 12, encoding="utf-8")  # long only together
    (folder / "1.txt").write_text("zok, a cat\na cat of zok\n", encoding="utf-8")
    (folder / "2.txt").write_text("zok\n" + "zok, a cat, " * 40, encoding="utf-8")  # long by itself
    write_sidecar(folder, Sidecar(FolderSettings(trigger="zok"), {}))
    watched.look()
    absent = ["3.png", "4.png"]
    assert watched.found() == {"caption.long": ["0.png", "2.png"], "trigger.absent": absent} == watched.of_trainer()
    watched.health.set_target(JudgingTarget(SIDE, lines="variants"))
    watched.settle()
    told = {"caption.long": ["2.png"], "trigger.absent": ["0.png", *absent]}
    assert watched.found() == told == watched.of_trainer("variants")
    edit = findings.put_trigger_first(list(watched.library.images.values()), "variants")
    watched.library.apply(edit.changes)
    watched.settle()
    assert watched.found() == {"caption.long": ["2.png"]}


def test_a_mask_of_another_shape_is_told_until_it_is_saved_anew(watched: Watched, folder: Path) -> None:
    mask = folder / "3-masklabel.png"
    save(mask, (SIDE, SIDE // 2))
    save(folder / "4-masklabel.png", (SIDE // 2, SIDE // 2))  # smaller, yet of the same shape
    watched.look()
    assert watched.found() == {"mask.size": ["3.png"]} == watched.of_trainer()
    save(mask)
    watched.look()
    assert watched.found() == {} == watched.of_trainer()
    save(mask, (SIDE, SIDE // 2))
    watched.look()
    assert watched.found() == {"mask.size": ["3.png"]}
    mask.unlink()
    watched.look()
    assert watched.found() == {} == watched.of_trainer()


def test_a_shape_that_fills_no_batch_is_told_until_it_does(watched: Watched, folder: Path) -> None:
    save(folder / "wide.png", (SIDE * 2, SIDE))
    (folder / "wide.txt").write_text("a cat", encoding="utf-8")
    watched.look()
    assert watched.found() == {"bucket.lonely": ["wide.png"]} == watched.of_trainer()
    inside = next(iter(watched.library.images.values())).folder
    watched.library.apply_to_folders([FolderChange(inside, "repeats", None, 4)])
    watched.settle()
    assert watched.found() == {}
    watched.library.apply_to_folders([FolderChange(inside, "repeats", 4, None)])
    for number in range(4):  # the last one of the usual shape is now the lonely one's like
        (folder / f"{number}.png").unlink()
        (folder / f"{number}.txt").unlink()
    watched.look()
    watched.look()
    assert watched.found() == {"bucket.lonely": ["4.png", "wide.png"]} == watched.of_trainer()
    watched.library.apply_to_folders([FolderChange(inside, "regularization", False, True)])
    watched.settle()
    assert watched.found() == {}


def test_pictures_that_no_process_can_look_at_are_not_called_damaged(folder: Path) -> None:
    with a_desk() as desk:
        with no_process_starts():
            watched = Watched(desk, folder)
        (told,) = [one for one in watched.health.current_findings if one.severity == "error"]
        assert told.code == "image.no_process" and not told.ids and "The images may be fine" in told.remedy
        assert told.action == "look"
        assert {(one.problem, one.width) for one in watched.library.images.values()} == {(None, SIDE)}
        (folder / "0.png").unlink()
        watched.look()  # asks nobody again before the user wants it, a folder is opened, or a while has passed
        assert watched.health._inspector.fault
        watched.health._inspector._retry_at = 0.0
        save(folder / "new.png", color="gold")
        watched.look()
        assert all(one.content for one in watched.library.images.values() if one.problem is None)
        assert not [one for one in watched.health.current_findings if one.code == "image.no_process"]
        watched.health.close()


@pytest.mark.parametrize("alone", [True, False], ids=["one picture", "the folder"])
def test_pictures_that_go_while_they_are_looked_at_are_not_damaged_and_looked_at_when_they_are_back(
    watched: Watched, folder: Path, alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(folder / "new.png", color="gold")
    here = folder / "new.png" if alone else folder
    away, real = folder.with_name("away"), decoders.inspect_images

    def late(*asked: Any) -> Any:
        here.rename(away)
        return real(*asked)

    with monkeypatch.context() as going:
        going.setattr(decoders, "inspect_images", late)
        watched.look()
    watched.look()
    away.rename(here)
    watched.look()
    assert [(one.problem, bool(one.content)) for one in watched.library.images.values()] == [(None, True)] * 6


@pytest.mark.parametrize("alone", [True, False], ids=["one picture", "the folder"])
@pytest.mark.parametrize("late", [True, False], ids=["back when all are judged", "back before they are"])
def test_pictures_that_were_away_between_two_looks_are_looked_at_after_the_next(
    folder: Path, alone: bool, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a network that does not answer for a second: no look at the disk finds anything changed."""
    here = folder / "0.png" if alone else folder
    away, look, judge = folder.with_name("away"), decoders.inspect_images, inspector._inspected
    judged: list[Any] = []

    def inspect(*asked: Any) -> Any:
        here.rename(away)
        found = look(*asked)
        if not late:
            away.rename(here)
        return found

    def seen(*asked: Any) -> Any:
        judged.append(judge(*asked))
        if late and len(judged) == 5:
            away.rename(here)
        return judged[-1]

    with a_desk() as desk:
        with monkeypatch.context() as going:
            going.setattr(decoders, "inspect_images", inspect)
            going.setattr(inspector, "_inspected", seen)
            watched = Watched(desk, folder)
        assert judged.count(None) == (1 if alone else 5)
        watched.look()
        assert [(one.problem, bool(one.content)) for one in watched.library.images.values()] == [(None, True)] * 5
        watched.health.close()


def test_a_picture_that_comes_back_is_a_duplicate_again(watched: Watched, folder: Path) -> None:
    def duplicates() -> list[str]:
        found = [one for one in watched.health.current_findings if one.code == "duplicate.exact"]
        return sorted(watched.library.images[number].name for one in found for number in one.ids)

    save(folder / "new.png")
    watched.look()
    assert duplicates() == ["0.png", "new.png"]
    (folder / "new.png").rename(folder.with_name("away"))
    watched.look()
    assert duplicates() == []
    folder.with_name("away").rename(folder / "new.png")
    watched.look()
    assert duplicates() == ["0.png", "new.png"]


def test_the_encoding_of_a_caption_that_another_program_writes_is_followed(watched: Watched, folder: Path) -> None:
    def doubtful() -> list[str]:
        found = [one for one in watched.health.current_findings if one.code == "caption.cp1252"]
        return [watched.library.images[number].name for one in found for number in one.ids]

    for text, encoding, names in (("un café", "cp1252", ["0.png"]), ("a café", "utf-8", [])):
        (folder / "0.txt").write_text(text, encoding=encoding)
        watched.look()
        assert doubtful() == names


def test_files_without_their_picture_are_told_until_it_comes(watched: Watched, folder: Path) -> None:
    inside = folder / "more"
    inside.mkdir()
    for stem in ("a", "b", "c", "d"):
        (inside / f"{stem}.txt").write_text("a cat", encoding="utf-8")
    save(inside / "a-masklabel.png")
    watched.look()
    assert watched.found() == {} == watched.of_trainer()  # no folder of pictures
    save(inside / "e.png", color="gold")
    (inside / "e.txt").write_text("a cat", encoding="utf-8")
    watched.look()
    orphans = {"caption.orphan": ["a.txt", "b.txt", "c.txt", "d.txt"], "mask.orphan": ["a-masklabel.png"]}
    assert watched.found() == orphans == watched.of_trainer()
    sentences = {one.code: one.sentence for one in watched.health.current_findings}
    assert sentences["caption.orphan"].endswith("but match no image's name: a.txt, b.txt, c.txt and 1 more.")
    assert "caption.orphan" not in "".join(watched.health.images_by_finding())
    for stem in ("a", "b", "c"):
        save(inside / f"{stem}.png", color=f"#{stem}0{stem}")
    watched.look()
    assert watched.found() == {"caption.orphan": ["d.txt"]} == watched.of_trainer()
    (folder / "4.png").unlink()
    watched.look()
    assert watched.found() == {"caption.orphan": ["d.txt"]}  # it may be on its way back
    watched.look()
    assert watched.found() == {"caption.orphan": ["4.txt", "d.txt"]} == watched.of_trainer()
    watched.datasets.close(folder)
    watched.settle()
    assert watched.found() == {}


def test_links_that_lead_out_of_the_dataset_are_neither_shown_nor_trained(watched: Watched, folder: Path) -> None:
    outside = folder.parent / "private"
    outside.mkdir()
    (outside / "secret").write_text("sEcReT", encoding="utf-8")
    (outside / "notes").write_text('{"impasto": 1, "trigger": "sEcReT"}\n', encoding="utf-8")
    save(outside / "own.png")
    links = {"0.caption": "secret", "5.png": "own.png", "1-masklabel.png": "own.png", "impasto.jsonl": "notes"}
    try:
        for name, target in links.items():
            (folder / name).symlink_to(outside / target)
    except OSError:
        pytest.skip("this user may not make symbolic links")
    (folder / "0.txt").unlink()
    (folder / "6.caption").symlink_to(folder / "1.txt")  # inside
    save(folder / "6.png", color="gold")
    watched.look()
    assert watched.found() == {"file.outside": sorted(links)} == watched.of_trainer()
    captions = {picture.name: picture.caption for picture in watched.library.images.values()}
    assert captions == {"0.png": None, **{f"{number}.png": "a cat" for number in (1, 2, 3, 4, 6)}}
    assert not any(picture.mask for picture in watched.library.images.values())
    assert all(picture.folder.trigger is None for picture in watched.library.images.values())
