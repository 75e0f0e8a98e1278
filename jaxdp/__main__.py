"""`python -m jaxdp`: see `jaxdp.cli`."""

import sys

from .cli import main

sys.exit(main())
