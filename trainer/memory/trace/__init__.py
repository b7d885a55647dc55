"""Record memory traces: every allocation and deallocation of a phase, on meta tensors."""
