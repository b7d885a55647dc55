"""What every test stands on: no network, one thread, a per-user folder of its own, and no unexpected log."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

import hypothesis
import pytest

if TYPE_CHECKING:
    from argparse import ArgumentParser

    from trainer.dataset.decoders import DecoderPool

ROOT = Path(__file__).resolve().parents[1]

# Before any library is imported, and inherited by the processes that tests start.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"  # sums in one order on every machine
os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its thread pool warns when a test starts a process
os.environ["PYTHONPATH"] = str(ROOT)  # `python -m trainer` works from any folder, installed or not
os.environ["QT_QPA_PLATFORM"] = "offscreen"  # no window on anybody's screen, and none needed
os.environ["PYTHON_KEYRING_BACKEND"] = "keyring.backends.fail.Keyring"  # never the user's own passwords
# Only once, so that all processes collect the same tests even at midnight; set it to repeat the sample of a date.
os.environ.setdefault("IMPASTO_SAMPLE_DATE", f"{datetime.now(UTC):%Y-%m-%d}")
os.environ["IMPASTO_LOOK_IN"] = ""  # models are looked for only where a test says
# Some systems forbid bytecode beside sources; without it every process that a test starts compiles all of ours anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
if sys.platform == "win32":
    import torch  # noqa: F401 - after Qt, which pytest-qt loads next, it would meet Qt's older C++ runtime and fail

# No time limit, for machines are busy; and the same examples each time, so that what fails on one machine fails on all.
hypothesis.settings.register_profile("suite", deadline=None, derandomize=True)
hypothesis.settings.load_profile("suite")

gc.disable()  # until all tests are collected: imports make millions of objects and hardly any garbage

# What takes longest begins first, lest one core is left with it when the others are done.
LONGEST = (
    "tests/train/training/recovery/test_recovery.py",
    "tests/train/training/run/test_run.py",
    "tests/train/memory/planner/test_planner.py",
    "tests/train/memory/trace/test_train_step.py",
    "tests/qt/test_screens.py",
    "tests/train/cli/test_training.py",
    "tests/train/test_queue.py",
    "tests/train/test_bad_input.py",
    "tests/train/memory/trace/test_other_phases.py",
    "tests/qt/test_whole_way.py",
    "tests/unit/test_run_py.py",
    "tests/unit/test_guards.py",
)
# And these come last, on each core: where a compiler has failed in a process, PyTorch counts a thread too many that
# compiles, and leaves its own evaluation of frames to all of Python. Then arguments live until their call returns, and
# storages die an operation later than in the tapes that ship. Runs plan before they compile.
LAST = ("tests/train/training/acceleration/test_compile.py", "tests/train/training/acceleration/test_channels_last.py")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that runs the tests marked slow too."""
    parser.addoption("--all", action="store_true", help="run the tests marked slow too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect slow tests unless all were asked for, and put the longest files first, as `run.py test` runs them."""
    if not config.getoption("all"):
        slow = [item for item in items if item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if not item.get_closest_marker("slow")]
    place = {name: number for number, name in enumerate(LONGEST)} | dict.fromkeys(LAST, len(LONGEST) + 1)
    items.sort(key=lambda item: place.get(item.nodeid.split("::")[0], len(LONGEST)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the tests that were chosen by the date."""
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.stats.get(kind, ())]
    names = [report.nodeid.rpartition("::")[2] for report in reports if "of_the_day" in report.keywords]
    if names:
        day = os.environ["IMPASTO_SAMPLE_DATE"]
        terminalreporter.write_line(f"Cases of {day} (IMPASTO_SAMPLE_DATE): {', '.join(sorted(names))}")


def pytest_collection_finish() -> None:
    """Let the collector pass over what was imported: it would take half a second each time that a run calls it."""
    gc.freeze()
    gc.enable()


# These loggers do not hand their records up to the root.
LIBRARY_LOGGERS = ("diffusers", "transformers", "huggingface_hub")


@pytest.fixture(autouse=True)
def environment_left_as_found() -> Iterator[None]:
    """Fail the test that changes it for good: those after it, which differ from machine to machine, would see that."""
    before = environment()
    yield
    changed = dict(before.items() ^ environment().items())
    if changed:
        os.environ.update(before)
        for name in changed.keys() - before.keys():
            del os.environ[name]
        pytest.fail(f"left in the environment: {sorted(changed)}", pytrace=False)


_OTHERS = ("PYTEST_", "_TORCHINDUCTOR_", "TORCHINDUCTOR_CACHE_DIR")


def environment() -> dict[str, str]:
    """All but what pytest says of the test that runs, and PyTorch's compiler to processes of its own."""
    return {name: value for name, value in os.environ.items() if not name.startswith(_OTHERS)}


@pytest.fixture(autouse=True)
def per_user_folder(
    environment_left_as_found: None, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """Keep caches, models and the list of runs of each test away from the user's and from other tests'."""
    # pytest numbers folders by listing all those beside them, which takes longer for each test before this one.
    folder = tmp_path_factory.mktemp(f"home-{uuid4()}", numbered=False)
    monkeypatch.setenv("IMPASTO_HOME", str(folder))
    monkeypatch.delenv("IMPASTO_CACHE", raising=False)
    return folder


@pytest.fixture(scope="session")
def decoders() -> Iterator[DecoderPool]:
    """The processes that look at pictures, started once for all tests: each takes a fifth of a second."""
    from trainer.dataset.decoders import DecoderPool

    with DecoderPool(2) as started:
        yield started


@pytest.fixture(autouse=True)
def shared_decoders(decoders: DecoderPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all tests share them."""
    from trainer.dataset import decoders as module

    monkeypatch.setattr(module, "_started", lambda: nullcontext(decoders))


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let files be written without fsync, which takes milliseconds each time and shows only after a power cut.

    Processes that tests start call it as ever, and so do tests marked fsync.
    """
    if not request.node.get_closest_marker("fsync"):
        monkeypatch.setattr(os, "fsync", lambda handle: None)


@pytest.fixture(scope="session")
def command_line() -> Callable[[], ArgumentParser]:
    """Build the parser of the command line once: a new one for each command takes longer than most commands."""
    from trainer import cli

    return cache(cli._parser)


@pytest.fixture
def quick_commands(command_line: Callable[[], ArgumentParser], monkeypatch: pytest.MonkeyPatch) -> None:
    """Share the parser and time this CPU only briefly, in tests that start many commands in their own process."""
    from trainer import cli
    from trainer.memory.planner import on_cpu

    monkeypatch.setattr(cli, "_parser", command_line)
    monkeypatch.setattr(on_cpu, "QUICK_SECONDS", 0.01)


class Collector(logging.Handler):
    """Keeps every record once, whichever logger handed it over."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record not in self.records:
            self.records.append(record)


@pytest.fixture(autouse=True)
def unexpected_logs(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail the test on a record at WARNING or above that its mark expects_logs does not name, or on one missed."""
    collector = Collector()
    loggers = [logging.getLogger(), *map(logging.getLogger, LIBRARY_LOGGERS)]
    for logger in loggers:
        logger.addHandler(collector)
    yield
    for logger in loggers:
        logger.removeHandler(collector)
    marker = request.node.get_closest_marker("expects_logs")
    texts = marker.args if marker else ()
    messages = [f"{record.levelname} {record.name}: {record.getMessage()}" for record in collector.records]
    surprises = [message for message in messages if not any(text in message for text in texts)]
    missed = [text for text in texts if not any(text in message for message in messages)]
    if surprises:
        pytest.fail("unexpected log:\n" + "\n".join(surprises), pytrace=False)
    if missed:
        pytest.fail(f"expected in the log, and not there: {missed}", pytrace=False)
