"""Command line: parse the arguments, run a command, and print the result.

Each command imports what it needs when it runs, so that --help is instant.
"""

from __future__ import annotations

import argparse
import faulthandler
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from trainer import __version__
from trainer.cli import (
    datasets,
    doctor,
    drawing,
    job_sweep,
    jobs,
    lora,
    lr_find,
    methods,
    new_job,
    plan,
    presets,
    queue,
    runs,
)
from trainer.cli.common import Parser, guarded, name_settings, note, protect_links, quieten

_DESCRIPTION = """\
Impasto trains SD 1.5 and SDXL LoRAs: from a folder of images to a file that loads everywhere.

first steps:
  python -m trainer doctor                                      check whether this PC can train
  python -m trainer check ./images                              list problems in your images
  python -m trainer new --base model.safetensors --images ./images my-style
  python -m trainer train my-style/job.toml                     train; Ctrl-C pauses, nothing is lost
  python -m trainer resume my-style                             continue where it stopped
"""
_EPILOG = """\
`python -m trainer COMMAND --help` explains a command. RUN is the name or the folder of a run; `runs` lists them.
exit codes: 0 done, 75 paused or stopped (can be resumed), 2 your input needs a change, 1 an error.
"""


def main(words: Sequence[str] | None = None) -> int:
    """Run the command given by `words` (default: this process's arguments) and return the exit code."""
    options = _parser().parse_args(words)
    if words is None:
        _prepare_process(debug=options.debug)
    return guarded(lambda: _run(options), debug=options.debug)


def _run(options: argparse.Namespace) -> int:
    for message in (*name_settings(options), *protect_links(options)):
        note(message)
    return int(options.command(options))


def _prepare_process(*, debug: bool) -> None:
    """Set up this process's streams, environment and logging; not used for callers that pass `words` to `main`."""
    # Without a terminal (pythonw, or one that was closed), files opened later must not get these descriptor numbers.
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115 - as long as the process
    for stream in (sys.stdout, sys.stderr):
        # Pipes and old consoles on Windows default to a small legacy code page.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="replace")
    # Number GPUs as the driver does, not by speed: then "cuda:1" is the same GPU in all programs.
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    faulthandler.enable()  # a crash inside a native library then prints where it happened
    if not debug:
        quieten()


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m trainer",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"Impasto {__version__}")
    parser.add_argument("--debug", action="store_true", help="show the traceback when Impasto itself fails")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    groups = (new_job, jobs, queue, job_sweep, lr_find, plan, runs, datasets, lora, drawing, presets, methods, doctor)
    for group in groups:
        group.add_commands(commands)
    return parser
