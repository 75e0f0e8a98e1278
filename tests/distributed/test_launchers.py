"""Which process this is: arguments, variables of the user, torchrun, what JAX finds."""

import multiprocessing
import os
import warnings

import jax
import pytest
from toys import Mlp

import jaxdp
from jaxdp.distributed.launchers import Rank, bind_host, find_rank

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node7",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "job",
    "TORCHELASTIC_RESTART_COUNT": "0",
}
SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_NODELIST": "node[003-004]",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_NTASKS": "8",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
}
OPEN_MPI_4 = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_MCA_orte_hnp_uri": "2045444096.0;tcp://192.0.2.2,10.0.0.2:53329",
}
OPEN_MPI_5 = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "2"}
KUBERNETES = {
    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
    "JOB_COMPLETION_INDEX": "1",
    "JAX_NUM_PROCESSES": "2",
    "JAX_COORDINATOR_ADDRESS": "train-0.train:1234",
}


@pytest.fixture(autouse=True)
def variables(monkeypatch):
    """Sets variables, of which there are none before."""
    for name in os.environ:
        if name.startswith(("JAX_NUM", "JAX_COORD", "JAX_PROC", "SLURM", "TORCHELA")):
            monkeypatch.delenv(name)

    def set_them(environ):
        for name, value in environ.items():
            monkeypatch.setenv(name, value)

    return set_them


@pytest.mark.parametrize(
    ("environ", "index", "count", "host", "devices"),
    [
        (TORCHRUN, 3, 4, "node7", [1]),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "4"}, 3, 4, "127.0.0.1", [1]),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "1"}, 3, 4, "node7", None),
        (TORCHRUN | {"CUDA_VISIBLE_DEVICES": "6"}, 3, 4, "node7", None),
        (SLURM, 5, 8, "node003", [1]),
        (OPEN_MPI_4, 2, 4, "192.0.2.2", [0]),
        (KUBERNETES, 1, 2, "train-0.train", None),
        (TORCHRUN | {"JAX_COORDINATOR_ADDRESS": "[fd00::2]:77"}, 3, 4, "fd00::2", [1]),
        (TORCHRUN | {"JAX_PROCESS_ID": "0"}, 0, 4, "node7", None),
    ],
)
def test_launchers_say_which_process_this_is(
    variables, environ, index, count, host, devices
):
    variables(environ)
    rank = find_rank()
    assert rank is not None
    assert (rank.index, rank.count, rank.host) == (index, count, host)
    assert rank.devices == devices and 77 <= rank.port < 65536


def test_arguments_come_first(variables):
    variables(TORCHRUN)
    rank = find_rank("here:77", process_id=2)
    assert rank is not None and rank[:4] == (2, 4, "here", 77)
    assert find_rank(num_processes=1) is None


def test_jobs_and_starts_of_a_job_are_told_apart(variables):
    ranks = []
    for more in ({}, {"TORCHELASTIC_RESTART_COUNT": "1"}, {"MASTER_PORT": "29501"}):
        variables(TORCHRUN | more)
        ranks.append(find_rank())
    first, again, other = ranks
    assert first.job != again.job and first.port == again.port != other.port


@pytest.mark.parametrize(
    "environ",
    [
        {},
        TORCHRUN | {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_WORLD_SIZE": "1"},
        {k: v for k, v in SLURM.items() if k == "SLURM_JOB_ID"},  # sbatch
        {"KUBERNETES_SERVICE_HOST": "10.0.0.1"},
    ],
)
def test_a_process_alone_is_alone(variables, environ):
    variables(environ)
    assert find_rank() is None


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        (
            {k: v for k, v in TORCHRUN.items() if k != "MASTER_ADDR"},
            "`coordinator_address` is not known",
        ),
        (TORCHRUN | {"WORLD_SIZE": "x"}, "WORLD_SIZE is 'x', but must be an integer"),
        (TORCHRUN | {"JAX_COORDINATOR_ADDRESS": "node7"}, "must be 'host:port'"),
        (
            {"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"},
            "`coordinator_address` is not known",
        ),
        (OPEN_MPI_5, "`coordinator_address`, `num_processes`, `process_id` is not"),
    ],
)
def test_a_wrong_variable_is_named(variables, environ, text):
    variables(environ)
    with pytest.raises(ValueError, match=text):
        find_rank()


def test_wrong_arguments_are_named():
    initialize = jaxdp.distributed.initialize
    with pytest.raises(
        ValueError, match="`coordinator_address`, `process_id` is not known"
    ):
        initialize(num_processes=2)
    with pytest.raises(ValueError, match="`coordinator_address`.* must be 'host:port'"):
        initialize("here", 2, 0)
    with pytest.raises(ValueError, match="`process_id` must be from 0 to 1.*got 2"):
        initialize("here:77", 2, 2)
    with pytest.raises(ValueError, match="`heartbeat_timeout` must be more than 0"):
        initialize(heartbeat_timeout=0)


def test_where_all_are_on_one_machine_others_are_not_listened_to():
    assert [bind_host(h) for h in ("localhost", "::1")] == ["127.0.0.1", "::1"]
    assert bind_host("node7") in ("::", "0.0.0.0")
    assert Rank(0, 2, "fd00::2", 77).address == "[fd00::2]:77"


def test_alone_it_does_nothing():
    jaxdp.distributed.initialize()
    jaxdp.distributed.initialize(num_processes=1)
    assert not jax.distributed.is_initialized()


def test_a_spawned_worker_that_imports_the_script_joins_nobody(variables, monkeypatch):
    variables(TORCHRUN)
    worker = multiprocessing.current_process()
    monkeypatch.setattr(worker, "_inheriting", True, raising=False)
    jaxdp.distributed.initialize()
    assert not jax.distributed.is_initialized()


@pytest.mark.parametrize(
    ("environ", "told"),
    [
        (TORCHRUN, "torchrun started 4"),
        (SLURM, "srun started 8"),
        (OPEN_MPI_5, "mpirun started 4"),
    ],
)
def test_a_trainer_warns_of_a_start_that_was_forgotten(
    variables, monkeypatch, environ, told
):
    monkeypatch.setattr("jaxdp.distributed.start._is_alone_on_purpose", False)
    variables(environ)
    with pytest.warns(UserWarning, match=f"{told} processes, and this one trains"):
        jaxdp.Trainer(Mlp(jax.random.key(0)), loss="mse")
    jaxdp.distributed.initialize(num_processes=1)
    with warnings.catch_warnings(action="error"):
        jaxdp.Trainer(Mlp(jax.random.key(0)), loss="mse")
