"""`python -m cbjax` is the command line."""

import sys

from cbjax.cli import main

sys.exit(main())
