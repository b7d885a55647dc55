"""An emulated GPU for a single test, with programs that run on it."""

from __future__ import annotations

import ctypes
import functools
import importlib
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support import ROOT

MIB = 1 << 20
_PATIENCE = 300.0  # seconds; a run of a tiny base takes ten on an idle core, and minutes where others use the cores


@dataclass
class EmulatedGpu:
    """A GPU that only the programs started through it share; `state` is the file in which they count its memory."""

    state: Path
    model: str = "3060"
    settings: dict[str, object] = field(default_factory=dict)
    """Further EMULATED_GPU_ variables, without the prefix: `{"MIB": 2048}`."""

    def environment(self, **variables: str) -> dict[str, str]:
        """Return the environment of a program that runs on this GPU."""
        settings = {"CUDNN_SHARE": 0.25, "STATE": self.state, **self.settings}
        ours = {f"EMULATED_GPU_{name}": str(value) for name, value in settings.items()}
        return {**os.environ, "EMULATED_GPU": self.model, **ours, **variables}

    def python(self, *words: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run Python on this GPU, for example `python("-c", source)`; stdout and stderr are captured as text."""
        command = [sys.executable, *map(str, words)]
        environment = self.environment(**variables)
        return subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, encoding="utf-8", timeout=_PATIENCE, check=False
        )

    def trainer(self, *words: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run `python -m trainer` on this GPU with further environment variables."""
        return self.python("-m", "trainer", *words, **variables)

    def fill_when(self, file: Path, text: str, leave_mib: int) -> None:
        """Let the test's process take all memory except `leave_mib` once a file contains a text.

        It happens at the next allocation, so that every run of a test meets it at the same point.
        """
        self.settings |= {"FILL_FILE": file, "FILL_TEXT": text, "FILL_LEAVE_MIB": leave_mib, "FILL_PID": os.getpid()}

    def fill_in(
        self, function: str, mark: Path, *, leave_mib: int, call: int = 1, events: Path | None = None
    ) -> tuple[str, ...]:
        """Let the test's process take all memory except `leave_mib` within a call of a function of the trainer.

        `function` is "module:name" as the caller looks it up; `call` counts its calls from 1, with the run's `events`
        only those after the run was planned. The memory is taken at the first allocation from the driver after the
        function was entered. Returns the words that start the trainer in place of `-m trainer`: a program that writes
        the file `mark` when the function is entered.
        """
        self.fill_when(mark, "entered", leave_mib)
        return "-m", "tests.emulated_gpu.machine", "mark", str(mark), str(events or ""), function, str(call)

    def release(self) -> None:
        """Release the memory that `fill_when` or `fill_in` took, and take none again."""
        for name in ("FILE", "TEXT", "LEAVE_MIB", "PID"):
            self.settings.pop(f"FILL_{name}", None)
        self.state.unlink(missing_ok=True)

    @contextmanager
    def held(self, leave_mib: int) -> Iterator[subprocess.Popen[str]]:
        """Let another program hold all memory except `leave_mib` while the block runs; yield its process."""
        command = [sys.executable, "-m", "tests.emulated_gpu.machine", str(leave_mib)]
        with subprocess.Popen(
            command, cwd=ROOT, env=self.environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8"
        ) as process:
            try:
                assert process.stdout is not None
                assert process.stdout.readline().startswith("holds")
                yield process
            finally:
                process.kill()


def _hold(leave_mib: int) -> None:
    """Take the memory of this process's GPU and keep it until the process is killed."""
    cuda = ctypes.CDLL("libcudart.so.13")
    free, total, address = ctypes.c_size_t(), ctypes.c_size_t(), ctypes.c_void_p()
    assert cuda.cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total)) == 0
    taken = max(free.value - leave_mib * MIB, 0)
    assert cuda.cudaMalloc(ctypes.byref(address), ctypes.c_size_t(taken)) == 0
    sys.stdout.write(f"holds {taken}\n")
    sys.stdout.flush()
    sys.stdin.read()


def _mark(mark: Path, events: str, function: str, call: int, words: Sequence[str]) -> int:
    """Run the trainer with `words`; write `mark` at the given call of a function, counted as in `fill_in`."""
    from trainer.cli import main
    from trainer.cli.common import quieten

    quieten()  # before the module of the function imports torch
    module, _, name = function.partition(":")
    *path, attribute = name.split(".")
    owner: Any = importlib.import_module(module)
    for part in path:
        owner = getattr(owner, part)

    def is_planned() -> bool:
        return not events or (Path(events).exists() and "attempt_started" in Path(events).read_text(encoding="utf-8"))

    real, calls = getattr(owner, attribute), itertools.count(1)

    @functools.wraps(real)
    def marking(*args: Any, **options: Any) -> Any:
        if is_planned() and next(calls) == call:
            mark.write_text("entered", encoding="utf-8")
        return real(*args, **options)

    setattr(owner, attribute, marking)
    sys.argv[1:] = words
    return main()


if __name__ == "__main__":
    if sys.argv[1] == "mark":
        sys.exit(_mark(Path(sys.argv[2]), sys.argv[3], sys.argv[4], int(sys.argv[5]), sys.argv[6:]))
    _hold(int(sys.argv[1]))
