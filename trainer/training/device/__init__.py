"""The device that trains: precision, memory, offload, out-of-memory."""
