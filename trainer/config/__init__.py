"""The job: strict models for its tables, and functions that read, check, resolve and write job files."""
