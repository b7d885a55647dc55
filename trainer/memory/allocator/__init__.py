"""Simulation of PyTorch's CUDA caching allocator."""
