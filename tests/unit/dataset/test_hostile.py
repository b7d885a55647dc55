"""Files that are damaged, lie or attack: each is refused with a sentence and a remedy, and nothing else happens."""

import os
import struct
import warnings
import zlib
from pathlib import Path

import pytest
from PIL import Image

from tests.support.images import PHOTOS, folder_of, photograph, png_chunk, recipe_of, write_png
from trainer.dataset.dataset import read_dataset
from trainer.dataset.decoders import inspect_images
from trainer.dataset.inspection import ImageFacts, is_whole
from trainer.dataset.pixels import load_upright, open_image
from trainer.errors import DatasetError


def saved(path: Path, **options: object) -> bytes:
    photograph().resize((200, 160)).save(path, **options)  # type: ignore[arg-type]
    return path.read_bytes()


def bomb(path: Path, width: int, height: int) -> Path:
    """A PNG of one bit a pixel, all black: 14000×14000 pixels in 24 kB."""
    return write_png(path, width, height, 1, 0, bytes((1 + (width + 7) // 8) * height))


def refusal(path: Path, max_megapixels: float = 100) -> DatasetError:
    with pytest.raises(DatasetError) as caught:
        load_upright(path, "#ffffff", max_megapixels)
    inspected = inspect_images([path], max_megapixels)[path]
    assert isinstance(inspected, DatasetError)
    assert (inspected.code, str(inspected)) == (caught.value.code, str(caught.value))
    assert caught.value.remedy
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "bmp", "tiff", "gif", "avif"])
@pytest.mark.parametrize("share", [0.5, 0.9])
def test_files_cut_short(tmp_path: Path, suffix: str, share: float) -> None:
    data = saved(tmp_path / f"whole.{suffix}")
    path = tmp_path / f"cut.{suffix}"
    path.write_bytes(data[: int(len(data) * share)])
    assert refusal(path).code in ("image.damaged", "image.unreadable")


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", "image.empty"),
        (b"a text that calls itself a picture", "image.unreadable"),
        (b"\x89PNG\r\n\x1a\n", "image.unreadable"),
        (b"\xff\xd8\xff\xe0", "image.unreadable"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "image.unreadable"),
        (b"RIFF\x10\0\0\0WEBPVP8 ", "image.damaged"),
        (b"II*\0\xff\xff\xff\xff", "image.unreadable"),
        (bytes(4096), "image.unreadable"),
    ],
)
def test_files_that_are_no_pictures(tmp_path: Path, data: bytes, code: str) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(data)
    assert refusal(path).code == code


@pytest.mark.parametrize(("width", "height"), [(14000, 14000), (9000, 12000), (2_000_000_000, 2_000_000_000)])
def test_bombs_are_refused_by_their_header(tmp_path: Path, width: int, height: int) -> None:
    path = tmp_path / "bomb.png"
    if width > 100_000:
        write_png(path, width, height, 1, 0, b"\0")
    else:
        bomb(path, width, height)
        assert path.stat().st_size < 40_000
    error = refusal(path)
    assert error.code == "image.too_large"
    assert f"{width}×{height}" in str(error)


def test_the_limit_is_ours_not_pillows(tmp_path: Path) -> None:
    """Pillow warns above 89 megapixels and refuses 179; neither shows when the user allows more, in any decoder."""
    with open_image(bomb(tmp_path / "a.png", 10000, 9500), 100) as image:
        assert image.size == (10000, 9500)
    Image.new("1", (10000, 9500)).save(tmp_path / "b.tiff", compression="group4")
    with open_image(tmp_path / "b.tiff", 100) as image:
        image.load()
    assert refusal(tmp_path / "b.tiff", 90).code == "image.too_large"


@pytest.mark.parametrize("suffix", ["png", "bmp", "gif", "webp"])
def test_a_header_that_promises_more_rows_than_there_are(tmp_path: Path, suffix: str) -> None:
    """Pillow alone would paint the missing rows of the PNG black. JPEG and TIFF: it does, and nothing tells."""
    path = tmp_path / f"a.{suffix}"
    data = bytearray(saved(path))
    place, form = {"png": (20, ">I"), "bmp": (22, "<i"), "gif": (8, "<H"), "webp": (28, "<H")}[suffix]
    assert struct.unpack_from(form, data, place)[0] == 160
    struct.pack_into(form, data, place, 320)
    if suffix == "png":
        struct.pack_into(">I", data, 29, zlib.crc32(data[12:29]))
    if suffix == "gif":
        struct.pack_into("<H", data, data.index(b"\x2c\0\0\0\0\xc8\0") + 7, 320)
    path.write_bytes(data)
    assert isinstance(inspected := inspect_images([path], 100)[path], DatasetError)
    assert inspected.code == "image.damaged"


@pytest.mark.parametrize("depth", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("size", [(1, 1), (5, 3), (13, 9)])
def test_whole_pngs_of_every_depth_are_whole_to_the_byte(tmp_path: Path, depth: int, size: tuple[int, int]) -> None:
    width, height = size
    rows = bytes((1 + -(-width * depth // 8)) * height)
    assert is_whole(write_png(tmp_path / "a.png", width, height, depth, 0, rows))
    assert not is_whole(write_png(tmp_path / "a.png", width, height, depth, 0, rows[:-1]))


def test_an_interlaced_png_is_whole(tmp_path: Path) -> None:
    """Sizes of the seven passes of 8×8 by hand: 1, 1, 2, 4, 8, 16 and 32 pixels in 1, 1, 1, 2, 2, 4 and 4 rows."""
    rows = bytes(64 + 15)
    path = write_png(tmp_path / "a.png", 8, 8, 8, 0, rows)
    data = bytearray(path.read_bytes())
    data[28] = 1
    struct.pack_into(">I", data, 29, zlib.crc32(data[12:29]))
    path.write_bytes(data)
    assert is_whole(path)
    path.write_bytes(data.replace(zlib.compress(rows), zlib.compress(rows[:-1])))
    assert not is_whole(path)


def test_a_text_chunk_that_unpacks_to_a_flood(tmp_path: Path) -> None:
    flood = png_chunk(b"zTXt", b"Comment\0\0" + zlib.compress(bytes(80_000_000)))
    path = write_png(tmp_path / "a.png", 2, 2, 8, 0, bytes(6), flood)
    assert refusal(path).code == "image.damaged"


def test_values_of_no_known_range(tmp_path: Path) -> None:
    Image.new("F", (8, 8), 1e30).save(tmp_path / "a.tiff")
    assert "brightness" in str(refusal(tmp_path / "a.tiff"))
    Image.new("I", (8, 8), -5).save(tmp_path / "b.tiff")
    assert refusal(tmp_path / "b.tiff").code == "image.damaged"


def test_a_missing_file_and_a_folder_named_like_a_picture(tmp_path: Path) -> None:
    assert refusal(tmp_path / "gone.png").code == "image.missing"
    (tmp_path / "folder.png").mkdir()
    assert refusal(tmp_path / "folder.png").code in ("image.unusable", "image.forbidden")


def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is made where the system's call fails, since root may read everything."""
    saved(tmp_path / "a.png")

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(tmp_path / "a.png"))

    monkeypatch.setattr(Image, "open", refuse)
    with pytest.raises(DatasetError) as caught:
        load_upright(tmp_path / "a.png", "#ffffff", 100)
    assert caught.value.code == "image.forbidden"


def test_the_warnings_of_pillow_stay_with_it(tmp_path: Path) -> None:
    """A TIFF with a silly count of tags: Pillow warns about it, and tests turn what escapes into an error."""
    data = bytearray(saved(tmp_path / "a.tiff"))
    offset = struct.unpack_from("<I", data, 4)[0]
    data[offset : offset + 2] = b"\xff\xff"
    (tmp_path / "a.tiff").write_bytes(data)
    assert isinstance(inspect_images([tmp_path / "a.tiff"], 100)[tmp_path / "a.tiff"], ImageFacts | DatasetError)
    with pytest.raises(UserWarning, match="ours"):
        warnings.warn("ours", stacklevel=1)


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "bmp", "tiff", "gif", "avif"])
def test_random_damage_never_ends_in_anything_but_our_error(tmp_path: Path, suffix: str) -> None:
    whole = saved(tmp_path / f"whole.{suffix}")
    path = tmp_path / f"bad.{suffix}"
    for number in range(25):
        data = bytearray(whole)
        for place in range(1 + number % 3):
            spot = zlib.crc32(f"{suffix} {number} {place}".encode()) % min(len(data), 400 + 50 * number)
            data[spot] ^= 1 + zlib.crc32(f"{number}".encode()) % 255
        path.write_bytes(data)
        inspected = inspect_images([path], 1)[path]
        assert isinstance(inspected, ImageFacts | DatasetError)


def test_one_bad_file_among_good_ones_is_listed_and_left_out(tmp_path: Path) -> None:
    for name in ("astronaut.png", "chelsea.png"):
        (tmp_path / name).write_bytes((PHOTOS / name).read_bytes())
    (tmp_path / "bad.jpg").write_bytes((PHOTOS / "rocket.jpg").read_bytes()[:50_000])
    (tmp_path / "text.png").write_text("no picture", encoding="utf-8")
    photograph().resize((1, 1)).save(tmp_path / "dot.png")
    dataset = read_dataset(folder_of(tmp_path), recipe_of(128))
    assert [picture.path.name for picture in dataset.images] == ["astronaut.png", "chelsea.png"]
    errors = {finding.paths[0].name: finding.code for finding in dataset.findings if finding.severity == "error"}
    assert errors == {"bad.jpg": "image.damaged", "text.png": "image.unreadable", "dot.png": "image.tiny"}


def test_a_link_to_nowhere_is_no_picture(tmp_path: Path) -> None:
    saved(tmp_path / "a.png")
    if hasattr(os, "symlink"):
        try:
            (tmp_path / "b.png").symlink_to(tmp_path / "gone.png")
        except OSError:
            return  # Windows without the right to make links
    assert len(read_dataset(folder_of(tmp_path), recipe_of(128)).images) == 1
