"""The command that makes room: prune the cache of encoded pictures and captions."""

from __future__ import annotations

import argparse

from trainer.cli import words
from trainer.cli.arguments import Commands, add_command
from trainer.cli.output import echo
from trainer.errors import EXIT_DONE
from trainer.protocol import places


def add_commands(commands: Commands) -> None:
    """Define the words of the command."""
    prune = add_command(commands, "prune", "delete cached pictures and captions that no resumable run needs", run_prune)
    prune.epilog = (
        "Runs do this by themselves, the entries unused for longest first, while the cache takes more gigabytes than "
        "the environment variable IMPASTO_CACHE_GB says (absent: 60)."
    )
    prune.add_argument("--dry-run", action="store_true", help="only say what would be deleted")


def run_prune(options: argparse.Namespace) -> int:
    """Delete what no resumable run needs, and say how much that was."""
    from trainer.training.run.cache_pruning import prune

    limit = places.cache_limit() / 1e9
    pruned = prune(dry_run=options.dry_run)
    verb = "Would delete" if options.dry_run else "Deleted"
    deleted = f"{words.counted(pruned.deleted, 'entry', 'entries')}, {words.size(pruned.deleted_bytes)}"
    kept = f"{words.counted(pruned.kept, 'entry', 'entries')}, {words.size(pruned.kept_bytes)}"
    echo(f"{verb} {deleted}; kept {kept}, of the {limit:g} GB that the cache may take.")
    return EXIT_DONE
