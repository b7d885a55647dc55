"""Keeps passwords and tokens out of base links: every file and message has ${NAME} in their place.

A secret is read from the environment variable NAME or from the system keyring (service "impasto", user NAME) at the
moment of the download and nowhere else. NAME begins with the link's own host, so a job from a stranger cannot send one
site's token to another.
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
# A pasted address without https:// is no link yet, but its query is as secret.
_LINK = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://|[\w-]+(\.[\w-]+)+(:\d+)?/\S*\?")
_LINK_INSIDE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s\"'<>]+")
_FILE_HASH = re.compile(r"sha256=[0-9a-fA-F]{64}")
# Query keys that say which file is meant. Any other value may be a signature, so it counts as a secret.
_PUBLIC_KEYS = frozenset(
    {"type", "format", "size", "fp", "download", "dl", "file", "filename", "name", "version", "modelversionid", "id"}
    | {"ref", "revision", "raw", "export", "confirm", "alt", "response-content-disposition"}
)
# Query keys whose value belongs to an account, not to one link: all links of a host share the name.
_ACCOUNT_KEYS = frozenset(
    ("token", "apikey", "api_key", "api-key", "access_token", "access-token", "key", "auth", "authorization")
)
# Their paths are public; a commit hash there is no secret.
_PUBLIC_PATHS = frozenset(("huggingface.co", "hf.co", "civitai.com", "github.com", "raw.githubusercontent.com"))
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)
_LONGEST_PUBLIC_VALUE = 200


@dataclass(frozen=True, slots=True)
class SafeLink:
    """A link without its secrets."""

    text: str
    """The link with ``${NAME}`` in place of each secret; any other text unchanged."""
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Each secret by its name, percent-encoded as it was in the link."""


def safe_link(text: str) -> SafeLink:
    """Separate a link from its secrets: user and password, unknown query values, random path segments, the fragment.

    A fragment is never sent to a server; only ``#sha256=...`` is kept. Text that is not a link comes back unchanged.
    Raises ValueError for a link that cannot be parsed.
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
    """Return a base without secrets, and a message for the user where it had any; the secrets are stored.

    They go to the system keyring. Without one they are known to this process and those that it starts, until it ends.
    """
    link = safe_link(text)
    if link.text == text:
        return text, None
    if not link.secrets:
        return link.text, "Removed what follows # from the link of the base: it is never sent to the server."
    names = ", ".join(link.secrets)
    what = "The link of the base contained a password or token, which files must not hold because they get shared."
    unsaved = [name for name, secret in link.secrets.items() if not _store(name, secret)]
    if not unsaved:
        return link.text, f"{what} It is now in the system keyring as {names}."
    os.environ.update({name: link.secrets[name] for name in unsaved})
    remedy = f"Set the environment variable {', '.join(unsaved)} to it before the next start"
    return link.text, f"{what} It was replaced by ${{{'}, ${'.join(link.secrets)}}}. {remedy}."


def without_secrets(text: str) -> str:
    """Return a base as it may be shown; nothing of a link that cannot be parsed."""
    try:
        return safe_link(text).text
    except ValueError:
        return f"{text.partition('://')[0]}://"


def without_secrets_inside(text: str) -> str:
    """Return a longer text, such as a log, with every link in it as it may be shown."""
    return _LINK_INSIDE.sub(lambda match: without_secrets(match[0]), text)


def address_of(link: SafeLink) -> str:
    """Return the real address of a link: each ``${NAME}`` replaced by its secret, for use in one request only.

    Raises BaseModelError for a name that belongs to another host, or that is set nowhere.
    """
    prefix = _prefix(urlsplit(link.text).hostname or "")

    def filled(match: re.Match[str]) -> str:
        name = match[1]
        if not name.startswith(prefix):
            sentence = f"The link of the base refers to ${{{name}}}, which does not belong to its host."
            raise BaseModelError(
                "base.credential", sentence, f"Name the variable {prefix}TOKEN, so that no other site can receive it."
            )
        value = link.secrets.get(name) or os.environ.get(name) or _stored(name)
        if not value:
            sentence = f"The link of the base needs {name}, which is neither in the environment nor in the keyring."
            store = f"python -m keyring set {KEYRING_SERVICE} {name}"
            raise BaseModelError(
                "base.credential", sentence, f"Set the environment variable {name}, or store it once: {store}"
            )
        return quote(value, safe="%!$&'()*+,;=:@/?-._~")

    return _REFERENCE.sub(filled, link.text)


def base_name(model: str) -> str:
    """Return a base's file name or Hub id: no folders, no address, no secret."""
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
    # The same path with a newer signature takes the older one's name; the value itself must not show in it.
    link = _digest(parts.path)
    return "&".join(_safe_pair(pair, link, hide) for pair in parts.query.split("&"))


def _safe_pair(pair: str, link: str, hide: Callable[[str, str], str]) -> str:
    """Hide the value of one pair of a query; a bare word counts as a value."""
    key, equals, value = pair.partition("=")
    if key.lower() in _PUBLIC_KEYS and len(value) <= _LONGEST_PUBLIC_VALUE and not _looks_random(value):
        return pair
    if not equals:
        return hide(f"query_{link}", key)
    return f"{key}={hide(key if key.lower() in _ACCOUNT_KEYS else f'{key}_{link}', value)}"


def _looks_random(text: str) -> bool:
    """Return whether a word looks generated: a UUID, or a long one in which letters and digits keep alternating.

    A random base-62 text changes between upper case, lower case and digits at 64 % of its places, a hexadecimal one at
    47 %; names of models ("stable-diffusion-v1-5-2023") stay below 30 %.
    """
    word = unquote(text)
    if word.lower().endswith(".safetensors"):  # a file's name is public
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
    """Spell a text as the name of an environment variable; a hyphen differs from a dot, so that hosts stay distinct."""
    return re.sub(r"[^A-Z0-9_]", "_", text.upper().replace("-", "__"))[:120]


def _digest(text: str) -> str:
    """Tell two links of one host apart; four bytes reveal nothing of a path segment that is itself random."""
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _store(name: str, secret: str) -> bool:
    """Store a secret in the system keyring; return whether it can be read back."""
    import keyring  # loads D-Bus or Windows' credential store: only for links that have a secret
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
