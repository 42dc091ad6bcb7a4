"""``python -m motley.plugins.nccl``: build the library and print where it is."""

import sys

from .build import BuildError, library

if __name__ == "__main__":
    try:
        print(library())
    except BuildError as error:
        sys.exit(str(error))
