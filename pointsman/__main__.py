"""`python -m pointsman` does the same as `pointsman`."""

import sys

from pointsman.cli.main import main

sys.exit(main())
