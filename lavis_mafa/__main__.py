"""``python -m lavis_mafa COMMAND``: the same as ``lavis-mafa COMMAND``."""

import sys

from lavis_mafa.cli import main

if __name__ == "__main__":
    sys.exit(main())
