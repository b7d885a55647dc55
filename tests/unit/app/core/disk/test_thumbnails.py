"""Thumbnails: what they show, in which order they come, and what is kept of them."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image, ImageStat

from app.core.disk import images
from app.core.disk.thumbnails import Thumbnail, Thumbnails
from app.core.library import Folder, LibraryImage
from tests.support.desk import Desk, a_desk
from trainer.protocol.row_store import RowStore, key_of


@pytest.fixture
def desk() -> Iterator[Desk]:
    with a_desk() as desk:
        yield desk


@pytest.fixture
def thumbnails(desk: Desk, tmp_path: Path) -> Iterator[Thumbnails]:
    made = Thumbnails(desk.post, tmp_path / "cache" / "t.sqlite", threads=1)
    yield made
    made.close()


def picture(number: int, path: Path) -> LibraryImage:
    facts = path.stat()
    return LibraryImage(number, Folder(path.parent, path.parent), path.name, facts.st_size, facts.st_mtime_ns)


def saved(path: Path, image: Image.Image, number: int = 1, **more: object) -> LibraryImage:
    image.save(path, **more)
    return picture(number, path)


def shown(thumbnail: Thumbnail) -> Image.Image:
    return Image.frombytes("RGB", (thumbnail.width, thumbnail.height), thumbnail.rgb)


def one(desk: Desk, thumbnails: Thumbnails, asked: LibraryImage, pixels: int = 256) -> Thumbnail:
    thumbnails.request(asked, pixels)
    desk.until(lambda: thumbnails.get(asked, pixels))
    thumbnail = thumbnails.get(asked, pixels)
    assert thumbnail
    return thumbnail


def halves() -> Image.Image:
    """Left half red, right half blue, 800 wide and 400 high."""
    image = Image.new("RGB", (800, 400), "red")
    image.paste("blue", (400, 0, 800, 400))
    return image


def test_a_thumbnail_is_small_and_upright(desk: Desk, thumbnails: Thumbnails, tmp_path: Path) -> None:
    turned = Image.Exif()
    turned[0x0112] = 6  # the camera lay on its side: the picture's left is shown on top
    thumbnail = one(desk, thumbnails, saved(tmp_path / "a.jpg", halves(), exif=turned))
    assert (thumbnail.width, thumbnail.height, thumbnail.problem) == (128, 256, None)
    top, bottom = shown(thumbnail).getpixel((64, 20)), shown(thumbnail).getpixel((64, 236))
    assert isinstance(top, tuple) and isinstance(bottom, tuple)
    assert top[0] > 200 > 60 > top[2] and bottom[2] > 200 > 60 > bottom[0]


def test_transparency_lies_on_a_checkerboard(desk: Desk, thumbnails: Thumbnails, tmp_path: Path) -> None:
    clear = Image.new("RGBA", (512, 512), (0, 0, 0, 0))
    thumbnail = one(desk, thumbnails, saved(tmp_path / "a.png", clear))
    low, high = ImageStat.Stat(shown(thumbnail).convert("L")).extrema[0]
    assert low <= 206 and high >= 254


def test_a_small_picture_is_not_enlarged(desk: Desk, thumbnails: Thumbnails, tmp_path: Path) -> None:
    thumbnail = one(desk, thumbnails, saved(tmp_path / "a.png", Image.new("RGB", (10, 4), "red")), 512)
    assert shown(thumbnail).tobytes() == Image.new("RGB", (10, 4), "red").tobytes()


@pytest.mark.parametrize(
    ("name", "data", "word"),
    [("a.png", b"\x89PNG\r\n\x1a\n1234", "not an image"), ("a.jpg", b"", "empty"), ("vast.png", None, "20000×6000")],
)
def test_what_cannot_be_shown_says_why(
    desk: Desk, thumbnails: Thumbnails, tmp_path: Path, name: str, data: bytes | None, word: str
) -> None:
    path = tmp_path / name
    if data is None:
        Image.new("1", (20_000, 6_000)).save(path)
    else:
        path.write_bytes(data)
    thumbnail = one(desk, thumbnails, picture(1, path))
    assert word in str(thumbnail.problem) and thumbnail.rgb == b""


def test_the_newest_wish_comes_first_and_what_left_the_screen_not_at_all(desk: Desk, tmp_path: Path) -> None:
    made = Thumbnails(desk.post, tmp_path / "t.sqlite", threads=1)
    pictures = [saved(tmp_path / f"{n}.png", Image.new("RGB", (9, 9)), n) for n in range(1, 8)]
    order: list[int] = []
    made.ready.connect(lambda thumbnail: order.append(thumbnail.image))
    with made._change:  # the thread cannot take a wish before all are made
        for each in pictures[:3]:
            made.request(each, 256)
        made.show(pictures[3:6], 256)
        made.request(pictures[6], 256)
        made.forget([5])
    desk.until(lambda: len(order) == 3)
    made.close()
    assert order == [7, 4, 6]


def test_memory_is_bounded_and_the_least_recently_seen_goes(desk: Desk, tmp_path: Path) -> None:
    made = Thumbnails(desk.post, tmp_path / "t.sqlite", threads=1, memory=3 * 64 * 64 * 3)
    pictures = [saved(tmp_path / f"{n}.png", Image.new("RGB", (64, 64)), n) for n in range(4)]
    for each in pictures[:3]:
        one(desk, made, each)
    assert made.get(pictures[0], 256)
    one(desk, made, pictures[3])
    made.close()
    assert [made.get(each, 256) is not None for each in pictures] == [True, False, True, True]


def test_the_disk_keeps_thumbnails_until_the_file_changes(
    desk: Desk, thumbnails: Thumbnails, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = saved(tmp_path / "a.png", Image.new("RGB", (64, 64), "red"))
    first = one(desk, thumbnails, asked)
    thumbnails.close()
    drawn: list[Path] = []
    draw = images.make_thumbnail
    monkeypatch.setattr(images, "make_thumbnail", lambda path, pixels: drawn.append(path) or draw(path, pixels))
    again = Thumbnails(desk.post, tmp_path / "cache" / "t.sqlite", threads=1)
    kept = one(desk, again, asked)
    assert drawn == [] and (kept.width, kept.height) == (first.width, first.height)
    Image.new("RGB", (64, 64), "blue").save(tmp_path / "a.png")
    os.utime(tmp_path / "a.png", ns=(1, 1))
    changed = one(desk, again, picture(1, tmp_path / "a.png"))
    again.close()
    assert drawn == [tmp_path / "a.png"] and changed.rgb[2] > 200


def test_idle_time_fills_the_disk_without_telling_anybody(desk: Desk, tmp_path: Path) -> None:
    made = Thumbnails(desk.post, tmp_path / "t.sqlite", threads=1, quiet=0.0)
    pictures = [saved(tmp_path / f"{n}.png", Image.new("RGB", (9, 9)), n) for n in range(6)]
    (tmp_path / "2.png").write_bytes(b"damaged")
    told: list[Thumbnail] = []
    made.ready.connect(told.append)
    made.prepare(pictures[:5], 256)
    while made._idle_queue[0]:  # each wish that is seen lets one more be prepared after it at least
        one(desk, made, pictures[5])
        made._kept.clear()
    one(desk, made, pictures[5])
    made.close()
    database = sqlite3.connect(tmp_path / "t.sqlite")
    keys = {key for (key,) in database.execute("select key from entries")}
    database.close()
    assert keys == {key_of(each.path, each.changed_ns, each.bytes, 256) for each in pictures if each.id != 2}
    assert {thumbnail.image for thumbnail in told} == {5}


def test_idle_time_is_none_while_the_user_does_something(desk: Desk, tmp_path: Path) -> None:
    made = Thumbnails(desk.post, tmp_path / "t.sqlite", threads=1, quiet=1e6)
    pictures = [saved(tmp_path / f"{n}.png", Image.new("RGB", (9, 9)), n) for n in range(3)]
    made.give_way()
    made.prepare(pictures[:2], 256)
    for _ in range(3):
        one(desk, made, pictures[2])
        made._kept.clear()
    made.close()
    assert len(made._idle_queue[0]) == 2


def test_a_picture_that_could_not_be_shown_is_tried_again_when_its_disk_is_back(
    desk: Desk, thumbnails: Thumbnails, tmp_path: Path
) -> None:
    asked = saved(tmp_path / "a.png", Image.new("RGB", (9, 9)))
    (tmp_path / "a.png").rename(tmp_path / "away.png")
    assert "does not exist" in str(one(desk, thumbnails, asked).problem)
    (tmp_path / "away.png").rename(tmp_path / "a.png")
    assert one(desk, thumbnails, asked).problem
    thumbnails.retry([asked.id])
    assert one(desk, thumbnails, asked).problem is None


def test_of_a_lost_folder_what_the_disks_cache_has_is_shown_and_no_file_is_asked_for(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = saved(tmp_path / "a.png", Image.new("RGB", (9, 9)))
    never = saved(tmp_path / "b.png", Image.new("RGB", (9, 9)), 2)
    before = Thumbnails(desk.post, tmp_path / "t.sqlite", threads=1)
    one(desk, before, kept)
    before.close()
    drawn: list[Path] = []
    real = images.make_thumbnail
    monkeypatch.setattr(images, "make_thumbnail", lambda path, *more: drawn.append(path) or real(path, *more))
    again, lost = Thumbnails(desk.post, tmp_path / "t.sqlite", threads=1), {tmp_path}
    again.reachable = lambda picture: picture.folder.root not in lost
    again.show([never, kept], 256)
    desk.until(lambda: again.get(kept, 256))
    found = again.get(kept, 256)
    assert found and found.problem is None
    assert (again.get(never, 256), drawn) == (None, [])
    lost.clear()
    assert one(desk, again, never).problem is None
    assert drawn == [never.path]
    again.close()


@pytest.mark.parametrize("damage", [b"", b"no database at all" * 999, None], ids=["empty", "other", "torn"])
def test_a_damaged_cache_is_made_anew(tmp_path: Path, damage: bytes | None) -> None:
    file = tmp_path / "t.sqlite"
    shelf = RowStore(file, 1 << 20)
    for number in range(200):
        shelf.put(bytes([number]) * 16, bytes(3000))
    shelf.close()
    if damage is None:
        data = bytearray(file.read_bytes())
        data[4096:] = b"\xff" * len(data[4096:])
        damage = bytes(data)
    file.write_bytes(damage)
    shelf = RowStore(file, 1 << 20)
    shelf.get(bytes(16))
    shelf.put(b"k" * 16, b"new")
    shelf.flush()
    shelf.put(b"l" * 16, b"newer")
    shelf.close()
    shelf = RowStore(file, 1 << 20)
    assert shelf.get(b"l" * 16) == b"newer"
    shelf.close()


def test_the_cache_keeps_to_its_limit_and_lets_the_longest_unused_go(tmp_path: Path) -> None:
    shelf = RowStore(tmp_path / "t.sqlite", 600_000)
    for number in range(100):
        shelf.put(number.to_bytes(16, "big"), bytes(4000))
    shelf.close()
    database = sqlite3.connect(tmp_path / "t.sqlite")
    with database:
        database.execute("update entries set used = 5")
    database.close()
    shelf = RowStore(tmp_path / "t.sqlite", 600_000)
    assert shelf.get((3).to_bytes(16, "big"))  # seen today
    for number in range(100, 200):
        shelf.put(number.to_bytes(16, "big"), bytes(4000))
    shelf.flush()
    left = [shelf.has(number.to_bytes(16, "big")) for number in range(200)]
    shelf.close()
    assert left[3] and not left[0] and all(left[150:]) and (tmp_path / "t.sqlite").stat().st_size < 900_000


def test_a_cache_that_cannot_be_written_holds_nothing_up(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    shelf = RowStore(tmp_path / "file" / "t.sqlite", 1 << 20)
    shelf.put(b"k" * 16, b"x")
    shelf.flush()
    assert shelf.get(b"k" * 16) is None
    shelf.close()


def test_who_comes_after_the_end_does_not_open_the_cache_again(tmp_path: Path) -> None:
    """A thread that was stuck at a disk that did not answer would leave it open."""
    shelf = RowStore(tmp_path / "t.sqlite", 1 << 20)
    shelf.put(b"kept", b"data")
    shelf.close()
    for number in range(40):
        shelf.put(str(number).encode(), b"late")
    assert shelf.get(b"kept") is None and not shelf.has(b"kept")
    again = RowStore(tmp_path / "t.sqlite", 1 << 20)
    assert again.get(b"kept") == b"data" and not again.has(b"0")
    again.close()
