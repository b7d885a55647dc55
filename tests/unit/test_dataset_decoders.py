"""A picture that hangs or crashes its decoder is named, and costs nothing but a process."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
import threading
from pathlib import Path

import pytest
from PIL import Image

from tests.support.pictures import photograph
from trainer.dataset import decoders, facts
from trainer.dataset.decoders import Decoders
from trainer.dataset.facts import inspect_pictures
from trainer.dataset.memory import PictureFacts
from trainer.errors import DatasetError, JobError

needs_pipes = pytest.mark.skipif(sys.platform == "win32", reason="a file without end is a named pipe here")


@pytest.fixture
def endless(tmp_path: Path) -> Path:
    """A file that is opened and never gives a byte, as on a network that hangs."""
    path = tmp_path / "endless.png"
    os.mkfifo(path)
    return path


@pytest.fixture
def good(tmp_path: Path) -> Path:
    photograph().resize((64, 64)).save(tmp_path / "good.png")
    return tmp_path / "good.png"


def children() -> set[int | None]:
    return {child.pid for child in multiprocessing.active_children()}


@needs_pipes
def test_a_picture_that_hangs_is_given_up_and_the_next_is_looked_at(
    endless: Path, good: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Decoders(1) as own:
        assert isinstance(own.inspect(good, 100)[1], PictureFacts)
        with monkeypatch.context() as patch:
            patch.setattr(decoders, "SECONDS", 0.2)
            state, hung = own.inspect(endless, 100)
        assert state is None and isinstance(hung, DatasetError)
        assert hung.code == "picture.hangs" and f"{endless} could not be decoded within 0.2 seconds." in str(hung)
        assert isinstance(own.inspect(good, 100)[1], PictureFacts)


@needs_pipes
def test_a_picture_that_crashes_its_decoder_is_named(endless: Path, good: Path) -> None:
    """The process is killed while it reads, as the system ends one that touches memory which is not its own."""
    before = children()

    def kill() -> None:
        with endless.open("wb"):  # waits until it is opened for reading
            for child in multiprocessing.active_children():
                if child.pid not in before:
                    child.kill()

    killing = threading.Thread(target=kill)
    killing.start()
    with Decoders(1) as own:
        state, crashed = own.inspect(endless, 100)
        killing.join()
        assert state is None and isinstance(crashed, DatasetError) and crashed.code == "picture.crashes"
        assert isinstance(own.inspect(good, 100)[1], PictureFacts)


def test_no_process_is_left_and_none_is_started_for_what_is_remembered(
    good: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(facts, "Decoders", Decoders)
    os.utime(good, (1, 1))
    before = children()
    first = inspect_pictures([good], 100)
    assert children() == before
    monkeypatch.setattr(decoders._Decoder, "_start", None)
    assert inspect_pictures([good], 100) == first


def test_an_error_passes_between_processes_whole() -> None:
    error = JobError("a.b", "It is so.", "Do that.", ("one", "two"))
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.code, str(copy), copy.remedy, copy.problems) == ("a.b", "It is so.", "Do that.", ("one", "two"))


def test_large_pictures_are_decoded_one_after_the_other(tmp_path: Path) -> None:
    """While one has the turn another one waits, and small ones go on."""
    large = tmp_path / "large.png"
    Image.new("1", (8000, 4000)).save(large)
    photograph().resize((64, 64)).save(tmp_path / "small.png")
    with Decoders(2) as own:
        waiting = threading.Thread(target=own.inspect, args=(large, 100))
        with decoders._large_picture:
            waiting.start()
            assert isinstance(own.inspect(tmp_path / "small.png", 100)[1], PictureFacts)
            waiting.join(timeout=0.5)
            assert waiting.is_alive()
        waiting.join()
        assert isinstance(own.inspect(large, 100)[1], PictureFacts)
