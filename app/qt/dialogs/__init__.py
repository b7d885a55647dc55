"""Dialogs of the whole app."""
