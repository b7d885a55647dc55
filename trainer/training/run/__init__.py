"""Start, resume and run one attempt."""
