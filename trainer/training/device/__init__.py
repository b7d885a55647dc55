"""The training device: precision, memory, offload and out-of-memory errors."""
