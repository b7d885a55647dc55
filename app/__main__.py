"""Open the window: `python -m app [FOLDER|FILE ...]`."""

import sys

from app.start import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
