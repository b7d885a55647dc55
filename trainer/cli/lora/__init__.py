"""Commands for LoRA files: check, metadata, convert, resize, merge, extract."""

from __future__ import annotations

from trainer.cli.common import Commands
from trainer.cli.lora import changing, combining, describing


def add_commands(commands: Commands) -> None:
    """Define the commands and their arguments."""
    parser = commands.add_parser(
        "lora",
        help="check, edit, convert, resize, merge and extract LoRA files",
        description="Check, edit, convert, resize, merge and extract LoRA files of any program.",
    )
    parts = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, help="what to do")
    describing.add_commands(parts)
    changing.add_commands(parts)
    combining.add_commands(parts)
