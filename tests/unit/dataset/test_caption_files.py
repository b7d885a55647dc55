"""Caption files in all encodings, and metadata.jsonl."""

from pathlib import Path

import pytest

from trainer.dataset.caption_files import (
    METADATA_NAME,
    NotACaptionError,
    read_caption_file,
    read_metadata,
    split_caption,
)

TEXT = "Käthe’s Höhle, 猫"


@pytest.mark.parametrize(
    ("data", "text", "encoding"),
    [
        (TEXT.encode(), TEXT, "utf-8"),
        (TEXT.encode("utf-8-sig"), TEXT, "utf-8"),
        (TEXT.encode("utf-16"), TEXT, "utf-16"),
        (b"\xfe\xff" + TEXT.encode("utf-16-be"), TEXT, "utf-16"),
        ("Käthe’s".encode("cp1252"), "Käthe’s", "cp1252"),
        (b"a \x81 b", "a \ufffd b", "cp1252"),
        (b"", "", "utf-8"),
    ],
)
def test_encodings(tmp_path: Path, data: bytes, text: str, encoding: str) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(data)
    caption = read_caption_file(path)
    assert (caption.text, caption.encoding) == (text, encoding)
    assert path.read_bytes() == data


@pytest.mark.parametrize(("data", "reason"), [(b"a\0b", "not a text file"), (b"a" * 100_001, "longer than")])
def test_what_is_no_caption(tmp_path: Path, data: bytes, reason: str) -> None:
    (tmp_path / "a.txt").write_bytes(data)
    with pytest.raises(NotACaptionError, match=reason):
        read_caption_file(tmp_path / "a.txt")


def test_a_folder_in_place_of_a_caption(tmp_path: Path) -> None:
    with pytest.raises(NotACaptionError, match="cannot be read"):
        read_caption_file(tmp_path)


@pytest.mark.parametrize(
    ("text", "whole", "variants"),
    [
        ("a cat", ("a cat",), ("a cat",)),
        ("a cat\r\n  on a mat \n\n", ("a cat on a mat",), ("a cat", "on a mat")),
        (" \n\t\n", (), ()),
        ("", (), ()),
        ("one\rtwo", ("one two",), ("one", "two")),
    ],
)
def test_lines(text: str, whole: tuple[str, ...], variants: tuple[str, ...]) -> None:
    assert split_caption(text, "caption") == whole
    assert split_caption(text, "variants") == variants


def test_metadata_columns_and_faults(tmp_path: Path) -> None:
    path = tmp_path / "metadata.jsonl"
    lines = [
        '{"file_name": "a.png", "caption": "one", "extra": 1}',
        '{"file_name": "./sub/b.png", "text": "two", "prompt": "no"}',
        '{"file_name": "sub\\\\c.png", "prompt": "three"}',
        "",
        "{broken",
        '{"text": "nameless"}',
        '{"file_name": "d.png"}',
        '{"file_name": "e.png", "text": 5}',
        "[1]",
    ]
    path.write_text("\n".join(lines), encoding="utf-8-sig")
    captions, faults = read_metadata(path)
    assert captions == {"a.png": "one", "sub/b.png": "two", "sub/c.png": "three"}
    assert [fault.split(":")[0] for fault in faults] == ["line 5", "line 6", "line 7", "line 8", "line 9"]


def test_no_metadata(tmp_path: Path) -> None:
    assert read_metadata(tmp_path / "metadata.jsonl") == ({}, [])
    (tmp_path / "metadata.jsonl").write_bytes(b"\xff\xff")
    captions, faults = read_metadata(tmp_path / "metadata.jsonl")
    assert not captions
    assert len(faults) == 1


def test_half_a_letter_in_a_caption_of_a_metadata_file_is_a_fault_of_its_line(tmp_path: Path) -> None:
    path = tmp_path / METADATA_NAME
    lines = ['{"file_name": "a.png", "text": "a \\ud83c cat"}', '{"file_name": "b.png", "text": "a \\ud83d\\ude00"}']
    path.write_text("\n".join(lines), encoding="utf-8")
    assert read_metadata(path) == (
        {"b.png": "a 😀"},
        ["line 1: its text contains an invalid character (U+D800 to U+DFFF)"],
    )
