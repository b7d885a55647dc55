"""Problems and statistics of the open datasets, updated while the user works; see health.py."""
