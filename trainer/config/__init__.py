"""The job: strict models of its tables, and how job files are read, checked, resolved and written."""
