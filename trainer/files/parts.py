"""Where the weights of a base's models lie and what they are built from, and by that what tells their content."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from trainer.files.architecture import Config
from trainer.files.hashing import remembered_sha256
from trainer.files.identify import BaseIdentity, identify_vae
from trainer.files.weights import weight_files


@dataclass(frozen=True)
class PartFiles:
    """One model's weights and its config."""

    files: tuple[Path, ...]
    config: Config

    def digest(self, hashes: Mapping[Path, str]) -> str:
        """Return a hash of the files' content and the config: equal only where the model is."""
        content = [self.config, sorted(hashes[path] for path in self.files)]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def part_files(path: Path, identity: BaseIdentity, name: str) -> PartFiles:
    """Return where a base has one of its models; raises BaseModelError when it has not."""
    files = weight_files(path, name) if identity.form == "folder" else (path,)
    return PartFiles(files, identity.configs[name])


def vae_files(path: Path, identity: BaseIdentity, other: Path | None) -> PartFiles:
    """Return where the VAE lies: the base's own, or `other`; raises BaseModelError when there is none."""
    if other is None:
        return part_files(path, identity, "vae")
    files, config = identify_vae(other)
    return PartFiles(files, config or identity.configs["vae"])


def joint_digest(parts: Iterable[PartFiles], hashes: Mapping[Path, str]) -> str:
    """Return one hash for several models, in their order."""
    return hashlib.sha256("".join(part.digest(hashes) for part in parts).encode()).hexdigest()


def known_hashes(parts: Iterable[PartFiles]) -> dict[Path, str] | None:
    """Return the SHA-256 of the parts' files as they were computed once; None where one is not known."""
    known = {path: remembered_sha256(path) for path in {path for part in parts for path in part.files}}
    told = {path: digest for path, digest in known.items() if digest is not None}
    return told if len(told) == len(known) else None
