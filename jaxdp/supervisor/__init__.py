"""A process that starts a script, and starts it again after a fault.

    python -m jaxdp run --deadman 300 --snapshot-every 20 train.py

It knows nothing of training and touches no device. `parent.py` is that process;
`child.py` runs the script; `channel.py` is what they tell each other, and
`leftovers.py` keeps order where snapshots are.
"""

from .channel import Channel, alive, channel, patience
from .leftovers import find_snapshots, make_snapshots, remove_snapshots
from .parent import Supervisor
