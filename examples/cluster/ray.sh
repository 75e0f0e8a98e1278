#!/bin/bash
# Ray: a job on a running cluster, two workers with a GPU each.
#
#     RAY_ADDRESS=http://head:8265 bash examples/cluster/ray.sh
#
# A machine goes, or a worker fails: Ray ends the others, starts all again on what is
# there, at most ten times, and they resume from their checkpoint.
# See it: ray job logs -f train; the dashboard at RAY_ADDRESS
# The folder of checkpoints must be reached by all machines: /shared here.
set -eu
ray job submit --submission-id train --no-wait --working-dir . -- \
    python examples/ray_train.py --workers 2 --gpus --restarts 10 --output /shared/ray \
    examples/cluster/train.py --output /shared/cluster
