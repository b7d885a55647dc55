"""Findings of real folders: equal to what the trainer's check finds, live through edits, mended by one click."""

import random
import shutil
import threading
from pathlib import Path

import pytest
from PIL import Image

from app.core import tasks
from app.core.edits.history import Edit
from app.core.health.groups import ImageIndex, JudgingTarget, SharedIndex
from app.core.health.health import Health, count_tags
from app.core.library import Folder, ValueChange
from app.core.tags.index import TagIndex
from tests.support.desk import a_desk
from tests.support.images import photograph
from trainer.config.job import DatasetConfig, FolderConfig
from trainer.config.recipe import RecipeConfig
from trainer.dataset.dataset import read_dataset

AIM = JudgingTarget(resolution=256)


class Checked:
    """A library over a folder, with its health."""

    def __init__(self, desk, folder: Path, aim=AIM, trigger=None):
        self.desk, self.library = desk, desk.library
        self.health = Health(desk.library, TagIndex(desk.library), desk.tasks, desk.post, aim)
        self.folder = Folder(folder, folder, trigger=trigger)
        self.enter(*sorted(path.name for path in folder.iterdir() if path.suffix in (".png", ".jpg")))
        self.health.start_inspection()

    def enter(self, *names):
        found = []
        for name in names:
            path = self.folder.path / name
            text = path.with_suffix(".txt")
            caption = text.read_bytes().decode("cp1252") if text.exists() else None
            found.append((self.folder, name, {"caption": caption, "changed_ns": path.stat().st_mtime_ns}))
        self.library.add(found)

    def settle(self):
        self.desk.until(lambda: self.idle() and not self.health._report_scheduled)
        self.health.refresh()
        self.desk.until(lambda: self.idle() and not self.health._report_scheduled and not self.health._counting)

    def idle(self):
        state = self.health.current_progress()
        return self.health.judge and not state.judging and not state.inspecting

    def names(self, code):
        ids = next((one.ids for one in self.health.current_findings if one.code == code), ())
        return sorted(self.library.images[number].name for number in ids)

    def codes(self):
        return {one.code for one in self.health.current_findings}

    def finding(self, code):
        return next(one for one in self.health.current_findings if one.code == code)

    def number(self, name):
        return next(one.id for one in self.library.images.values() if one.name == name)

    def write(self, name, caption):
        number = self.number(name)
        self.library.apply([ValueChange(number, "caption", self.library.images[number].caption, caption)])

    def fix(self, code):
        edit = self.finding(code).fix()
        assert isinstance(edit, Edit)
        self.library.apply(edit.changes)
        return edit


def save(folder, name, photo="astronaut.png", size=(256, 256), caption="a cat", **options):
    photograph(photo).resize(size).save(folder / name, **options)
    if caption is not None:
        (folder / name).with_suffix(".txt").write_text(caption, encoding="utf-8")


@pytest.fixture
def mixed(tmp_path):
    """One picture for each thing that can be wrong."""
    folder = tmp_path / "ein Ordner é"
    folder.mkdir()
    save(folder, "good.png", "coffee.png")
    save(folder, "missing.png", "camera.png", caption=None)
    save(folder, "empty.png", "cell.png", caption=" \n")
    save(folder, "long.png", "chelsea.png", caption="word " * 90)
    save(folder, "small.png", "coins.png", size=(150, 150))
    save(folder, "tiny.png", "grass.png", size=(40, 40))
    save(folder, "wide.png", "rocket.jpg", size=(1500, 250))
    save(folder, "copy a.png", "astronaut.png")
    shutil.copy(folder / "copy a.png", folder / "copy b.png")
    shutil.copy(folder / "copy a.txt", folder / "copy b.txt")
    save(folder, "near.jpg", "astronaut.png", quality=60)
    save(folder, "stem.png", "brick.png")
    save(folder, "stem.jpg", "text.png")
    save(folder, "letters.png", "page.png", caption="a cat, x, dog")
    save(folder, "latin.png", "moon.png", caption=None)
    (folder / "latin.txt").write_bytes("café".encode("cp1252"))
    save(folder, "turned.jpg", "horse.png", exif=_turned())
    (folder / "broken.png").write_bytes((folder / "good.png").read_bytes()[:9000])
    (folder / "broken.txt").write_text("a cat", encoding="utf-8")
    return folder


def _turned():
    exif = Image.Exif()
    exif[0x0112] = 3
    return exif


@pytest.fixture
def desk():
    with a_desk() as made:
        yield made


@pytest.fixture
def checked(desk, mixed):
    made = Checked(desk, mixed)
    yield made
    made.health.close()


def of_trainer(folder, **of_folder):
    dataset = read_dataset(
        DatasetConfig(folders=(FolderConfig(path=str(folder), **of_folder),), validation_share=0.0),
        RecipeConfig(resolution=256),
    )
    found = {}
    for finding in dataset.findings:
        found.setdefault(finding.code, []).extend(path.name for path in finding.paths)
    return {code: sorted(names) for code, names in found.items()}


def test_everything_that_the_trainers_check_finds_is_found(checked, mixed):
    checked.settle()
    theirs = of_trainer(mixed)
    same = [
        *("caption.missing", "caption.empty", "caption.long", "image.tiny", "image.small", "image.cropped"),
        *("image.same_stem", "image.rotated"),
    ]
    assert {code: checked.names(code) for code in same} == {code: theirs[code] for code in same}
    assert checked.names("caption.cp1252") == ["latin.png"]
    assert theirs["caption.cp1252"] == ["latin.txt"]
    assert checked.names("image.unusable") == ["broken.png"] == theirs["image.damaged"]
    assert checked.names("duplicate.exact") == ["copy a.png", "copy b.png"] == theirs["image.same"]
    assert set(checked.names("duplicate.near")) == set(theirs["image.near"])
    assert checked.names("tag.one_letter") == ["letters.png"]
    assert [one.severity for one in checked.health.current_findings] == sorted(
        (one.severity for one in checked.health.current_findings), key=["error", "warning", "info"].index
    )


def test_sentences_have_their_count_and_one_reason_is_told_by_itself(checked):
    checked.settle()
    assert checked.finding("duplicate.exact").sentence.startswith("2 images identical to another")
    broken = checked.finding("image.unusable")
    path = checked.library.images[checked.number("broken.png")].path
    assert broken.sentence.startswith("broken.png is damaged")
    assert broken.path_tooltip == str(path)
    assert all(one.sentence and one.severity for one in checked.health.current_findings)


def test_an_edit_of_a_caption_is_judged_at_once(checked):
    checked.settle()
    checked.write("missing.png", "a dog")
    checked.desk.until(lambda: "caption.missing" not in checked.codes())
    checked.write("good.png", "cat " * 200)
    checked.desk.until(lambda: checked.names("caption.long") == ["good.png", "long.png"])
    checked.write("good.png", "")
    checked.desk.until(lambda: checked.names("caption.empty") == ["empty.png", "good.png"])
    assert checked.names("caption.long") == ["long.png"]


def test_excluding_takes_a_picture_out_of_all_findings_and_frees_its_copies(checked):
    checked.settle()
    numbers = [checked.number("copy a.png"), checked.number("tiny.png")]
    checked.library.apply([ValueChange(number, "excluded", False, True) for number in numbers])
    checked.desk.until(lambda: "image.excluded" in checked.codes())
    assert {"duplicate.exact", "image.tiny"}.isdisjoint(checked.codes())
    assert checked.names("duplicate.near") == ["copy b.png", "near.jpg"]
    checked.library.apply([ValueChange(numbers[0], "excluded", True, False)])
    checked.desk.until(lambda: "duplicate.exact" in checked.codes())
    assert checked.names("duplicate.near") == ["copy a.png", "copy b.png", "near.jpg"]


def test_removing_and_changing_pictures_is_followed(checked, mixed):
    checked.settle()
    checked.library.remove([checked.number("copy b.png"), checked.number("stem.jpg")])
    checked.desk.until(lambda: "duplicate.exact" not in checked.codes())
    assert "image.same_stem" not in checked.codes()
    save(mixed, "near.jpg", "retina.jpg", caption=None)
    number = checked.number("near.jpg")
    checked.library.set_facts({number: {"changed_ns": (mixed / "near.jpg").stat().st_mtime_ns}}, "file")
    checked.desk.until(lambda: "duplicate.near" not in checked.codes())


def test_a_picture_that_a_crop_makes_small_is_found(checked):
    checked.settle()
    number = checked.number("good.png")
    checked.library.apply([ValueChange(number, "crop", None, (0.0, 0.0, 0.4, 0.4))])
    checked.desk.until(lambda: "good.png" in checked.names("image.small"))


def test_each_fix_mends_its_finding(checked):
    checked.settle()
    assert checked.fix("tag.one_letter").name == "Remove tags of one letter from 1 caption"
    assert checked.library.images[checked.number("letters.png")].caption == "a cat, dog"
    assert len(checked.fix("duplicate.exact").changes) == 1
    checked.fix("image.tiny")
    checked.fix("image.unusable")
    mended = {"tag.one_letter", "duplicate.exact", "image.tiny", "image.unusable"}
    checked.desk.until(lambda: mended.isdisjoint(checked.codes()))
    edit = checked.fix("duplicate.near")
    assert len(edit.changes) == 1
    checked.desk.until(lambda: "duplicate.near" not in checked.codes())
    checked.fix("image.excluded")
    checked.desk.until(lambda: mended & checked.codes())


def test_the_best_copy_is_kept(desk, tmp_path):
    save(tmp_path, "a.jpg", size=(128, 128))
    save(tmp_path, "b.jpg", size=(256, 256))
    save(tmp_path, "c.jpg", size=(200, 200))
    checked = Checked(desk, tmp_path)
    checked.settle()
    edit = checked.finding("duplicate.near").fix()
    kept = {checked.number(name) for name in "abc" for name in [f"{name}.jpg"]} - {one.image for one in edit.changes}
    assert kept == {checked.number("b.jpg")}
    checked.health.close()


def test_a_trigger_that_captions_lack_is_put_first(desk, tmp_path):
    save(tmp_path, "a.png", "coffee.png", caption="a cat")
    save(tmp_path, "b.png", "moon.png", caption="Zwx, a dog")
    save(tmp_path, "c.png", "coins.png", caption=None)
    checked = Checked(desk, tmp_path, trigger="zwx")
    checked.settle()
    assert checked.names("trigger.absent") == ["a.png"] == of_trainer(tmp_path, trigger="zwx")["trigger.absent"]
    assert checked.names("caption.words") == ["c.png"]
    checked.fix("trigger.absent")
    assert checked.library.images[checked.number("a.png")].caption == "zwx, a cat"
    checked.desk.until(lambda: "trigger.absent" not in checked.codes())
    checked.health.close()


def test_another_aim_judges_anew(checked):
    checked.settle()
    before = checked.names("image.small")
    checked.health.set_target(JudgingTarget(resolution=1024, tokens=225))
    checked.desk.until(lambda: "good.png" in checked.names("image.small"))
    checked.settle()
    assert "good.png" not in before
    assert "caption.long" not in checked.codes()


def test_folders_out_of_balance_are_told_with_repeats_counted(desk, tmp_path):
    large, small = Folder(tmp_path / "a", tmp_path), Folder(tmp_path / "b", tmp_path, repeats=2)
    health = Health(desk.library, TagIndex(desk.library), desk.tasks, desk.post)
    known = {"caption": "cat", "width": 1024, "height": 1024}
    desk.library.add((large, f"{number}.png", known) for number in range(24))
    ids = desk.library.add((small, f"{number}.png", known) for number in range(2))
    desk.until(lambda: "folder.unbalanced" in {one.code for one in health.current_findings})
    assert {one.code: set(one.ids) for one in health.current_findings}["folder.unbalanced"] == set(ids)
    desk.library.add([(small, "2.png", known)])
    desk.until(lambda: "folder.unbalanced" not in {one.code for one in health.current_findings})
    health.close()


def test_rare_tags_are_those_of_one_trained_picture():
    rows = [(number, ("cat", "dog")) for number in range(9)]
    assert count_tags([*rows, (9, ("cat", "hta"))]).rare == {9}
    assert count_tags([*rows, (9, ("cat", "she stands beside a red door"))]).rare == frozenset()
    assert count_tags([*rows[:3], (9, ("hta",))]).rare == frozenset()
    assert count_tags(rows).top == [("cat", 9), ("dog", 9)]


def test_what_is_only_good_to_know_is_no_answer_to_a_bare_problem(checked):
    checked.settle()
    marked = checked.health.images_by_finding()
    assert "info.image.rotated" in marked
    assert "caption.missing" in marked
    assert checked.finding("image.rotated").query == "problem:info.image.rotated"


def test_closing_ends_a_look_in_the_middle(desk, tmp_path, monkeypatch):
    monkeypatch.setattr(tasks, "_CLOSE_SECONDS", 120.0)  # where the machine is busy, even what ends takes its time
    for number in range(6):
        save(tmp_path, f"{number}.png", size=(900, 900))
    before = threading.active_count()
    checked = Checked(desk, tmp_path)
    checked.health.close()
    desk.tasks.close()
    assert threading.active_count() <= before


def test_files_and_shared_equal_a_recount():
    files, shared = ImageIndex(), SharedIndex()
    chance = random.Random(3)
    keys, things = {}, {}
    for _ in range(2000):
        number = chance.randrange(12)
        keys[number] = {("mark", chance.randrange(4)) for _ in range(chance.randrange(3))}
        things[number] = chance.choice([None, "a", "b", "c"])
        files.put(number, keys[number])
        shared.put(number, things[number])
        for which in range(4):
            assert files.under("mark", which) == {one for one, has in keys.items() if ("mark", which) in has}
        assert all(files.all("mark").values())
        have = [thing for thing in things.values() if thing]
        assert shared.images == {one for one, thing in things.items() if thing and have.count(thing) > 1}
        assert sorted(one for group in shared.groups() for one in group) == sorted(shared.images)
