"""Memory traces: every allocation and release of one phase, recorded on meta tensors."""
