"""Commands for LoRA files: check, metadata."""

from __future__ import annotations

from trainer.cli.common import Commands
from trainer.cli.lora import describing


def add_commands(commands: Commands) -> None:
    """Define the commands and their arguments."""
    parser = commands.add_parser(
        "lora", help="check and edit LoRA files", description="Check and edit LoRA files of any program."
    )
    parts = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, help="what to do")
    describing.add_commands(parts)
