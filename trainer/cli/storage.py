"""The command that makes room: prune the cache of encoded pictures and captions."""

from __future__ import annotations

import argparse

from trainer.cli import words
from trainer.cli.arguments import Commands, add_command
from trainer.errors import EXIT_DONE


def add_commands(commands: Commands) -> None:
    """Define the words of the command."""
    prune = add_command(commands, "prune", "delete cached pictures and captions that no resumable run needs", run_prune)
    prune.add_argument("--dry-run", action="store_true", help="only say what would be deleted")


def run_prune(options: argparse.Namespace) -> int:
    """Delete what no resumable run needs, and say how much that was."""
    from trainer.training.pruning import prune

    pruned = prune(dry_run=options.dry_run)
    verb = "Would delete" if options.dry_run else "Deleted"
    kept = words.counted(pruned.kept, "entry", "entries")
    print(
        f"{verb} {words.counted(pruned.deleted, 'entry', 'entries')}, {words.size(pruned.deleted_bytes)}; kept {kept}."
    )
    return EXIT_DONE
