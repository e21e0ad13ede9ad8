"""`python -m transformers_dspark` is the `dspark` command."""

import sys

from .cli import main


if __name__ == "__main__":
    sys.exit(main())
