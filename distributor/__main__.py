"""``python -m distributor``."""

import sys

from distributor.cli import main

sys.exit(main())
