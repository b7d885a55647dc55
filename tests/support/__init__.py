"""Share small but real material among the tests."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""The repository."""
