"""Keeps what libraries say to their programmers off the terminal of an artist."""

from __future__ import annotations

import logging
import os
import warnings


def quieten() -> None:
    """Silence the libraries' notices, warnings and bars below errors; call it before the first of them is imported."""
    for name in ("TRANSFORMERS_VERBOSITY", "DIFFUSERS_VERBOSITY", "HF_HUB_VERBOSITY"):
        os.environ.setdefault(name, "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    logging.basicConfig(level=logging.ERROR)
    warnings.simplefilter("ignore")
