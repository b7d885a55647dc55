"""Commands for LoRA files: check, metadata, convert, resize."""

from __future__ import annotations

from trainer.cli.common import Commands
from trainer.cli.lora import changing, describing


def add_commands(commands: Commands) -> None:
    """Define the commands and their arguments."""
    parser = commands.add_parser(
        "lora",
        help="check, edit, convert and resize LoRA files",
        description="Check, edit, convert and resize LoRA files of any program.",
    )
    parts = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, help="what to do")
    describing.add_commands(parts)
    changing.add_commands(parts)
