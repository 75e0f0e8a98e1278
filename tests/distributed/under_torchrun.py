"""A script as a user would write it, for torchrun. Arguments: folders, the killed.

Or the word "raise": then process 1 does.
"""

import os
import sys

import tasks

import jaxdp

jaxdp.distributed.initialize()
if sys.argv[1:] == ["raise"]:
    tasks.fit(at=(1, 5, tasks.fail))
path, memory, killed = sys.argv[1:]
at = {"0": 8, "1": 11}.get(os.environ["TORCHELASTIC_RESTART_COUNT"])
tasks.survive(path, killed=None if at is None else int(killed), at=at, memory=memory)
