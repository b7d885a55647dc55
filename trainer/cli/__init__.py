"""The command line, thin: words in, words out. Commands import what they need when they run: help is instant."""

from __future__ import annotations

import argparse
import faulthandler
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from trainer import __version__
from trainer.cli import datasets, doctor, drawing, jobs, plan, presets, queue, runs
from trainer.cli.common import Parser, guarded, note, protect_links, quieten

_DESCRIPTION = """\
Impasto trains SD 1.5 and SDXL LoRAs: from a folder of pictures to a file that loads everywhere.

first steps:
  python -m trainer doctor                                      does this machine have what it takes?
  python -m trainer check ./pictures                            what is wrong or doubtful in the pictures?
  python -m trainer new --base model.safetensors --pictures ./pictures my-style
  python -m trainer train my-style/job.toml                     Ctrl-C pauses; nothing is lost
  python -m trainer resume my-style                             goes on where it stopped
"""
_EPILOG = """\
`python -m trainer COMMAND --help` explains a command. RUN is the name or the folder of a run, as `runs` lists them.
exit codes: 0 done, 75 paused or stopped and can be resumed, 2 something in your input needs a change, 1 a fault.
"""


def main(words: Sequence[str] | None = None) -> int:
    """Run the command that `words` (absent: the process's own) name; return the exit code."""
    options = _parser().parse_args(words)
    if words is None:
        _prepare_process(debug=options.debug)
    return guarded(lambda: _run(options), debug=options.debug)


def _run(options: argparse.Namespace) -> int:
    for message in protect_links(options):
        note(message)
    return int(options.command(options))


def _prepare_process(*, debug: bool) -> None:
    """Set what holds for the whole process; whoever calls `main` with words of its own keeps its settings."""
    # Started without a terminal, as by pythonw or a closed one: files opened later must not take these numbers.
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115 - as long as the process
    for stream in (sys.stdout, sys.stderr):
        # Windows' pipes and old consoles take one small alphabet unless told otherwise.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="replace")
    # Number cards as their driver does, not by speed: then "cuda:1" is the same card for all programs.
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    faulthandler.enable()  # a crash within a library says where, and does not end without a word
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
    parser.add_argument("--debug", action="store_true", help="show where a fault of Impasto itself happened")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for group in (jobs, queue, plan, runs, datasets, drawing, presets, doctor):
        group.add_commands(commands)
    return parser
