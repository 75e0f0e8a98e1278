"""Two processes that train together over a link of their own, which may be a bad one.

    network.py FOLDER {"delay": 0.02, "loss": 0.03, "cut_after": null}

Each has a network namespace, for which one must be root; the link between them is this
process. Exits with `NO_RIGHTS` where that can't be. What the two print is in FOLDER.
"""

import ctypes
import fcntl
import hashlib
import heapq
import json
import os
import pathlib
import random
import select
import signal
import socket
import struct
import subprocess
import sys
import time

NO_RIGHTS = 77
_NEW_NETWORK, _NEW_HOST_NAME = 0x40000000, 0x04000000
_TUNSETIFF, _TUN, _NO_HEADER = 0x400454CA, 0x1, 0x1000


def enter_namespace(number):
    """Enters a new one, and gives the far end of its only device."""
    if ctypes.CDLL(None).unshare(_NEW_NETWORK | _NEW_HOST_NAME):
        raise PermissionError("only root may")
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH", b"far", _TUN | _NO_HEADER))
    for command in (f"addr add 10.9.0.{number}/24 dev far", "link set far up"):
        subprocess.run(["ip", *command.split()], check=True)
    subprocess.run("ip link set lo up".split(), check=True)
    socket.sethostname(f"10.9.0.{number}")  # gloo asks for its address by that name
    return end


def link(ends, processes, delay, loss, cut_after):
    """Carries packets until the processes have ended; late, and not all of them."""
    generator, waiting, count = random.Random(0), [], 0
    while any(process.poll() is None for process in processes):
        ready, _, _ = select.select(ends, [], [], 0.001 if waiting else 0.05)
        for end in ready:
            packet, count = os.read(end, 2**16), count + 1
            is_cut = cut_after is not None and count > cut_after
            if not is_cut and generator.random() >= loss:
                due = time.monotonic() + delay * generator.uniform(0.5, 1.5)
                other = ends[1 - ends.index(end)]
                heapq.heappush(waiting, (due, count, other, packet))
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, end, packet = heapq.heappop(waiting)
            os.write(end, packet)


def main(folder, delay=0.0, loss=0.0, cut_after=None):
    ends, processes = [], []
    for index in range(2):
        try:
            ends.append(enter_namespace(index + 1))
        except OSError:  # or there is no /dev/net/tun, or no `ip`
            return NO_RIGHTS
        with (folder / f"{index}.txt").open("w") as output:
            command = [sys.executable, __file__, "train", str(index), str(folder)]
            processes.append(subprocess.Popen(command, stdout=output, stderr=output))
    try:
        link(ends, processes, delay, loss, cut_after)
    finally:
        for process in processes:
            process.kill()
    print(json.dumps([process.returncode for process in processes]))
    return 0


def train(index, folder):
    os.environ["JAX_PLATFORMS"] = "cpu"
    import equinox as eqx
    import jax
    import numpy as np
    import optax

    import jaxdp

    jax.config.update("jax_num_cpu_devices", 1)
    jaxdp.distributed.initialize("10.9.0.1:5555", 2, index, heartbeat_timeout=8)
    generator = np.random.default_rng(0)
    x = generator.normal(size=(10, 16, 4)).astype(np.float32)
    trainer = jaxdp.Trainer(
        eqx.nn.MLP(4, 2, 16, 1, key=jax.random.key(0)),
        optax.adam(1e-2),
        loss="cross_entropy",
        callbacks=[jaxdp.callbacks.ModelCheckpoint(folder / "checkpoints")],
        enable_progress_bar=False,
    )
    batches = [(each, (each.sum(1) > 0).astype(np.int64)) for each in x]
    trainer.fit(batches, batches[:2], max_epochs=2)
    leaves = jax.tree.leaves(eqx.filter(trainer.model, eqx.is_array))
    content = b"".join(np.asarray(leaf).tobytes() for leaf in leaves)
    print("end", trainer.global_step, hashlib.sha256(content).hexdigest())


if __name__ == "__main__":
    if sys.argv[1] == "train":
        train(int(sys.argv[2]), pathlib.Path(sys.argv[3]))
    else:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
        sys.exit(main(pathlib.Path(sys.argv[1]), **json.loads(sys.argv[2])))
