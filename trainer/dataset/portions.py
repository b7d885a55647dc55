"""What cached pictures and texts take on disk, and how many showings lie there together. No torch."""

from __future__ import annotations

from collections.abc import Iterable

GIGABYTE = 1e9
FLOAT_BYTES = 4
LATENT_SCALE = 8
# Listing a showing takes about 0.1 ms: a portion that nothing else bounds is listed within some ten seconds.
MOST_SHOWINGS = 100_000


def text_bytes(token_chunks: int, widths: Iterable[int]) -> int:
    """Bytes that a cached caption takes at most, with encoders of these hidden sizes: fp32."""
    return (token_chunks + 2) * sum(widths) * FLOAT_BYTES


def latent_bytes(bucket: tuple[int, int], *, masked: bool) -> int:
    """Return the bytes that cached latents of a bucket (width, height) take.

    Mean and deviation have 4 channels each, a mask has one; all in fp32 and at the size of the latents.
    """
    width, height = bucket
    return (2 * 4 + masked) * (width // LATENT_SCALE) * (height // LATENT_SCALE) * FLOAT_BYTES
