"""Give tests of the benchmarks what tests of training have: one thread and deterministic algorithms."""

from tests.train.conftest import deterministic_torch, torch_left_as_found

__all__ = ["deterministic_torch", "torch_left_as_found"]
