"""`python -m mla_ops`."""

import sys

from .cli import main

sys.exit(main())
