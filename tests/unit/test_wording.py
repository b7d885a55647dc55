"""Strings that users read contain none of the words that were replaced by the field's terms."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import ROOT

REPLACED = {
    r"pictures?": "image",
    r"(graphics )?cards?": "GPU",
    r"anew|once more|afresh": "again",
    r"mend(s|ed|ing)?": "fix, restore",
    r"(goes|go|going|gone|went) on\b(?! (to|with the next))": "continue, resume",
    r"lack(s|ed|ing)?": "does not have, is missing, is too large by",
    r"nobody|somebody|hardly anybody": "no one; say who does what",
    r"by nobody named": "author unknown",
    r"without a word": "unexpectedly",
    r"put(s)? aside": "back up, set aside, offload",
    r"as delivered": "default",
    r"nothing stands": "no problems found",
    r"stands? in the way|in the way": "problem",
    r"computed twice": "recomputed (gradient checkpointing)",
    r"broken[- ]off": "interrupted",
    r"foretold|foretell": "forecast",
    r"needless": "extra",
    r"quite|perhaps": "possibly, or leave it out",
    r"tapes?": "memory trace",
    r"rungs?": "fallback step",
    r"ladder": "fallback steps",
    r"behind it|stand(s)? (here|behind|below|above)": "after it, appears",
    r"will not do|would not do": "cannot be used",
    r"colou[r](s|ed)?|behav[i]our|favou[r]ite|cent[r]ed?|licen[c]e|gre[y]": "American spelling",
    r"\w*(quantis|initialis|normalis|regularis|organis|recognis|customis|summaris|optimis)\w*": "American spelling",
}
"""Patterns of replaced words, with what to write instead."""
ALLOWED = re.compile(r"model cards?", re.IGNORECASE)
"""Terms of the field that contain a replaced word."""


def sentences(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and text of every string literal with a space in it that is neither a docstring nor a pattern."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    patterns = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("re.")
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant) or id(node) in documentation or id(node) in patterns:
            continue
        if isinstance(node.value, str) and " " in node.value.strip():
            yield node.lineno, node.value


def replaced_words(text: str) -> list[str]:
    text = ALLOWED.sub("", re.sub(r"\{\w*\}", "", text))  # users see the values, not the names in braces
    return [found[0] for word in REPLACED if (found := re.search(rf"\b(?:{word})\b", text, re.IGNORECASE))]


def test_users_read_no_word_that_was_replaced() -> None:
    found = [
        f"{path.relative_to(ROOT).as_posix()}:{line}: {', '.join(words)}: {text.strip()[:90]}"
        for folder in ("app", "trainer")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line, text in sentences(path)
        if (words := replaced_words(text))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "text",
    ["8 pictures are small", "Your card is full", "The run goes on", "lacks 480 MiB", "quantised base"],
)
def test_a_replaced_word_would_be_found(text: str) -> None:
    assert replaced_words(text)


def test_ordinary_words_are_not_found() -> None:
    assert not replaced_words("GPU memory is full: close other programs, then resume the run with 8 images.")
