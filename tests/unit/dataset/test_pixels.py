"""Pixels against independent references: float64 arithmetic, Pillow's exif_transpose, formulas of the color spaces."""

import colorsys
import io
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageCms, ImageFilter, ImageOps

from tests.support.images import (
    PHOTOS,
    display_p3,
    make_picture,
    photograph,
    pixels_of,
    png_chunk,
    write_png,
)
from trainer.dataset.pixels import crop_pixels, load_upright, open_image, upright_size
from trainer.dataset.sampling import Sample

WHITE = "#ffffff"


def load(path: Path, background: str = WHITE) -> np.ndarray:
    image = load_upright(path, background, 100)
    assert image.mode == "RGB"
    return pixels_of(image)


@pytest.mark.parametrize("suffix", ["png", "bmp", "tiff", "webp", "avif", "jpg", "jpeg", "TIF", "Jpg"])
def test_every_format_gives_the_photograph(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"ein bild ü.{suffix}"
    options = {"webp": {"lossless": True}, "avif": {"quality": 95}, "jpg": {"quality": 95}}.get(suffix.lower(), {})
    source = photograph().resize((128, 128))
    source.save(path, **options)
    error = np.abs(load(path) - pixels_of(source))
    lossless = suffix.lower() in ("png", "bmp", "tiff", "tif", "webp")
    assert error.max() == 0 if lossless else error.mean() < 6


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("suffix", ["png", "tiff", "webp", "avif", "jpg"])
def test_orientation_is_applied_as_pillow_does(tmp_path: Path, suffix: str, orientation: int) -> None:
    path = tmp_path / f"turned.{suffix}"
    exif = Image.Exif()
    exif[0x0112] = orientation
    photograph("chelsea.png").resize((90, 60)).save(path, exif=exif)
    with Image.open(path) as image:
        expected = ImageOps.exif_transpose(image).convert("RGB")
    np.testing.assert_array_equal(load(path), pixels_of(expected))
    with open_image(path, 100) as image:
        assert upright_size(image) == expected.size == ((60, 90) if orientation >= 5 else (90, 60))


def test_broken_exif_beside_good_pixels_is_no_reason_to_refuse(tmp_path: Path) -> None:
    path = tmp_path / "a.jpg"
    photograph().save(path, exif=b"Exif\0\0II*\0\xff\xff\xff\xff" + b"\xff" * 40)
    assert load(path).shape == (512, 512, 3)


@pytest.mark.parametrize("suffix", ["png", "webp", "tiff"])
def test_transparency_is_laid_on_the_background(tmp_path: Path, suffix: str) -> None:
    rgba = photograph().convert("RGBA")
    alpha = np.tile(np.linspace(0, 255, 512).round().astype(np.uint8), (512, 1))
    rgba.putalpha(Image.fromarray(alpha))
    options = {"lossless": True, "exact": True} if suffix == "webp" else {}
    rgba.save(tmp_path / f"a.{suffix}", **options)
    cover = alpha[..., None].astype(np.float64) / 255
    expected = pixels_of(photograph()) * cover + np.array([255, 128, 0]) * (1 - cover)
    assert np.abs(load(tmp_path / f"a.{suffix}", "#ff8000") - expected).max() <= 0.51


def test_hidden_colour_under_full_transparency_does_not_show(tmp_path: Path) -> None:
    Image.new("RGBA", (8, 8), (255, 0, 0, 0)).save(tmp_path / "a.png")
    assert (load(tmp_path / "a.png", "#0000ff") == [0, 0, 255]).all()


def test_palette_with_transparent_entries(tmp_path: Path) -> None:
    image = Image.fromarray(np.array([[0, 1], [2, 0]], np.uint8), "P")
    image.putpalette([255, 0, 0, 0, 255, 0, 0, 0, 255])
    image.save(tmp_path / "a.png", transparency=bytes([255, 0, 128]))
    expected = [[[255, 0, 0], [255, 255, 255]], [[127, 127, 255], [255, 0, 0]]]
    assert np.abs(load(tmp_path / "a.png") - expected).max() <= 1


@pytest.mark.parametrize("suffix", ["png", "tiff"])
def test_sixteen_bit_grey_keeps_its_whole_range(tmp_path: Path, suffix: str) -> None:
    ramp = np.linspace(0, 65535, 256 * 4).round().astype(np.uint16).reshape(32, 32)
    Image.fromarray(ramp).save(tmp_path / f"a.{suffix}")
    expected = np.rint(ramp.astype(np.float64) * 255 / 65535)
    np.testing.assert_array_equal(load(tmp_path / f"a.{suffix}"), np.stack([expected] * 3, axis=-1))


def test_sixteen_bit_grey_with_a_transparent_value(tmp_path: Path) -> None:
    rows = b"\0" + np.array([1000, 1001], ">u2").tobytes()
    path = write_png(tmp_path / "a.png", 2, 1, 16, 0, rows, png_chunk(b"tRNS", (1000).to_bytes(2, "big")))
    np.testing.assert_array_equal(load(path, "#102030")[0], [[16, 32, 48], [4, 4, 4]])


def test_sixteen_bit_colour_keeps_its_whole_range(tmp_path: Path) -> None:
    values = np.linspace(0, 65535, 8 * 8 * 3).round().astype(">u2").reshape(8, 8, 3)
    rows = b"".join(b"\0" + row.tobytes() for row in values)
    path = write_png(tmp_path / "a.png", 8, 8, 16, 2, rows)
    assert np.abs(load(path) - values.astype(np.float64) * 255 / 65535).max() <= 1


def test_float_grey_between_zero_and_one(tmp_path: Path) -> None:
    ramp = np.linspace(0, 1, 64, dtype=np.float32).reshape(8, 8)
    Image.fromarray(ramp).save(tmp_path / "a.tiff")
    np.testing.assert_array_equal(load(tmp_path / "a.tiff")[..., 1], np.rint(ramp.astype(np.float64) * 255))


@pytest.mark.parametrize("mode", ["1", "L", "LA"])
def test_grey_kinds(tmp_path: Path, mode: str) -> None:
    gray = photograph().convert("L").convert(mode)
    gray.save(tmp_path / "a.png")
    np.testing.assert_array_equal(load(tmp_path / "a.png"), pixels_of(gray.convert("L").convert("RGB")))


def test_cmyk_without_a_profile(tmp_path: Path) -> None:
    cmyk = photograph().convert("CMYK")
    cmyk.save(tmp_path / "a.jpg", quality=100, subsampling=0)
    assert np.abs(load(tmp_path / "a.jpg") - pixels_of(photograph())).mean() < 2


def display_p3_to_srgb(values: np.ndarray) -> np.ndarray:
    """Display P3 with gamma 2.2 to sRGB in float64, by the primaries' D50 matrices (Lindbloom for sRGB)."""
    p3 = np.array([[0.51512, 0.29198, 0.15710], [0.24120, 0.69225, 0.06657], [-0.00105, 0.04189, 0.78407]])
    srgb = np.array(
        [[0.4360747, 0.3850649, 0.1430804], [0.2225045, 0.7168786, 0.0606169], [0.0139322, 0.0971045, 0.7141733]]
    )
    linear = (values / 255.0) ** 2.2 @ p3.T @ np.linalg.inv(srgb).T
    linear = linear.clip(0, 1)
    curved = np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)
    return curved * 255


@pytest.mark.parametrize("suffix", ["png", "jpg", "webp", "tiff"])
def test_display_p3_becomes_srgb(tmp_path: Path, suffix: str) -> None:
    options = {"webp": {"lossless": True}, "jpg": {"quality": 100, "subsampling": 0}}.get(suffix, {})
    photograph("chelsea.png").save(tmp_path / f"a.{suffix}", icc_profile=display_p3(), **options)
    with Image.open(tmp_path / f"a.{suffix}") as image:
        stored = pixels_of(image.convert("RGB"))
    error = np.abs(load(tmp_path / f"a.{suffix}") - display_p3_to_srgb(stored))
    assert error.mean() < 0.6
    assert np.abs(load(tmp_path / f"a.{suffix}") - stored).mean() > 1.0


def test_transparent_palette_with_a_profile_keeps_both(tmp_path: Path) -> None:
    image = Image.fromarray(np.array([[0, 1]], np.uint8), "P")
    image.putpalette([200, 40, 40, 0, 255, 0])
    image.save(tmp_path / "a.png", transparency=bytes([255, 0]), icc_profile=display_p3())
    pixels = load(tmp_path / "a.png", "#000000")
    assert np.abs(pixels[0, 0] - display_p3_to_srgb(np.array([200.0, 40.0, 40.0]))).max() <= 1
    assert (pixels[0, 1] == 0).all()


def test_an_srgb_profile_changes_next_to_nothing(tmp_path: Path) -> None:
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    photograph().save(tmp_path / "a.png", icc_profile=profile)
    assert np.abs(load(tmp_path / "a.png") - pixels_of(photograph())).max() <= 1


@pytest.mark.parametrize("profile", [b"rubbish", display_p3()[:200], b""])
def test_a_broken_profile_counts_as_srgb(tmp_path: Path, profile: bytes) -> None:
    photograph().save(tmp_path / "a.png", icc_profile=profile)
    np.testing.assert_array_equal(load(tmp_path / "a.png"), pixels_of(photograph()))


def test_a_profile_of_another_colour_space_is_left_aside(tmp_path: Path) -> None:
    photograph().convert("L").save(tmp_path / "a.png", icc_profile=display_p3())
    np.testing.assert_array_equal(load(tmp_path / "a.png"), pixels_of(photograph().convert("L").convert("RGB")))


def test_lab_tiff(tmp_path: Path) -> None:
    lab = ImageCms.profileToProfile(
        photograph(), ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB"), outputMode="LAB"
    )
    lab.save(tmp_path / "a.tiff")
    assert np.abs(load(tmp_path / "a.tiff") - pixels_of(photograph())).mean() < 1


@pytest.mark.parametrize("suffix", ["gif", "png", "webp", "tiff"])
def test_of_several_frames_the_first(tmp_path: Path, suffix: str) -> None:
    frames = [Image.new("RGB", (16, 16), color) for color in ("#ff0000", "#00ff00", "#0000ff")]
    frames[0].save(tmp_path / f"a.{suffix}", save_all=True, append_images=frames[1:], lossless=True)
    assert (load(tmp_path / f"a.{suffix}") == [255, 0, 0]).all()


def test_the_limit_of_pillow_is_put_back(tmp_path: Path) -> None:
    before = Image.MAX_IMAGE_PIXELS
    with open_image(PHOTOS / "astronaut.png", 100), open_image(PHOTOS / "chelsea.png", 100):
        assert Image.MAX_IMAGE_PIXELS is None
    assert before == Image.MAX_IMAGE_PIXELS == 89478485


def sample_of(path: Path, window: tuple[int, int, int, int], *, flip: bool = False, **facts: object) -> Sample:
    with Image.open(path) as image:
        picture = make_picture(path=path, width=image.width, height=image.height, **facts)
    return Sample(picture, 0, 0, "", window, flip)


def test_crop_is_cut_from_the_picture_scaled_by_lanczos() -> None:
    pixels, mask = crop_pixels(sample_of(PHOTOS / "chelsea.png", (51, 20, 320, 240), bucket=(128, 96)), WHITE, 100)
    # 20 pixels more on each side become 8 at this scale: the reference scales first and then cuts them off.
    scaled = photograph("chelsea.png").crop((31, 0, 391, 280)).resize((144, 112), Image.Resampling.LANCZOS)
    assert mask is None
    assert pixels.dtype == np.uint8
    np.testing.assert_array_equal(pixels, np.asarray(scaled.crop((8, 8, 136, 104))))


def test_what_a_stored_crop_cuts_off_does_not_shine_in(tmp_path: Path) -> None:
    framed = Image.new("RGB", (96, 96), "#ffffff")
    framed.paste(Image.new("RGB", (64, 64), "#203040"), (16, 16))
    framed.save(tmp_path / "a.png")
    sample = sample_of(tmp_path / "a.png", (16, 16, 64, 64), bucket=(32, 32), crop=(1 / 6, 1 / 6, 5 / 6, 5 / 6))
    assert (crop_pixels(sample, WHITE, 100)[0] == [0x20, 0x30, 0x40]).all()
    whole = sample_of(tmp_path / "a.png", (16, 16, 64, 64), bucket=(32, 32))
    assert (crop_pixels(whole, WHITE, 100)[0] != [0x20, 0x30, 0x40]).any()  # the frame is there to shine in


def test_crop_mirrored() -> None:
    plain = crop_pixels(sample_of(PHOTOS / "chelsea.png", (51, 20, 320, 240), bucket=(128, 96)), WHITE, 100)[0]
    sample = sample_of(PHOTOS / "chelsea.png", (51, 20, 320, 240), bucket=(128, 96), flip=True)
    np.testing.assert_array_equal(crop_pixels(sample, WHITE, 100)[0], plain[:, ::-1])


@pytest.mark.parametrize("angle", [-20, 7, 33])
def test_a_turned_crop_is_the_middle_of_the_turned_window(tmp_path: Path, angle: int) -> None:
    smooth = photograph().filter(ImageFilter.GaussianBlur(6))  # so that what is compared is where things are
    smooth.save(tmp_path / "a.png")
    sample = replace(sample_of(tmp_path / "a.png", (40, 90, 400, 300), bucket=(128, 96)), angle=angle)
    pixels, _ = crop_pixels(sample, WHITE, 100)
    # The reference turns at full size, cuts the largest rectangle of this shape without empty corners, and scales.
    turned = smooth.crop((40, 90, 440, 390)).rotate(angle, Image.Resampling.BICUBIC)
    cosine, sine = math.cos(math.radians(angle)), abs(math.sin(math.radians(angle)))
    share = min(400 / (400 * cosine + 300 * sine), 300 / (400 * sine + 300 * cosine))
    box = (200 - 200 * share, 150 - 150 * share, 200 + 200 * share, 150 + 150 * share)
    expected = np.asarray(turned.resize((128, 96), Image.Resampling.LANCZOS, box), float)
    assert np.abs(pixels - expected).mean() < 1
    assert np.abs(pixels - np.asarray(turned.resize((128, 96)), float)).mean() > 10  # of another size it is not


def test_nothing_around_a_turned_window_is_seen_and_its_mask_turns_with_it(tmp_path: Path) -> None:
    framed, mask = Image.new("RGB", (96, 96), "#ffffff"), Image.new("L", (96, 96))
    framed.paste(Image.new("RGB", (64, 64), "#203040"), (16, 16))
    framed.paste(Image.new("RGB", (20, 40), "#e03040"), (24, 30))
    mask.paste(255, (24, 30, 44, 70))
    framed.save(tmp_path / "a.png")
    mask.save(tmp_path / "a-masklabel.png")
    facts = {"mask": "file", "mask_path": tmp_path / "a-masklabel.png", "crop": (1 / 6, 1 / 6, 5 / 6, 5 / 6)}
    for angle in range(-45, 46, 9):
        sample = replace(sample_of(tmp_path / "a.png", (16, 16, 64, 64), bucket=(64, 64), **facts), angle=angle)
        pixels, weights = crop_pixels(sample, WHITE, 100)
        assert weights is not None and pixels[..., 2].max() <= 0x44  # the white frame is not there
        inside = pixels[..., 0] > 0x80
        assert inside.any() and np.mean(inside == (weights > 0.5)) > 0.98


@pytest.mark.parametrize(("hue", "gamma"), [(16, 1.0), (-9, 1.0), (0, 0.95), (0, 1.05)])
def test_hue_and_gamma_against_their_formulas(hue: int, gamma: float) -> None:
    plain = sample_of(PHOTOS / "chelsea.png", (51, 20, 320, 240), bucket=(128, 96))
    before = crop_pixels(plain, WHITE, 100)[0].reshape(-1, 3) / 255
    after = crop_pixels(replace(plain, hue=hue, gamma=gamma), WHITE, 100)[0].reshape(-1, 3)
    if hue:
        shifted = (((h + hue / 360) % 1, s, v) for h, s, v in (colorsys.rgb_to_hsv(*pixel) for pixel in before))
        expected = 255 * np.array([colorsys.hsv_to_rgb(*pixel) for pixel in shifted])
        assert np.abs(after - expected).mean() < 1.5  # 8-bit hues are steps of 1.4 degrees
        assert np.abs(255 * before - expected).mean() > 3
    else:
        np.testing.assert_array_equal(after, np.rint(255 * before**gamma))


@pytest.mark.parametrize("scale", [1, 2])
@pytest.mark.parametrize("flip", [False, True])
def test_mask_file_follows_the_crop(tmp_path: Path, scale: int, flip: bool) -> None:
    photograph().resize((64, 64)).save(tmp_path / "a.png")
    mask = np.zeros((64 * scale, 64 * scale), np.uint8)
    mask[: 32 * scale, : 16 * scale] = 255
    Image.fromarray(mask).save(tmp_path / "a-masklabel.png")
    sample = sample_of(
        tmp_path / "a.png",
        (0, 16, 32, 32),
        flip=flip,
        bucket=(32, 32),
        mask="file",
        mask_path=tmp_path / "a-masklabel.png",
    )
    weights = crop_pixels(sample, WHITE, 100)[1]
    expected = np.zeros((32, 32), np.float32)
    expected[:16, :16] = 1
    assert weights is not None
    assert weights.dtype == np.float32
    np.testing.assert_allclose(weights, expected[:, ::-1] if flip else expected, atol=1e-6)


def test_mask_from_transparency(tmp_path: Path) -> None:
    image = photograph().resize((32, 32)).convert("RGBA")
    alpha = np.full((32, 32), 64, np.uint8)
    image.putalpha(Image.fromarray(alpha))
    image.save(tmp_path / "a.png")
    weights = crop_pixels(sample_of(tmp_path / "a.png", (0, 0, 32, 32), bucket=(32, 32), mask="alpha"), WHITE, 100)[1]
    np.testing.assert_allclose(weights, np.full((32, 32), 64 / 255), atol=1e-6)


def test_display_p3_equals_lcms_asked_directly(tmp_path: Path) -> None:
    """A second witness beside the matrices above: lcms itself, asked for the same conversion."""
    photograph().save(tmp_path / "a.png", icc_profile=display_p3())
    expected = ImageCms.profileToProfile(
        photograph(), ImageCms.ImageCmsProfile(io.BytesIO(display_p3())), ImageCms.createProfile("sRGB")
    )
    np.testing.assert_array_equal(load(tmp_path / "a.png"), pixels_of(expected))
