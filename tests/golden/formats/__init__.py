"""Samples of every file that Impasto writes, by the version that wrote them."""
