"""A preset goes from one artist's folder to another's as file, picture or text, and is the same byte for byte."""

import base64
import os
from io import BytesIO
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, PngImagePlugin

from tests.unit.config.presets.test_hostile import FILES, GOOD, TINY
from trainer.config.presets import library
from trainer.config.presets.creating import revised
from trainer.config.presets.exchange import (
    load_preset,
    load_preset_or_image,
    parse_preset,
    preset_text,
    read_pasted,
    save_as_image,
)
from trainer.config.presets.library import changed_keys
from trainer.config.presets.preset import Preset, dump_preset
from trainer.errors import JobError
from trainer.files.header import PRESET_KEY, contains_preset

NOTES = "Soft light.\nÜ, 日本語, “quotes”."
DATA = {
    "schema": 2,
    "name": "gouache",
    "author": "Zoë",
    "notes": NOTES,
    "base": {"family": "sdxl"},
    "recipe": {"rank": 8, "alpha": 0.1, "learning_rate": 1e-4, "optimizer": {"name": "prodigy", "d_coef": 0.8}},
    "preview": {"image": TINY},
}


def preset(**values: object) -> Preset:
    return Preset.model_validate(DATA | values)


def as_file(made: Preset, folder: Path) -> Preset:
    path = folder / "päckchen 1.toml"
    path.write_text(dump_preset(made), encoding="utf-8", newline="\n")
    return load_preset_or_image(path)


def as_picture(made: Preset, folder: Path) -> Preset:
    path = folder / "päckchen 1.png"
    save_as_image(made, path)
    assert contains_preset(path)
    return load_preset_or_image(path)


def as_text(made: Preset, folder: Path) -> Preset:
    return read_pasted(preset_text(made), "The text")


def as_chat(made: Preset, folder: Path) -> Preset:
    mangled = preset_text(made).replace("\n", "\r\n").replace(" = ", "\u00a0= ")
    return read_pasted(f"Try this one:\n```toml\n{mangled}```\nBye!", "The text")


@pytest.mark.parametrize("way", [as_file, as_picture, as_text, as_chat])
def test_it_is_the_same_in_another_folder_byte_for_byte(way, tmp_path, monkeypatch):
    """Sent from one configuration directory, received in another: equal files, but for the picture that no text has."""
    mine, _ = library.save_preset(preset())
    arrived = way(load_preset(mine), tmp_path)
    monkeypatch.setenv("IMPASTO_HOME", str(tmp_path / "a friend's"))
    theirs, version = library.save_preset(arrived, "received")
    assert (theirs.parent, version) == (tmp_path / "a friend's" / "presets" / "received", None)
    sent, received = mine.read_bytes(), theirs.read_bytes()
    if way in (as_text, as_chat):
        sent = sent[: sent.index(b"\n[preview]")]
    assert received == sent
    assert b"d_coef = 0.8" in received


@pytest.mark.parametrize("kind", [kind for kind, (content, _) in FILES.items() if isinstance(content, str)])
def test_a_picture_and_a_text_are_refused_as_a_file_is(kind, tmp_path):
    content, expected = FILES[kind]
    held = PngImagePlugin.PngInfo()
    held.add_itxt(PRESET_KEY, content)
    path = tmp_path / "a.png"
    Image.new("RGB", (8, 8)).save(path, pnginfo=held)
    for read in (lambda: load_preset_or_image(path), lambda: read_pasted(content, "The text")):
        with pytest.raises(JobError) as caught:
            read()
        assert expected in caught.value.sentence
        assert caught.value.remedy


def test_a_picture_without_a_preset_is_told_apart(tmp_path):
    plain, broken = tmp_path / "plain.png", tmp_path / "broken.png"
    Image.new("RGB", (8, 8)).save(plain)
    broken.write_bytes(base64.b64decode(TINY)[:30])
    for path in (plain, broken, tmp_path / "none.png"):
        assert not contains_preset(path)
        with pytest.raises(JobError, match="is an image without a preset"):
            load_preset_or_image(path)


def test_a_preset_without_a_picture_goes_into_none(tmp_path):
    with pytest.raises(JobError, match="has no preview image"):
        save_as_image(preset(preview=None), tmp_path / "a.png")
    assert not os.listdir(tmp_path)  # noqa: PTH208


def test_a_text_packed_to_fill_the_memory_is_not_unpacked(tmp_path):
    held = PngImagePlugin.PngInfo()
    held.add_itxt(PRESET_KEY, GOOD + "#" * (64 << 20), zip=True)
    path = tmp_path / "a.png"
    Image.new("RGB", (8, 8)).save(path, pnginfo=held)
    assert path.stat().st_size < 1 << 20
    with pytest.raises(JobError):
        load_preset_or_image(path)


@settings(max_examples=100)
@given(st.integers(0, 400), st.binary(min_size=1, max_size=8))
def test_any_bytes_of_a_picture_changed_leave_a_preset_or_a_sentence(place, noise):
    held = PngImagePlugin.PngInfo()
    held.add_itxt(PRESET_KEY, GOOD)
    buffer = BytesIO()
    Image.new("RGB", (8, 8)).save(buffer, "PNG", pnginfo=held)
    data = bytearray(buffer.getvalue())
    data[place : place + len(noise)] = noise
    path = Path(os.environ["IMPASTO_HOME"]) / "a.png"
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_bytes(bytes(data))
    try:
        assert load_preset_or_image(path).name
    except JobError as error:
        assert error.remedy


# Changing what is at hand.


def test_each_version_is_kept_and_told_by_its_time():
    path, _ = library.save_preset(preset())
    contents = [path.read_bytes()]
    for rank in (9, 10, 11):
        library.rewrite_preset(path, preset(recipe={"rank": rank}))
        contents.append(path.read_bytes())
    other, _ = library.save_preset(preset(name="gouache-20260101-000000"))
    library.rewrite_preset(other, preset(name="x"))
    assert [version.path.read_bytes() for version in library.versions_of(path)] == contents[2::-1]
    assert all(version.until.tzinfo is not None for version in library.versions_of(path))


def test_a_renamed_preset_keeps_its_file_and_frees_its_name():
    path, _ = library.save_preset(preset())
    library.rewrite_preset(path, preset(name="watercolour"))
    second, version = library.save_preset(preset(recipe={"rank": 9}))
    assert (second.name, version) == ("gouache.sdxl-2.toml", None)
    kept = {
        each.preset.name: each.preset.recipe.rank for each in library.read_library().presets if each.origin == "yours"
    }
    assert kept == {"watercolour": 8, "gouache": 9}


def test_a_name_is_numbered_until_it_is_free():
    library.save_preset(preset())
    library.save_preset(preset(name="Gouache 2"), "received")
    at_hand = library.read_library()
    assert library.free_name("gouache", "sdxl", at_hand) == "gouache 3"
    assert library.free_name("gouache", "sd15", at_hand) == "gouache"
    assert library.free_name("style", "sdxl", at_hand) == "style 2"
    long = "a" * 80
    library.save_preset(preset(name=long))
    numbered = library.free_name(long, "sdxl", library.read_library())
    assert revised(preset(), {"name": numbered}).name == "a" * 76 + " 2"


def test_details_that_no_preset_may_hold_are_named():
    for details in ({"name": "a/b"}, {"author": "x" * 101}, {"notes": "in /home/me/pictures"}):
        with pytest.raises(JobError) as caught:
            revised(preset(), details)
        assert next(iter(details)) in caught.value.sentence


def test_what_is_different_is_told_key_by_key():
    former = preset(recipe={"rank": 8, "steps": 100})
    new = preset(recipe={"rank": 9, "images": {"flip": True}}, author="")
    assert changed_keys(former, new) == [
        ("author", '"Zoë"', "not set"),
        ("recipe.rank", "8", "9"),
        ("recipe.steps", "100", "not set"),
        ("recipe.images.flip", "not set", "true"),
    ]
    assert changed_keys(None, parse_preset(GOOD, "file")) == [("rank", "16", "8")]
