"""The commands lora check and lora metadata, with files of any content."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from tests.support.raw import write_shapes
from tests.unit.files.test_loading import SD15, TE1, TE2
from trainer.cli import main
from trainer.files.header import read_header

METADATA = {
    "ss_base_model_version": "sd_v1",
    "ss_network_dim": "2",
    "ss_tag_frequency": "{}",
    "modelspec.title": "Größe",
    "sshs_model_hash": "of other tensors",
}
HASHES = {"sshs_model_hash", "sshs_legacy_hash", "modelspec.hash_sha256"}


@pytest.fixture
def lora(tmp_path: Path) -> Path:
    return write_shapes(tmp_path / "a ü.safetensors", SD15, METADATA)


def payload(path: Path) -> bytes:
    data = path.read_bytes()
    return data[8 + int.from_bytes(data[:8], "little") :]


def said(words: list[object], capsys: pytest.CaptureFixture[str]) -> str:
    assert main([str(word) for word in words]) == 0
    return capsys.readouterr().out


def refusal(words: list[object], capsys: pytest.CaptureFixture[str]) -> str:
    assert main([str(word) for word in words]) == 2
    shown = capsys.readouterr().err
    assert "What to do:" in shown
    assert "Traceback" not in shown
    return shown


def test_check_lists_the_programs_with_reasons(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_shapes(tmp_path / "a.safetensors", TE1 | TE2)
    text = said(["lora", "check", path], capsys)
    assert "InvokeAI    does not load it\n" in text
    assert "ComfyUI     loads it\n" in text
    assert "refuses SDXL LoRAs without layers of the UNet" in text
    found = json.loads(said(["lora", "check", path, "--json"], capsys))
    assert {each["program"]: each["outcome"] for each in found["programs"]}["InvokeAI"] == "refused"


def test_metadata_is_shown_set_and_removed_and_tensors_stay(lora: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert json.loads(said(["lora", "metadata", lora, "--json"], capsys)) == METADATA
    before = payload(lora)
    words = ["lora", "metadata", lora, "--set", "modelspec.title=Ä=B", "--set", "new=1", "--remove", "ss_tag_frequency"]
    said(words, capsys)
    found = dict(read_header(lora, "lora").metadata)
    assert found["sshs_model_hash"] == hashlib.sha256(before).hexdigest()
    kept = {"ss_base_model_version": "sd_v1", "ss_network_dim": "2", "modelspec.title": "Ä=B", "new": "1"}
    assert {key: value for key, value in found.items() if key not in HASHES} == kept
    assert payload(lora) == before
    assert "modelspec.title: Ä=B" in said(["lora", "metadata", lora], capsys)


def test_strip_keeps_what_programs_need_to_load_the_file(
    lora: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy, before = tmp_path / "copy.safetensors", lora.read_bytes()
    said(["lora", "metadata", lora, "--strip", "--set", "modelspec.author=me", "--out", copy], capsys)
    kept = {"ss_base_model_version", "ss_network_dim", "modelspec.author"}
    assert read_header(copy, "lora").metadata.keys() == kept | HASHES
    assert payload(copy) == payload(lora)
    assert lora.read_bytes() == before


def test_what_cannot_be_edited_is_refused_with_a_remedy(
    lora: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = lora.read_bytes()
    assert "modelspec.title?" in refusal(["lora", "metadata", lora, "--remove", "title"], capsys)
    assert "not KEY=VALUE" in refusal(["lora", "metadata", lora, "--set", "title"], capsys)
    assert "hash" in refusal(["lora", "metadata", lora, "--set", "sshs_model_hash=1"], capsys)
    assert "not valid Unicode" in refusal(["lora", "metadata", lora, "--set", "a=\udcff"], capsys)
    assert "also an input" in refusal(["lora", "metadata", lora, "--strip", "--out", lora], capsys)
    other = tmp_path / "b.safetensors"
    other.write_bytes(b"mine")
    assert "exists already" in refusal(["lora", "metadata", lora, "--strip", "--out", other], capsys)
    assert "folder does not exist" in refusal(
        ["lora", "metadata", lora, "--out", tmp_path / "x" / "b.safetensors"], capsys
    )
    assert other.read_bytes() == b"mine"
    assert lora.read_bytes() == before


@pytest.mark.parametrize("data", [b"", b"<html>", (1 << 60).to_bytes(8, "little") + b"{" + bytes(600)])
@pytest.mark.parametrize("command", ["check", "metadata"])
def test_other_files_are_refused(command: str, data: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(data)
    refusal(["lora", command, path], capsys)
