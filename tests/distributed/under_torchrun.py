"""A script as a user would write it, for torchrun. Arguments: folder, who is killed."""

import os
import sys

import tasks

import jaxdp

jaxdp.distributed.initialize()
first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
tasks.survive(sys.argv[1], killed=int(sys.argv[2]) if first else None)
