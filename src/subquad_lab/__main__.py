"""`python -m subquad_lab` is the `subquad` command."""

import sys

from subquad_lab.cli import main

sys.exit(main())
