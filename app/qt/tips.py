"""Tool tips of texts that others wrote."""

from __future__ import annotations

from html import escape


def plain_tip(text: str) -> str:
    """Return a tip that shows a text as it stands: Qt takes what looks like HTML for HTML, a caption's tags too."""
    return f"<p style='white-space: pre-wrap'>{escape(text)}</p>" if text else ""
