"""Commands that describe a LoRA file: which programs load it, and its metadata."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.cli.common import Commands, add_command, add_json, echo, echo_json, echo_lines
from trainer.errors import EXIT_DONE, LoraFileError
from trainer.protocol.files import long_path
from trainer.protocol.text import printable

if TYPE_CHECKING:
    from trainer.files.identify import LoraIdentity
    from trainer.files.loading import Verdict

_OUTCOMES = {"loads": "loads it", "partly": "loads a part", "refused": "does not load it"}
_LONGEST_VALUE = 2000
_CANNOT_BE_EDITED = ("sshs_model_hash", "sshs_legacy_hash", "modelspec.hash_sha256")


def add_commands(commands: Commands) -> None:
    """Define the commands and their arguments."""
    check = add_command(commands, "check", "show which programs load a LoRA file, and why not", run_check)
    add_file(check)
    add_family(check)
    add_json(check)

    metadata = add_command(commands, "metadata", "show or edit the metadata of a LoRA file", run_metadata)
    add_file(metadata)
    metadata.add_argument(
        "--set",
        dest="entries",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="set a value, such as modelspec.title=Style",
    )
    metadata.add_argument("--remove", action="append", default=[], metavar="KEY", help="remove a key")
    metadata.add_argument(
        "--strip",
        action="store_true",
        help="remove everything that programs do not need to load the file: recipe, captions' tags, title, author; "
        "values of --set are kept",
    )
    metadata.add_argument("--out", type=Path, metavar="FILE", help="write a copy instead of changing the file")
    add_force(metadata)
    add_json(metadata)


def add_file(parser: argparse.ArgumentParser) -> None:
    """Add the FILE argument."""
    parser.add_argument("file", metavar="FILE", type=Path, help="a LoRA file (.safetensors)")


def add_family(parser: argparse.ArgumentParser) -> None:
    """Add the --family option."""
    parser.add_argument(
        "--family", choices=("sd15", "sdxl"), help="the family that it is for, if the file does not say it"
    )


def add_force(parser: argparse.ArgumentParser) -> None:
    """Add the --force option."""
    parser.add_argument("--force", action="store_true", help="replace the output file if it exists")


def require_free(out: Path, *sources: Path, force: bool, suffix: str = ".safetensors") -> None:
    """Raise LoraFileError if an output file exists and may not be replaced, is one of its sources, or has no folder."""
    name = f"Could not write {out}"
    if out.suffix.lower() != suffix:
        raise LoraFileError("lora.out", f"{name}: its name does not end with {suffix}.", "Choose such a name.")
    if not long_path(out.absolute().parent).is_dir():
        raise LoraFileError("lora.out", f"{name}: its folder does not exist.", "Create the folder, or choose another.")
    if long_path(out).is_dir():
        raise LoraFileError("lora.out", f"{name}: it is a folder.", "Choose the name of a file.")
    if any(out.resolve() == source.resolve() for source in sources):
        raise LoraFileError("lora.out", f"{name}: it is also an input.", "Choose another name for the output.")
    if long_path(out).exists() and not force:
        raise LoraFileError("lora.exists", f"{name}: it exists already.", "Choose another name, or add --force.")


def run_check(options: argparse.Namespace) -> int:
    """Print which programs load a file."""
    from trainer.files.header import read_header
    from trainer.files.identify import lora_of_header
    from trainer.files.loading import verdicts

    header = read_header(options.file, "lora")
    identity = lora_of_header(options.file, header)
    family = options.family or identity.family
    found = verdicts(header, family)
    if options.json:
        programs = [{"program": each.program, "outcome": each.outcome, "reasons": each.reasons} for each in found]
        echo_json({"kind": identity.kind, "family": family, "programs": programs}, indent=2)
        return EXIT_DONE
    echo_lines(identity.evidence)
    if family is None:
        echo("The file does not say for which family it is; add --family to apply the rules of one.")
    echo_lines(_verdict_lines(found))
    return EXIT_DONE


def _verdict_lines(found: Sequence[Verdict]) -> Iterator[str]:
    width = max(len(each.program) for each in found)
    for each in found:
        yield f"  {each.program:{width}}  {_OUTCOMES[each.outcome]}"
        yield from (f"  {'':{width}}    {printable(reason)}" for reason in each.reasons)
    if any(each.outcome != "loads" for each in found):
        yield "`lora convert --to kohya` writes the names that every program knows."


def run_metadata(options: argparse.Namespace) -> int:
    """Print the metadata, or change it."""
    from trainer.files.identify import identify_lora
    from trainer.files.rewriting import rewrite_metadata

    identity = identify_lora(options.file)
    changes = _changes(options, identity)
    if not changes and options.out is None:
        if options.json:
            echo_json(dict(sorted(identity.metadata.items())), indent=2)
        else:
            echo_lines(_metadata_lines(identity.metadata))
        return EXIT_DONE
    if options.out is not None:
        require_free(options.out, options.file, force=options.force)
    target = options.out or options.file
    rewrite_metadata(options.file, target, changes)
    count = len([key for key, value in changes.items() if identity.metadata.get(key) != value])
    echo(f"{target}: {count} {'key' if count == 1 else 'keys'} changed; its tensors are the same.")
    return EXIT_DONE


def _changes(options: argparse.Namespace, identity: LoraIdentity) -> dict[str, str | None]:
    """Return the new value of each key that the options change, None if it is removed; raise LoraFileError."""
    from trainer.files.rewriting import minimal_metadata

    metadata = identity.metadata
    changes: dict[str, str | None] = {}
    if options.strip:
        kept = minimal_metadata(metadata, identity.family)
        changes = {**dict.fromkeys(metadata), **kept}
    for key in options.remove:
        if key not in metadata:
            close = ", ".join(sorted(known for known in metadata if key.lower() in known.lower())[:3])
            remedy = f"Did you mean {close}?" if close else "`lora metadata FILE` lists the keys."
            raise LoraFileError("lora.metadata", f'Could not remove "{key}": the file has no such key.', remedy)
        changes[key] = None
    for text in options.entries:
        key, equals, value = text.partition("=")
        if not equals or not key:
            sentence = f'Could not set "{text}": it is not KEY=VALUE.'
            raise LoraFileError("lora.metadata", sentence, "Write, for example, --set modelspec.title=Style.")
        if not _is_text(text):
            raise LoraFileError("lora.metadata", f'Could not set "{key}": it is not valid Unicode.', "Type it again.")
        changes[key] = value
    for key in _CANNOT_BE_EDITED:
        if key in options.remove or any(text.startswith(f"{key}=") for text in options.entries):
            sentence = f'Could not change "{key}": it is the hash by which programs recognize the tensors.'
            raise LoraFileError("lora.metadata", sentence, "Leave it out; it is updated by itself.")
    return changes


def _is_text(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:  # the shell passed bytes that are not UTF-8
        return False
    return True


def _metadata_lines(metadata: Mapping[str, str]) -> Iterator[str]:
    if not metadata:
        yield "The file has no metadata."
    for key, value in sorted(metadata.items()):
        yield f"{printable(key, _LONGEST_VALUE)}: {printable(value, _LONGEST_VALUE)}"
