"""Which process this is, by the variables that launchers set."""

import multiprocessing
import warnings

import jax
import pytest
from toys import Mlp

import jaxdp
from jaxdp.distributed.launchers import find_place
from jaxdp.distributed.start import _local_devices

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
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[003-004]",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
}
OPEN_MPI_4 = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_MCA_orte_hnp_uri": "2045444096.0;tcp://192.0.2.2,10.0.0.2:53329",
    "PMIX_NAMESPACE": "2045444097",
}
OPEN_MPI_5 = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-node-7-5484@1",
}
KUBERNETES = {
    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
    "JOB_COMPLETION_INDEX": "1",
    "JAX_NUM_PROCESSES": "2",
    "JAX_COORDINATOR_ADDRESS": "train-0.train:1234",
}
PLACES = {
    "torchrun": (TORCHRUN, 3, 4, "node7", range(29501, 29509), 1),
    "slurm": (SLURM, 5, 8, "node003", None, 1),
    "open mpi 4": (OPEN_MPI_4, 2, 4, "192.0.2.2", None, 0),
    "open mpi 5": (OPEN_MPI_5, 2, 4, "node-7", None, 0),
    "kubernetes": (KUBERNETES, 1, 2, "train-0.train", [1234], None),
}


@pytest.mark.parametrize("launcher", PLACES)
def test_launchers_say_which_process_this_is(launcher):
    environ, process_id, num_processes, host, ports, local_id = PLACES[launcher]
    place = find_place(environ=environ)
    assert place is not None
    assert (place.process_id, place.num_processes) == (process_id, num_processes)
    assert (place.host, place.local_id) == (host, local_id)
    if ports is not None:
        assert place.ports == tuple(ports)
    assert all(1024 <= port < 65536 for port in place.ports)


@pytest.mark.parametrize("launcher", ["torchrun", "slurm", "open mpi 4", "open mpi 5"])
def test_an_address_that_the_user_gives_comes_first(launcher):
    environ = PLACES[launcher][0] | {"JAX_COORDINATOR_ADDRESS": "[fd00::2]:77"}
    place = find_place(environ=environ)
    assert place is not None
    assert (place.host, place.ports) == ("fd00::2", (77,))


def test_processes_of_one_machine_keep_to_it():
    one = {"LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "3"}
    place = find_place(environ=TORCHRUN | one)
    assert place is not None
    assert place.host == "127.0.0.1" and place.is_on_one_host
    slurm = SLURM | {"SLURM_STEP_TASKS_PER_NODE": "8", "SLURM_STEP_NODELIST": "node1"}
    place = find_place(environ=slurm)
    assert place is not None
    assert place.host == "127.0.0.1" and place.is_on_one_host


def test_each_process_takes_one_gpu_where_several_share_a_machine():
    slurm = find_place(environ=SLURM)
    assert slurm is not None and slurm.local_count == 4
    assert _local_devices(slurm, None) == [1]
    unlike = find_place(environ=SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2(x2),4"})
    assert unlike is not None and not unlike.is_on_one_host
    assert _local_devices(unlike, None) == [1]
    alone = {"SLURM_STEP_TASKS_PER_NODE": "1(x8)", "SLURM_LOCALID": "0"}
    slurm = find_place(environ=SLURM | alone)
    assert slurm is not None and _local_devices(slurm, None) is None


def test_the_tasks_of_a_job_are_those_of_its_step_where_srun_says_no_more():
    environ = {k: v for k, v in SLURM.items() if k != "SLURM_STEP_NUM_TASKS"}
    place = find_place(environ=environ | {"SLURM_NTASKS": "8"})
    assert place is not None and place.num_processes == 8


def test_what_the_user_has_set_comes_before_the_launcher():
    place = find_place(environ=TORCHRUN | {"JAX_PROCESS_ID": "0"})
    assert place is not None and (place.process_id, place.local_id) == (0, None)
    place = find_place("here:77", process_id=2, environ=TORCHRUN)
    assert place is not None
    assert (place.host, place.process_id, place.num_processes) == ("here", 2, 4)


def test_starts_of_a_job_are_told_apart():
    again = TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "1"}
    first, second = find_place(environ=TORCHRUN), find_place(environ=again)
    assert first is not None and second is not None
    assert first.job != second.job


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node001", "node001"),
        ("node001,host2", "node001"),
        ("node[001-0015],host2", "node001"),
        ("node[001,007-015],host2", "node001"),
        ("a-[2,5]-ib,b1", "a-2-ib"),
    ],
)
def test_the_first_node_of_slurm(nodes, first):
    place = find_place(environ=SLURM | {"SLURM_STEP_NODELIST": nodes})
    assert place is not None and place.host == first


@pytest.mark.parametrize(
    "environ",
    [
        {},
        TORCHRUN
        | {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        | {"LOCAL_RANK": "0"},
        {k: v for k, v in SLURM.items() if k != "SLURM_STEP_NODELIST"},  # sbatch
        SLURM | {"SLURM_JOB_NAME": "interactive"},
        {"KUBERNETES_SERVICE_HOST": "10.0.0.1"},
    ],
)
def test_a_process_alone_is_alone(environ):
    assert find_place(environ=environ) is None


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        (
            {k: v for k, v in TORCHRUN.items() if k != "MASTER_ADDR"},
            "`coordinator_address` is not known",
        ),
        (
            {k: v for k, v in TORCHRUN.items() if k != "RANK"},
            "`process_id` is not known",
        ),
        (
            {k: v for k, v in SLURM.items() if k != "SLURM_STEP_NUM_TASKS"},
            "`num_processes` is not known",
        ),
        (TORCHRUN | {"WORLD_SIZE": "x"}, "WORLD_SIZE is 'x', but must be an integer"),
        (TORCHRUN | {"JAX_COORDINATOR_ADDRESS": "node7"}, "must be 'host:port'"),
        (
            {"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"},
            "`coordinator_address` is not known",
        ),
        (OPEN_MPI_5 | {"PMIX_NAMESPACE": "77"}, "mpirun -x JAX_COORDINATOR_ADDRESS"),
    ],
)
def test_a_wrong_variable_is_named(environ, text):
    with pytest.raises(ValueError, match=text.replace("(", r"\(")):
        find_place(environ=environ)


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


def test_alone_it_does_nothing():
    jaxdp.distributed.initialize()
    jaxdp.distributed.initialize(num_processes=1)
    assert jaxdp.distributed.lifeline() is None


def test_a_spawned_worker_that_imports_the_script_joins_nobody(monkeypatch):
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    worker = multiprocessing.current_process()
    monkeypatch.setattr(worker, "_inheriting", True, raising=False)
    jaxdp.distributed.initialize()
    assert jaxdp.distributed.lifeline() is None


def test_a_trainer_warns_of_a_start_that_was_forgotten(monkeypatch):
    monkeypatch.setattr("jaxdp.distributed.start._is_alone_on_purpose", False)
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    with pytest.warns(
        UserWarning, match="torchrun started 4 processes, and this one, 3"
    ):
        jaxdp.Trainer(Mlp(jax.random.key(0)), loss="mse")
    jaxdp.distributed.initialize(num_processes=1)
    with warnings.catch_warnings(action="error"):
        jaxdp.Trainer(Mlp(jax.random.key(0)), loss="mse")
