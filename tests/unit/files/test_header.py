"""Reading safetensors headers: whole files, broken ones, hostile ones, and other files under their name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from tests.support.raw import header_of, write_raw, write_shapes
from trainer.errors import BaseModelError, LoraFileError
from trainer.files.header import TensorInfo, read_header


def test_reads_what_the_library_wrote(tmp_path: Path) -> None:
    path = tmp_path / "Modell ü.safetensors"
    tensors = {"a": np.zeros((2, 3), np.float16), "b": np.zeros((), np.float32), "empty": np.zeros((0,), np.float32)}
    safetensors.numpy.save_file(tensors, path, {"title": "é"})
    header = read_header(path)
    assert header.tensors == {
        "a": TensorInfo("F16", (2, 3)),
        "b": TensorInfo("F32", ()),
        "empty": TensorInfo("F32", (0,)),
    }
    assert header.metadata == {"title": "é"}
    assert header.tensors["a"].bytes == 12


@pytest.mark.parametrize("length", [640, 896, 1152, 1408, 0x5B + 512, 0x227B])
def test_a_header_whose_length_looks_like_another_file_is_read(length: int, tmp_path: Path) -> None:
    # 896 is the bytes 80 03, as a pickle begins; 0x227b is {" as JSON does.
    text = json.dumps(header_of({"a": (2,)})).encode()
    path = tmp_path / "a.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + text.ljust(length) + bytes(4))
    assert read_header(path).tensors == {"a": TensorInfo("F16", (2,))}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "empty"),
        (b"<!DOCTYPE html><html><body>Log in</body></html>", "web page"),
        (b"\n\n <html lang=en>", "web page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 4265146304\n", "Git LFS pointer"),
        (b"PK\x03\x04archive/data.pkl" + bytes(64), "pickle"),
        (b"\x80\x02}q\x00(X" + bytes(64), "pickle"),
        (b"GGUF" + bytes(64), "GGUF"),
        (b'{"error": "Invalid credentials"}', "JSON"),
        (b"abc", "does not start with a header"),
        ((1 << 62).to_bytes(8, "little") + b"{" + bytes(90), "claims a header"),
        ((90 << 20).to_bytes(8, "little") + b"{" + bytes(90), "claims a header"),
        ((400).to_bytes(8, "little") + b"{" + bytes(90), "inside its header"),
    ],
)
def test_other_things_are_named(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(BaseModelError, match=says) as caught:
        read_header(path)
    assert caught.value.remedy
    with pytest.raises(LoraFileError, match=says):
        read_header(path, "lora")


def test_a_cut_off_file_is_named_with_its_sizes(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "model.safetensors", header_of({"a": (10,)}), payload=7)
    with pytest.raises(BaseModelError, match="cut off: its tensors take 20 bytes, but it has 7"):
        read_header(path)


def test_a_missing_file_and_a_folder_are_errors_for_the_user(tmp_path: Path) -> None:
    with pytest.raises(BaseModelError, match="does not exist"):
        read_header(tmp_path / "none.safetensors")
    with pytest.raises(BaseModelError, match="Could not read"):
        read_header(tmp_path)


GOOD = {"dtype": "F16", "shape": [2], "data_offsets": [0, 4]}


@pytest.mark.parametrize(
    "header",
    [
        [],
        {"a": 3},
        {"a": {**GOOD, "dtype": "F17"}},
        {"a": {**GOOD, "dtype": ["F16"]}},
        {"a": {**GOOD, "shape": [3]}},
        {"a": {**GOOD, "shape": [-2]}},
        {"a": {**GOOD, "shape": [True, 2]}},
        {"a": {**GOOD, "shape": [1] * 40}},
        {"a": {**GOOD, "shape": "2"}},
        {"a": {**GOOD, "data_offsets": [4, 0]}},
        {"a": {**GOOD, "data_offsets": [0.0, 4.0]}},
        {"a": {**GOOD, "data_offsets": [0, 4, 8]}},
        {"a": {"dtype": "F16", "shape": [2]}},
        {"a": GOOD, "b": GOOD},
        {"a": GOOD, "b": {**GOOD, "data_offsets": [6, 10]}},
        {"a": GOOD, "__metadata__": {"n": 3}},
        {"a": GOOD, "__metadata__": "text"},
    ],
)
def test_headers_that_break_the_rules(tmp_path: Path, header: Any) -> None:
    path = write_raw(tmp_path / "model.safetensors", header, payload=10)
    with pytest.raises(BaseModelError) as caught:
        read_header(path)
    assert caught.value.code in ("base.broken", "base.truncated", "base.not_safetensors")


def test_a_million_empty_tensors_are_refused_before_they_are_parsed(tmp_path: Path) -> None:
    entry = {"dtype": "F16", "shape": [0], "data_offsets": [0, 0]}
    path = write_raw(tmp_path / "model.safetensors", {f"t{index}": entry for index in range(60_000)}, payload=0)
    with pytest.raises(BaseModelError, match="more than 50,000 tensors"):
        read_header(path)


def test_deeply_nested_json_is_an_error_and_no_crash(tmp_path: Path) -> None:
    text = b'{"a":' + b"[" * 100_000
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(BaseModelError, match="Could not read the header"):
        read_header(path)


@given(noise=st.binary(max_size=400), whole=st.booleans())
def test_any_bytes_give_a_header_or_an_error_for_the_user(
    tmp_path_factory: pytest.TempPathFactory, noise: bytes, whole: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / "noise.safetensors"
    good = json.dumps(header_of({"a": (2,)})).encode()
    text = good[: len(good) // 2] + noise + good[len(good) // 2 :]
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(4) if whole else noise)
    try:
        read_header(path)
    except BaseModelError as error:
        assert error.remedy


def test_shapes_alone_make_a_valid_file(tmp_path: Path) -> None:
    path = write_shapes(tmp_path / "a.safetensors", {"x": (2, 2), "y": ()}, {"k": "v"})
    assert set(safetensors.numpy.load_file(path)) == set(read_header(path).tensors) == {"x", "y"}
