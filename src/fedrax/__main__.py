"""``python -m fedrax``: the command line."""

import sys

from fedrax.cli import main

sys.exit(main())
