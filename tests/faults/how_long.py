"""The switch by which the suite runs at length: `make faults`."""

import os

LONG = os.environ.get("JAXDP_FAULTS") == "long"
