"""`megarl convert`, for those who look for it here: see `megarl convert --help`."""

import sys

from megarl.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", *(sys.argv[1:] or ["--help"])]))
