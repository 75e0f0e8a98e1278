"""Runs a training script on the workers of a Ray cluster, the script as it is.

    python examples/ray_train.py --workers 2 examples/fashion_mnist.py --epochs 2

The script calls `jaxdp.distributed.initialize()` at its top, which finds its place in
three variables that are set here. Ray starts all workers again if one dies
(`--restarts`); a script with `ckpt_path="auto"` then resumes from its last checkpoint.
Needs Ray: `pip install "ray[train]"`. On several machines, start Ray there
first (`ray start`), and let checkpoints go to a folder that all can reach.
"""

import argparse
import os
import runpy
import socket
import sys
from typing import Any

import ray
import ray.train
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.collective import broadcast_from_rank_zero
from ray.train.v2.jax import JaxConfig, JaxTrainer


def free_address() -> str:
    """An address on this machine where process 0 can listen."""
    with socket.socket() as server:
        server.bind(("", 0))
        return f"{ray.util.get_node_ip_address()}:{server.getsockname()[1]}"


def run_script(config: dict[str, Any]) -> None:
    """Tells JAX the rank of the worker, and runs the script."""
    context = ray.train.get_context()
    rank = context.get_world_rank()
    address = broadcast_from_rank_zero(free_address() if rank == 0 else None)
    os.environ |= {
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_NUM_PROCESSES": str(context.get_world_size()),
        "JAX_PROCESS_ID": str(rank),
    }
    os.chdir(config["folder"])  # Ray starts workers elsewhere
    sys.argv = config["argv"]
    sys.path.insert(0, os.path.dirname(sys.argv[0]))  # as `python script.py` does
    runpy.run_path(sys.argv[0], run_name="__main__")


def main(argv: list[str] | None = None) -> ray.train.Result:
    """Starts the workers, waits for them, and returns what Ray says of the run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpus", action="store_true", help="one for each worker")
    parser.add_argument("--restarts", type=int, default=0)
    parser.add_argument("--output", default="runs/ray")
    parser.add_argument("script", nargs=argparse.REMAINDER)
    args = parser.parse_args(argv)

    return JaxTrainer(
        run_script,
        train_loop_config={"argv": args.script, "folder": os.getcwd()},
        # Ray would call `jax.distributed.initialize` before the script can.
        jax_config=JaxConfig(use_gpu=False, use_tpu=False),
        scaling_config=ScalingConfig(num_workers=args.workers, use_gpu=args.gpus),
        run_config=RunConfig(
            storage_path=os.path.abspath(args.output),
            failure_config=FailureConfig(max_failures=args.restarts),
        ),
    ).fit()


if __name__ == "__main__":
    main()
