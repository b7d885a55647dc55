"""A picture that hangs or crashes its decoder is named, and costs nothing but a process."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.support.images import photograph
from tests.support.processes import no_process_starts
from trainer.dataset import decoders
from trainer.dataset.decoders import DecoderPool, inspect_images
from trainer.dataset.inspection import ImageFacts, Inspection
from trainer.errors import DatasetError, JobError

needs_signals = pytest.mark.skipif(sys.platform == "win32", reason="Windows cannot stop a process for a while")


def stop_at(own: DecoderPool, path: Path, then: int = 0) -> list[int]:
    """Stop the process that is given this image before it reads a byte, collect its number, and send it a signal."""
    stopped: list[int] = []
    for decoder in own._all:

        def give(
            given: Path, most: float, real: Callable[[Path, float], None] = decoder.give, it: Any = decoder
        ) -> None:
            if given == path:
                stopped.append(it._process.pid)
                os.kill(it._process.pid, signal.SIGSTOP)
            real(given, most)
            if given == path and then:
                os.kill(it._process.pid, then)

        decoder.give = give  # type: ignore[method-assign]
    return stopped


@pytest.fixture
def endless(good: Path) -> Path:
    """An image that a process is stopped at, as one stops on a network that hangs."""
    path = good.with_name("endless.png")
    path.write_bytes(good.read_bytes())
    return path


@pytest.fixture
def good(tmp_path: Path) -> Path:
    photograph().resize((64, 64)).save(tmp_path / "good.png")
    return tmp_path / "good.png"


def children() -> set[int | None]:
    return {child.pid for child in multiprocessing.active_children()}


def look_at(decoders: DecoderPool, *paths: Path) -> dict[str, Inspection]:
    return {path.name: facts for path, _, facts in decoders.inspect(paths, 100)}


@needs_signals
def test_a_picture_that_hangs_is_given_up_and_the_next_is_looked_at(
    endless: Path, good: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with DecoderPool(1) as own:
        assert isinstance(look_at(own, good)["good.png"], ImageFacts)
        stop_at(own, endless)
        with monkeypatch.context() as patch:
            patch.setattr(decoders, "SECONDS", 0.2)
            ((path, state, hung),) = own.inspect([endless], 100)
        assert (path, state) == (endless, None) and isinstance(hung, DatasetError)
        assert hung.code == "image.hangs" and f"{endless} could not be decoded within 0.2 seconds." in str(hung)
        assert isinstance(look_at(own, good)["good.png"], ImageFacts)


@needs_signals
def test_a_picture_that_crashes_its_decoder_is_named(endless: Path, good: Path) -> None:
    """The process is killed in the middle, as the system ends one that touches memory which is not its own."""
    with DecoderPool(1) as own:
        look_at(own, good)
        stop_at(own, endless, signal.SIGKILL)
        found = look_at(own, endless, good)
    crashed = found["endless.png"]
    assert isinstance(crashed, DatasetError) and crashed.code == "image.crashes"
    assert isinstance(found["good.png"], ImageFacts)


@needs_signals
def test_the_others_go_on_while_one_takes_its_time(endless: Path, good: Path) -> None:
    other = good.with_name("other.png")
    other.write_bytes(good.read_bytes())
    with DecoderPool(2) as own:
        look_at(own, good, other)
        stopped = stop_at(own, endless)
        coming = own.inspect([endless, good], 100)
        assert next(coming)[0] == good
        os.kill(stopped[0], signal.SIGCONT)
        (late,) = coming
        assert late[0] == endless and isinstance(late[2], ImageFacts)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has no pipes among its files")
def test_a_pipe_among_the_pictures_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    with DecoderPool(1) as own:
        refused = look_at(own, tmp_path / "pipe.png")["pipe.png"]
    assert isinstance(refused, DatasetError) and "it is a pipe, not a file" in refused.sentence


def test_a_process_that_cannot_be_started_says_nothing_of_a_picture(good: Path) -> None:
    before = children()
    with DecoderPool(2) as own:
        with no_process_starts(), pytest.raises(DatasetError) as caught:
            look_at(own, good, good.with_name("other.png"))
        assert caught.value.code == "image.no_process"
        assert "good.png" not in str(caught.value) and "Could not start" in str(caught.value)
    with DecoderPool(1) as own:
        assert isinstance(look_at(own, good)["good.png"], ImageFacts)
    assert children() == before


def test_a_process_that_does_not_come_up_in_time_says_nothing_of_a_picture(
    good: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with DecoderPool(1) as own:
        with monkeypatch.context() as patch:
            patch.setattr(decoders, "SECONDS", 0.0)
            with pytest.raises(DatasetError, match="did not start within 0 seconds"):
                look_at(own, good)
        assert isinstance(look_at(own, good)["good.png"], ImageFacts)


def test_after_such_an_error_they_are_used_again_with_nothing_of_before_in_their_hands(good: Path) -> None:
    paths = [good.with_name(f"{number}.png") for number in range(3)]
    for path in paths:
        path.write_bytes(good.read_bytes())
    with DecoderPool(2) as own:
        look_at(own, good)  # which brings one of both up
        with no_process_starts(), pytest.raises(DatasetError, match="Could not start"):
            look_at(own, *paths)
        assert all(decoder.path is None for decoder in own._all)
        found = look_at(own, good, paths[2])
    assert found.keys() == {"good.png", "2.png"}
    assert all(isinstance(each, ImageFacts) for each in found.values())


def test_no_process_is_left_and_none_is_started_for_what_is_remembered(
    good: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The suite shares processes among its tests (tests/conftest.py), which would be there before and after.
    monkeypatch.setattr(decoders, "_started", lambda: DecoderPool(1))
    os.utime(good, (1, 1))
    before = children()
    first = inspect_images([good], 100)
    assert children() == before
    monkeypatch.setattr(decoders, "_SPAWN", None)
    assert inspect_images([good], 100) == first


def test_a_process_that_comes_up_when_nobody_is_left_ends_without_a_word(capfd: pytest.CaptureFixture[str]) -> None:
    ours, theirs = decoders._SPAWN.Pipe()
    ours.close()
    process = decoders._SPAWN.Process(target=decoders._serve, args=(theirs,))
    process.start()
    process.join()
    assert (process.exitcode, capfd.readouterr().err) == (0, "")


def test_an_error_passes_between_processes_whole() -> None:
    error = JobError("a.b", "It is so.", "Do that.", ("one", "two"))
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.code, str(copy), copy.remedy, copy.problems) == ("a.b", "It is so.", "Do that.", ("one", "two"))


def test_large_pictures_are_decoded_one_after_the_other(
    tmp_path: Path, good: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None is let while the answer of one that was is not there yet; one that is no picture to its end counts too."""
    Image.new("1", (8000, 4000)).save(tmp_path / "0.png")
    for name in ("1.png", "2.png", "cut.png"):
        (tmp_path / name).write_bytes((tmp_path / "0.png").read_bytes())
    (tmp_path / "cut.png").write_bytes((tmp_path / "0.png").read_bytes()[:900])
    happened: list[str] = []
    let, put_down = decoders._Decoder.let, decoders._Decoder._put_down

    def told(what: str, act: Callable[[decoders._Decoder], Any]) -> Callable[[decoders._Decoder], Any]:
        def watched(decoder: decoders._Decoder) -> Any:
            if decoder.path and decoder.path != good:
                happened.append(what)
            return act(decoder)

        return watched

    monkeypatch.setattr(decoders._Decoder, "let", told("let", let))
    monkeypatch.setattr(decoders._Decoder, "_put_down", told("done", put_down))
    large = [tmp_path / name for name in ("0.png", "cut.png", "1.png", "2.png")]
    with DecoderPool(4) as own:
        found = look_at(own, *large, good)
    assert happened == ["let", "done"] * 4
    assert [type(found[path.name]) for path in large] == [ImageFacts, DatasetError, ImageFacts, ImageFacts]


@needs_signals
def test_ctrl_c_ends_a_check_at_once_and_quietly(endless: Path) -> None:
    """As a terminal sends it: to all processes. One that has just been started must not answer with a traceback."""
    code = """
import signal
import sys
from pathlib import Path
from trainer.cli.common import guarded
from trainer.dataset import decoders
from trainer.dataset.decoders import inspect_images
signal.signal(signal.SIGINT, signal.default_int_handler)  # programs started in the background have it ignored
comes_up = decoders._Decoder.comes_up
def stop(decoder):
    up = comes_up(decoder)
    if up:
        print("started", flush=True)
        signal.pause()
    return up
decoders._Decoder.comes_up = stop
guarded(lambda: len(inspect_images([Path(sys.argv[1])], 100)), debug=False)
"""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "start_new_session": True, "text": True}
    with subprocess.Popen([sys.executable, "-c", code, str(endless)], **pipes) as child:  # type: ignore[call-overload]
        assert child.stdout.readline() == "started\n"
        os.killpg(child.pid, signal.SIGINT)
        said = child.stderr.read()
        assert said == "Interrupted. Everything saved so far is kept. Run the command again to continue.\n"
