"""Presets come from strangers: each broken or hostile file is refused in a sentence, and nothing is written."""

import base64
import os
import struct
import time
import zlib
from io import BytesIO
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, PngImagePlugin

from trainer import cli
from trainer.config.presets import exchange, preview_image
from trainer.errors import JobError

pytestmark = pytest.mark.usefixtures("quick_commands")

GOOD = 'schema = 2\nname = "gouache"\n[base]\nfamily = "sdxl"\n[recipe]\nrank = 8\n'
DIGITS = "ab" * 32
FLAG = "\U0001f3f4\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f"  # of England


def encoded(image: Image.Image, form: str = "PNG", **how: object) -> str:
    buffer = BytesIO()
    image.save(buffer, form, **how)
    return base64.b64encode(buffer.getvalue()).decode()


def with_picture(text: str) -> str:
    return f'{GOOD}[preview]\nimage = "{text}"\n'


def png_of_size(width: int, height: int) -> str:
    """A PNG that claims a size, as small as can be: a decompression bomb when it is believed."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0))
    return base64.b64encode(b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"\0" * 99))).decode()


def webp_of_size(form: bytes, sizes: bytes) -> str:
    body = b"WEBP" + form + struct.pack("<I", len(sizes)) + sizes
    return base64.b64encode(b"RIFF" + struct.pack("<I", len(body)) + body + bytes(30)).decode()


def marked_png() -> str:
    marks = PngImagePlugin.PngInfo()
    marks.add_text("parameters", "made by somebody, somewhere")
    return encoded(Image.new("RGB", (8, 8)), pnginfo=marks)


def located_jpeg() -> str:
    exif = Image.Exif()
    exif[0x010F] = "Somebody's camera"
    return encoded(Image.new("RGB", (8, 8)), "JPEG", exif=exif)


def animated() -> str:
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "blue")]
    return encoded(frames[0], "WEBP", save_all=True, append_images=frames[1:])


TINY = encoded(Image.new("RGB", (8, 8), "red"))

# What stands in the file, and what is said of it.
FILES: dict[str, tuple[str | bytes, str]] = {
    "empty": ("", "schema: is missing"),
    "a web page": ("<!DOCTYPE html><html>", "not valid TOML"),
    "a picture": (base64.b64decode(TINY), "not UTF-8"),
    "UTF-16": (GOOD.encode("utf-16"), "saved as UTF-16"),
    "Latin-1": ('name = "Größe"'.encode("latin-1"), "line 1 contains an invalid byte"),
    "a broken sequence": (GOOD.encode() + b'notes = "\xc0\xaf"', "not UTF-8"),
    "a zero byte": (GOOD + "\0", "not valid TOML"),
    "text not closed": ('name = "a\n', "a closing quote is missing"),
    "JSON": ('{"schema": 1}', "not valid TOML"),
    "too large": (GOOD + "#" * 600_000, "larger than 512 KiB"),
    "too many keys": (GOOD + "".join(f"k{number} = 1\n" for number in range(5000)), "too many keys and values"),
    "lists in lists": (f"a = {'[' * 9}{']' * 9}", "nests"),
    "lists without end": (f"a = {'[' * 5000}", "nests"),
    "a key of many parts": ("a." * 4000 + "a = 1", "nests"),
    "a key of quoted parts": ('"a".' * 50 + "a = 1", "nests"),
    "tables in tables": ("[a.b.c.d]\n[a.b.c.d.e.f]\n[a.b.c.d.e.f.g.h.i]\n", "nests"),
    "inline tables in tables": ("a = " + "{a=" * 12 + "1" + "}" * 12, "nests"),
    "duplicate key": (GOOD + "rank = 9\n", "is in the file twice"),
    "duplicate table": (GOOD + "[recipe]\n", "is in the file twice"),
    "no schema": (GOOD.replace("schema = 2\n", ""), "schema: is missing"),
    "newer schema": (
        GOOD.replace("schema = 2", "schema = 3"),
        "by a newer Impasto (preset schema 3); this version reads up to 2",
    ),
    "schema of old": (GOOD.replace("schema = 2", "schema = 0"), "schema: must be"),
    "schema in words": (GOOD.replace("schema = 2", 'schema = "one"'), "schema: must be"),
    "schema true": (GOOD.replace("schema = 2", "schema = true"), "schema: must be"),
    "schema without end": (GOOD.replace("schema = 2", "schema = 0x" + "f" * 9000), "more than 64 bits"),
    "a number of thousands of digits": (GOOD + "seed = " + "9" * 5000, "thousands of digits"),
    "a seed of 65 bits": (GOOD + "seed = 36893488147419103232", "more than 64 bits"),
    "no family": ('schema = 1\nname = "a"\n[recipe]\nrank = 8\n', "base: is missing"),
    "family of another model": (GOOD.replace("sdxl", "flux"), 'base.family: must be "sd15" or "sdxl"'),
    "nothing in it": ('schema = 1\nname = "a"\nbase.family = "sdxl"\n[recipe]\n', "the preset is empty"),
    "recipe is a list": (
        GOOD.split("[recipe]")[0].replace("[base]", "recipe = [1]\n[base]"),
        "recipe: must be a table",
    ),
    "unknown key": (GOOD + "rnak = 4\n", "recipe.rnak: unknown key (did you mean rank?)"),
    "unknown table": (GOOD + "[repice]\n", "repice: unknown key (did you mean recipe?)"),
    "key of another place": (GOOD + "[fit]\nrank = 4\n", "did you mean recipe.rank?"),
    "module name": (GOOD + 'network_module = "os.system"\n', "recipe.network_module: unknown key"),
    "class name": (GOOD + '[recipe.optimizer]\nname = "os.system"\n', "recipe.optimizer.name: must be one of adamw"),
    "output folder": (GOOD + '[output]\nruns = "/tmp/x"\n', "output"),
    "dunder key": (GOOD + "__class__ = 1\n", "recipe.__class__: unknown key"),
    "text for a number": (GOOD.replace("rank = 8", 'rank = "8"'), "recipe.rank: must be a whole number from 1 to 1024"),
    "out of range": (GOOD.replace("rank = 8", "rank = 4096"), "recipe.rank: must be a whole number from 1 to 1024"),
    "infinite": (GOOD + "alpha = inf\n", "recipe.alpha: must be a number above 0"),
    "not a number": (GOOD + "alpha = nan\n", "recipe.alpha: must be a number above 0"),
    "too large to be finite": (
        GOOD + "learning_rate = 1e999\n",
        "recipe.learning_rate: must be a number from 0 to 100",
    ),
    "a date": (GOOD.replace("rank = 8", "rank = 2024-01-01"), "recipe.rank: must be a whole number"),
    "two lengths": (GOOD + "steps = 1\nepochs = 1\n", "set only one length"),
    "device": (GOOD + '[fit]\ndevice = "cuda:7"\n', "fit.device: belongs to one machine"),
    "threads": (GOOD + "[fit]\nthreads = 256\n", "fit.threads: belongs to one machine"),
    "cache": (GOOD + "[fit]\ncache_gigabytes = 1e9\n", "fit.cache_gigabytes: belongs to one machine"),
    "card without fit": (GOOD + "[gpu]\ngigabytes = 8\n", "gpu: describes the GPU of a fit"),
    "name climbing out": (GOOD.replace("gouache", "../../autostart"), "name: "),
    "name with a folder": (GOOD.replace("gouache", "a/b"), 'cannot be a file name; use "a-b" instead'),
    "name of a device": (GOOD.replace("gouache", "CON"), "cannot be a file name"),
    "hidden name": (GOOD.replace("gouache", ".bashrc"), "cannot be a file name"),
    "name as an option": (GOOD.replace("gouache", "--yes"), "cannot be a file name"),
    "name with a stream": (GOOD.replace("gouache", "a:b"), "cannot be a file name"),
    "name with a dot at the end": (GOOD.replace("gouache", "a."), "cannot be a file name"),
    "empty name": (GOOD.replace("gouache", ""), "name: must be text"),
    "endless name": (GOOD.replace("gouache", "a" * 100), "name: has "),
    "name in reverse": (GOOD.replace("gouache", "a\u202egnp.exe"), "control character U+202E"),
    "name with an unseen letter": (GOOD.replace("gouache", "gou\u200bache"), "control character U+200B"),
    "trigger word with an unseen letter": (f'trigger_words = ["sks\ufeff"]\n{GOOD}', "control character U+FEFF"),
    "notes in letters nobody sees": (f'notes = "so\\U000E0041\\U000E0042"\n{GOOD}', "control character U+E0041"),
    "unseen letters behind another flag": (f'notes = "\U0001f3f3{FLAG[1:]}"\n{GOOD}', "control character U+E0067"),
    "a flag without end": (f'notes = "{FLAG[:-1]}"\n{GOOD}', "control character U+E0067"),
    "a text behind a flag": (f'notes = "{FLAG[:-1]}{FLAG[1:]}"\n{GOOD}', "control character U+E0067"),
    "terminal codes": (GOOD.replace("gouache", "\\u001b]0;x\\u0007"), "control character U+001B"),
    "terminal codes in a key": (GOOD + '"\\u009b31m" = 1\n', "unknown key"),
    "line break in an author": (f'author = "a\\nb"\n{GOOD}', "author: contains the control character U+000A"),
    "Windows path": (f"notes = 'see C:\\Users\\me'\n{GOOD}", "notes: contains what looks like a path (C:"),
    "share": (f"notes = '\\\\server\\share\\x'\n{GOOD}", "notes: contains what looks like a path"),
    "share as other systems write it": (
        f"notes = 'see //server/share$'\n{GOOD}",
        "notes: contains what looks like a path",
    ),
    "folder in a share": (f"notes = '\"//nas/photos/'\n{GOOD}", "notes: contains what looks like a path (//nas/photos"),
    "share of a server by its address": (
        f"notes = '//192.168.0.2/photos'\n{GOOD}",
        "notes: contains what looks like a path",
    ),
    "share of a server of a domain": (
        f"notes = '(//nas.local/photos)'\n{GOOD}",
        "notes: contains what looks like a path",
    ),
    "home": (f"notes = 'in /home/me/pictures'\n{GOOD}", "notes: contains what looks like a path (/home/me"),
    "own home": (f"notes = 'in ~/pictures'\n{GOOD}", "notes: contains what looks like a path"),
    "path in a base's name": (
        GOOD.replace('"sdxl"', '"sdxl"\nname = "a/b/c.safetensors"'),
        "base.name: must be a file",
    ),
    "path in a caption": (GOOD + "[recipe.captions]\nprefix = '../x'\n", "recipe.captions.prefix: contains what looks"),
    "path in a prompt": (
        GOOD + "[[examples]]\nprompt = 'file:/etc/passwd'\n",
        "examples.0.prompt: contains what looks",
    ),
    "access token": (f"notes = 'hf_{'a' * 34}'\n{GOOD}", "looks like a key or access token (hf_aaa...)"),
    "web token": (f"notes = 'Bearer eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.abc'\n{GOOD}", "or access token (eyJhbG...)"),
    "endless notes": (f"notes = '{'a ' * 9000}'\n{GOOD}", "notes: has 18,000 characters"),
    "hash of something": (GOOD.replace('"sdxl"', '"sdxl"\nsha256 = "abc"'), "base.sha256: must be text such as"),
    "too many words": ("trigger_words = [" + '"a", ' * 99 + f"]\n{GOOD}", "trigger_words: must be a list"),
    "picture of words": (with_picture("hello!"), "preview.image: is not base64 text"),
    "picture of nothing": (with_picture(""), "preview.image: is not a readable image"),
    "picture of noise": (with_picture(base64.b64encode(bytes(range(256))).decode()), "is not a readable image"),
    "picture cut off": (with_picture(TINY[:60]), "is not a readable image"),
    "SVG": (with_picture(base64.b64encode(b"<svg xmlns='x'/>").decode()), "is not a readable image"),
    "GIF": (with_picture(encoded(Image.new("P", (8, 8)), "GIF")), "is not a readable image"),
    "PostScript": (with_picture(base64.b64encode(b"%!PS-Adobe-3.0 EPSF-3.0\n").decode()), "is not a readable image"),
    "picture too large": (with_picture("A" * 400_000), "is larger than 256 KiB"),
    "picture too wide": (with_picture(encoded(Image.new("1", (1025, 8)))), "wider or taller than 1024"),
    "PNG bomb": (with_picture(png_of_size(60_000, 60_000)), "wider or taller than 1024"),
    "WebP bomb": (with_picture(webp_of_size(b"VP8X", bytes(4) + b"\xff\x3f\0\xff\x3f\0")), "wider or taller than 1024"),
    "lossless bomb": (with_picture(webp_of_size(b"VP8L", b"\x2f\xff\xff\xff\x0f")), "wider or taller than 1024"),
    "lossy bomb": (with_picture(webp_of_size(b"VP8 ", bytes(6) + b"\xff\x3f\xff\x3f")), "wider or taller than 1024"),
    "picture that tells": (with_picture(marked_png()), "contains EXIF data or text"),
    "picture that locates": (with_picture(located_jpeg()), "contains EXIF data or text"),
    "picture that moves": (with_picture(animated()), "is animated"),
}


def test_there_are_many():
    assert len(FILES) > 80


def test_the_good_one_is_good():
    assert exchange.parse_preset(GOOD, "good").recipe.rank == 8
    assert exchange.parse_preset(with_picture(TINY), "good").preview is not None


@pytest.mark.parametrize("kind", FILES)
def test_each_is_refused_in_a_sentence_and_nothing_is_written(kind, tmp_path, per_user_folder, capsys):
    content, expected = FILES[kind]
    file = tmp_path / "päckchen 1.toml"
    file.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
    for words in (
        ["check", str(file)],
        ["add", "--yes", str(file)],
        ["share", str(file), "--out", str(tmp_path / "o.toml")],
    ):
        begun = time.process_time()
        assert cli.main(["presets", *words]) == 2
        assert time.process_time() - begun < 60
        out, err = capsys.readouterr()
        assert out == ""
        assert expected in err
        assert err.startswith("Error: ")
        assert "What to do: " in err
        assert len(err) < 5000
        assert all(letter.isprintable() or letter == "\n" for letter in err)
        for jargon in ("pydantic", "Traceback", "Input should", "tomllib", "extra_forbidden"):
            assert jargon not in err
    assert list(tmp_path.iterdir()) == [file]
    assert list(per_user_folder.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "expected"),
    [("job.toml", "is a job, not a preset"), ("none.toml", "file not found"), (".", "it is a folder")],
    ids=["a job", "a missing file", "a folder"],
)
def test_what_is_no_preset_file_is_refused(name, expected, tmp_path, capsys):
    (tmp_path / "job.toml").write_text('schema = 1\nname = "a"\n[dataset]\n', encoding="utf-8")
    assert cli.main(["presets", "add", str(tmp_path / name)]) == 2
    assert expected in capsys.readouterr().err


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has no pipes among its files")
def test_a_pipe_that_nobody_writes_to_is_not_waited_for(tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe.toml")
    assert cli.main(["presets", "check", str(tmp_path / "pipe.toml")]) == 2
    assert "it is a pipe" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    [
        "see https://a.b/c/d//e/f",
        "3/4 of it, w/o x, and/or",
        "1girl //a/b",
        "see //tags/x, no",
        "\u200bpasted",
        "🏳️\u200d🌈 خ\u200cا",
        f"from {FLAG} to {FLAG}",
    ],
)
def test_what_honest_notes_hold_is_taken(text):
    assert exchange.parse_preset(f'notes = "{text}"\n{GOOD}', "file").notes == text


def test_everything_wrong_is_named_at_once():
    text = (
        'schema = 1\nname = "a/b"\nnotes = "~/x"\nbase.family = "sd3"\npreview.picture = "?"\n'
        "[recipe]\nrank = 0\nrnak = 1\n[fit]\nthreads = 0\n"
    )
    with pytest.raises(JobError) as caught:
        exchange.parse_preset(text, "file")
    named = [problem.partition(": ")[0] for problem in caught.value.problems]
    keys = ["name", "notes", "preview.image", "base.family", "recipe.rank", "recipe.rnak", "fit.threads"]
    assert sorted(named) == sorted(keys)


def test_many_problems_are_counted_and_not_listed_without_end():
    with pytest.raises(JobError) as caught:
        exchange.parse_preset(GOOD + "".join(f"k{number} = 1\n" for number in range(100)), "file")
    assert len(caught.value.problems) == 30
    assert caught.value.sentence.endswith("and 70 more")


# Each once kept a parser or a search busy for the square of its length.
SLOW = ("a." * 200_000 + "a=1", "a=" + "[" * 200_000, '"' + '\\"' * 200_000, "'''" * 150_000, 'a="""' * 80_000,
        "\n" * 500_000, '"\\' * 200_000, '"' + "k" * 400_000 + '"=1', "#" * 500_000, "a=1 " * 100_000)  # fmt: skip


@pytest.mark.parametrize("text", SLOW)
def test_a_full_file_of_anything_is_refused_soon(text):
    begun = time.process_time()
    with pytest.raises(JobError):
        exchange.parse_preset(text, "file")
    assert time.process_time() - begun < 10  # a tenth of a second on an idle core


@settings(max_examples=300)
@given(st.text(alphabet="abk0.9=[]{}\"\\'#\n\t ,_-é", max_size=60) | st.text(max_size=40))
def test_any_text_is_a_preset_or_a_sentence(text):
    try:
        exchange.parse_preset(GOOD + text, "file")
    except JobError as error:
        assert error.sentence
        assert error.remedy


@settings(max_examples=100)
@given(st.integers(0, 200), st.binary(min_size=1, max_size=8))
def test_a_picture_with_any_bytes_changed_is_a_picture_or_a_reason(place, noise):
    for form in ("PNG", "JPEG", "WEBP"):
        data = bytearray(base64.b64decode(encoded(Image.linear_gradient("L").resize((16, 16)), form)))
        data[place : place + len(noise)] = noise
        reason = preview_image.image_fault(base64.b64encode(bytes(data)).decode())
        assert reason is None or reason.startswith(("is ", "holds "))


def test_a_picture_is_made_small_and_clean(tmp_path: Path):
    source = tmp_path / "ü.jpg"
    exif = Image.Exif()
    exif[0x0112], exif[0x010F] = 6, "Somebody's camera"
    Image.linear_gradient("L").resize((1600, 800)).save(source, exif=exif)
    text = preview_image.make_preview(source)
    assert preview_image.image_fault(text) is None
    with Image.open(BytesIO(preview_image.decode_image(text))) as made:
        assert made.size == (256, 512)  # upright, as EXIF says
        assert not made.getexif()
    assert len(text) < 100_000


@pytest.mark.parametrize("content", [b"", b"no picture", base64.b64decode(png_of_size(9000, 9000))])
def test_what_is_no_picture_is_told(content, tmp_path):
    path = tmp_path / "a.png"
    path.write_bytes(content)
    with pytest.raises(JobError, match="as the preview image"):
        preview_image.make_preview(path)
