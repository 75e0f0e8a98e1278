"""A script as a user would write it, for Ray. Arguments: folder, who is killed once."""

import os
import pathlib
import sys

import tasks

import jaxdp

jaxdp.distributed.initialize()
folder = sys.argv[1]
begun = pathlib.Path(folder, "begun-" + os.environ["JAX_PROCESS_ID"])
first = not begun.exists()
begun.parent.mkdir(parents=True, exist_ok=True)
begun.touch()
tasks.survive(folder, killed=int(sys.argv[2]) if first else None)
