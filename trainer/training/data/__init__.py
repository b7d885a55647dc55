"""Caches, and the batches that training takes from them."""
