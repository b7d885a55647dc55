"""Caches of latents and text embeddings, and the batches built from them."""
