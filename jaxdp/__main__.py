"""`python -m jaxdp`: see `jaxdp.extras.cli`."""

import sys

from .extras.cli import main

sys.exit(main())
