"""What a job is: strict models, one file named after each owner, and how job files are read and written."""
