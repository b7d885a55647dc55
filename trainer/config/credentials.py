"""Keep passwords and tokens in base links out of files and messages, which contain ${NAME} instead.

A secret is read only for the download, from the environment variable NAME or the system keyring (service "impasto",
user NAME). NAME starts with the link's host, so a job from a stranger cannot send one site's token to another.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from urllib.parse import SplitResult, quote, unquote, urlsplit, urlunsplit

from trainer.errors import BaseModelError

KEYRING_SERVICE = "impasto"

_REFERENCE = re.compile(r"\$\{(\w{1,200})\}", re.ASCII)
# Also a pasted address without https://: its query may contain secrets too.
_LINK = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://|[\w-]+(\.[\w-]+)+(:\d+)?/\S*\?")
_LINK_INSIDE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s\"'<>]+")
_FILE_HASH = re.compile(r"sha256=[0-9a-fA-F]{64}")
# Query keys that identify a file. Any other value may be a signature, so it is treated as a secret.
_PUBLIC_KEYS = frozenset(
    {"type", "format", "size", "fp", "download", "dl", "file", "filename", "name", "version", "modelversionid", "id"}
    | {"ref", "revision", "raw", "export", "confirm", "alt", "response-content-disposition"}
)
# Query keys whose value belongs to an account, not to one link: all links of a host share one variable.
_ACCOUNT_KEYS = frozenset(
    ("token", "apikey", "api_key", "api-key", "access_token", "access-token", "key", "auth", "authorization")
)
# Paths on these hosts are public, so a random-looking segment, such as a commit hash, is not a secret.
_PUBLIC_PATHS = frozenset(("huggingface.co", "hf.co", "civitai.com", "github.com", "raw.githubusercontent.com"))
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)
_LONGEST_PUBLIC_VALUE = 200


@dataclass(frozen=True, slots=True)
class SafeLink:
    """A link separated from its secrets."""

    text: str
    """The link with ``${NAME}`` in place of each secret; text that is not a link is unchanged."""
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Secrets by name, percent-encoded as in the link."""


def safe_link(text: str) -> SafeLink:
    """Separate a link from its secrets: user and password, unknown query values, and random path segments.

    The fragment is dropped, because it is never sent to a server; only ``#sha256=...`` is kept. Text that is not a link
    is returned unchanged. Raises ValueError if the link cannot be parsed.
    """
    if not _LINK.match(text):
        return SafeLink(text)
    scheme = "" if "://" in text else "https://"
    parts = urlsplit(scheme + text)
    secrets: dict[str, str] = {}
    host = parts.hostname or ""

    def hide(label: str, value: str) -> str:
        if not value or _REFERENCE.fullmatch(value):
            return value
        name = f"{_prefix(host)}{_identifier(label)}"
        secrets[name] = value
        return f"${{{name}}}"

    safe = SplitResult(
        parts.scheme,
        _safe_netloc(parts, hide),
        _safe_path(parts.path, host, hide),
        _safe_query(parts, hide),
        parts.fragment if _FILE_HASH.fullmatch(parts.fragment) else "",
    )
    return SafeLink(urlunsplit(safe).removeprefix(scheme), secrets) if secrets or safe != parts else SafeLink(text)


def protect(text: str) -> tuple[str, str | None]:
    """Store a base link's secrets; return the link without them, and a message for the user if anything was removed.

    Secrets are stored in the system keyring; if there is none, in the environment of this process and its children.
    """
    link = safe_link(text)
    if link.text == text:
        return text, None
    if not link.secrets:
        return link.text, "Removed the part after # from the base link: it is never sent to the server."
    names = ", ".join(link.secrets)
    what = "The base link contained a password or token, which must not be in files that may be shared."
    unsaved = [name for name, secret in link.secrets.items() if not _store(name, secret)]
    if not unsaved:
        return link.text, f"{what} It is now in the system keyring as {names}."
    os.environ.update({name: link.secrets[name] for name in unsaved})
    remedy = f"Set the environment variable {', '.join(unsaved)} to it before the next start"
    return link.text, f"{what} It was replaced by ${{{'}, ${'.join(link.secrets)}}}. {remedy}."


def without_secrets(text: str) -> str:
    """Return a base link without its secrets, safe to show; only the scheme if it cannot be parsed."""
    try:
        return safe_link(text).text
    except ValueError:
        return f"{text.partition('://')[0]}://"


def without_secrets_inside(text: str) -> str:
    """Return a text, such as a log, with the secrets in its links replaced."""
    return _LINK_INSIDE.sub(lambda match: without_secrets(match[0]), text)


def address_of(link: SafeLink) -> str:
    """Return a link's full address with its secrets filled in, for a single request.

    Raises BaseModelError for a variable that belongs to another host or has no value.
    """
    prefix = _prefix(urlsplit(link.text).hostname or "")

    def filled(match: re.Match[str]) -> str:
        name = match[1]
        if not name.startswith(prefix):
            sentence = f"The base link refers to ${{{name}}}, which does not belong to its host."
            raise BaseModelError(
                "base.credential",
                sentence,
                f"Rename the variable to {prefix}TOKEN, so that no other site can receive it.",
            )
        value = link.secrets.get(name) or os.environ.get(name) or _stored(name)
        if not value:
            sentence = f"The base link needs {name}, which is neither in the environment nor in the keyring."
            store = f"python -m keyring set {KEYRING_SERVICE} {name}"
            raise BaseModelError(
                "base.credential", sentence, f"Set the environment variable {name}, or store it once: {store}"
            )
        return quote(value, safe="%!$&'()*+,;=:@/?-._~")

    return _REFERENCE.sub(filled, link.text)


def base_name(model: str) -> str:
    """Return a base's file name without folders, host or secrets, or its Hub id."""
    if _LINK.match(model):
        safe = without_secrets(model)
        parts = urlsplit(safe if "://" in safe else f"https://{safe}")
        name = unquote(parts.path.rstrip("/").rpartition("/")[2])
        return parts.hostname or "" if not name or _REFERENCE.search(name) else name
    parts_of_path = model.replace("\\", "/").split("/")
    is_hub_id = len(parts_of_path) == 2 and all(part and not part.startswith((".", "~")) for part in parts_of_path)
    if is_hub_id and ":" not in model and not model.endswith(".safetensors"):
        return model
    return parts_of_path[-1]


def _safe_netloc(parts: SplitResult, hide: Callable[[str, str], str]) -> str:
    user_info, at, address = parts.netloc.rpartition("@")
    user, colon, password = user_info.partition(":")
    return f"{hide('user', user)}{colon}{hide('password', password)}{at}{address}"


def _safe_path(path: str, host: str, hide: Callable[[str, str], str]) -> str:
    if host.removeprefix("www.") in _PUBLIC_PATHS:
        return path
    return "/".join(hide(f"path_{_digest(part)}", part) if _looks_random(part) else part for part in path.split("/"))


def _safe_query(parts: SplitResult, hide: Callable[[str, str], str]) -> str:
    # Named after the path, so a renewed signature reuses the variable; the name must not reveal the value.
    link = _digest(parts.path)
    return "&".join(_safe_pair(pair, link, hide) for pair in parts.query.split("&"))


def _safe_pair(pair: str, link: str, hide: Callable[[str, str], str]) -> str:
    """Hide the value of one query parameter unless it is public; a parameter without "=" is treated as a value."""
    key, equals, value = pair.partition("=")
    if key.lower() in _PUBLIC_KEYS and len(value) <= _LONGEST_PUBLIC_VALUE and not _looks_random(value):
        return pair
    if not equals:
        return hide(f"query_{link}", key)
    return f"{key}={hide(key if key.lower() in _ACCOUNT_KEYS else f'{key}_{link}', value)}"


def _looks_random(text: str) -> bool:
    """Return whether a word looks random: a UUID, or a long word that often changes between character classes.

    A random base-62 string changes between uppercase, lowercase and digits at 64 % of its positions, and a hexadecimal
    string at 47 %; model names ("stable-diffusion-v1-5-2023") stay below 30 %.
    """
    word = unquote(text)
    if word.lower().endswith(".safetensors"):  # file names are public
        return False
    if _UUID.search(word):
        return True
    kinds = ["d" if letter.isdigit() else "u" if letter.isupper() else "l" for letter in word if letter.isalnum()]
    changes = sum(before != after for before, after in itertools.pairwise(kinds))
    return len(kinds) >= 20 and kinds.count("d") >= 3 and changes >= 0.3 * len(kinds)


def _prefix(host: str) -> str:
    name = _identifier(host.removeprefix("www."))
    return f"_{name}_" if name[:1].isdigit() else f"{name}_"


def _identifier(text: str) -> str:
    """Convert a text to an environment variable name; "-" becomes "__", so that hosts stay distinct."""
    return re.sub(r"[^A-Z0-9_]", "_", text.upper().replace("-", "__"))[:120]


def _digest(text: str) -> str:
    """Return a short hash that distinguishes links to the same host; its 4 bytes do not reveal a random segment."""
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _store(name: str, secret: str) -> bool:
    """Store a secret in the system keyring; return whether it can be read back."""
    import keyring  # loads D-Bus or the Windows credential store, so only for links with secrets
    from keyring.errors import KeyringError

    try:
        keyring.set_password(KEYRING_SERVICE, name, secret)
        return keyring.get_password(KEYRING_SERVICE, name) == secret
    except (KeyringError, OSError, RuntimeError):
        return False


def _stored(name: str) -> str | None:
    import keyring
    from keyring.errors import KeyringError

    try:
        return keyring.get_password(KEYRING_SERVICE, name)
    except (KeyringError, OSError, RuntimeError):
        return None
