"""Real processes that train as one: the numbers, the rows, the files, the ends."""

import functools
import json
import re
import shutil

import numpy as np
import pytest

pytest.importorskip("torch")

import streams
import together
from crew import LIMIT
from toys import Deep, steps_in

import jaxdp

SIZES = [41, 13]
"""Rows that each of two processes has of its own."""


def told(outputs):
    """Returns the values that each process reported, in order."""
    return [
        [json.loads(line) for line in re.findall(r"^told (.*)$", text, re.M)]
        for text in outputs
    ]


@pytest.fixture
def tell_alone(capsys):
    """Returns what this process alone tells in a scene."""

    def tell(scene, *arguments):
        scene(*arguments)
        return told([capsys.readouterr().out])[0][0]

    return tell


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder that the scenes of a job write to."""
    return tmp_path_factory.mktemp("scenes")


def play(crew, scenes):
    """Plays scenes in one job; returns the texts of both processes, by scene."""
    job = crew("in_turn", start={"devices": 2}, scenes=scenes)
    codes, outputs = job.join(limit=LIMIT * len(scenes))
    assert codes == [0, 0], job.all_outputs()
    (_, *first), (_, *second) = (
        re.split(r"^scene (.*)\n", output, flags=re.M) for output in outputs
    )
    assert first[::2] == second[::2] == [*scenes]
    printed = zip(first[1::2], second[1::2], strict=True)
    return dict(zip(scenes, printed, strict=True))


@pytest.fixture(scope="module")
def scenes(shared_crew, folder):
    return play(shared_crew, {
        "quiet": ("together.quiet", {"into": str(folder / "run")}),
        "local": ("together.local", {"sizes": SIZES}),
        "decisions": ("together.decisions", {}),
        "plateaus": ("together.plateaus", {}),
        "exchanges": ("together.exchanges", {}),
        "files": ("together.files", {"into": str(folder / "files")}),
    })  # fmt: skip


@pytest.fixture(scope="module")
def slow_scenes(shared_crew, folder):
    for package in ("datasets", "grain", "webdataset", "optuna", "safetensors"):
        pytest.importorskip(package)
    path = jaxdp.save_weights(Deep(4), folder / "deep.safetensors", streams.NAMES)
    scenes = {
        "plans": ("together.planned", {}),
        "best": ("together.best", {"into": str(folder / "best")}),
        "bad batches": ("together.bad_batches", {"into": str(folder / "bad")}),
        "pruned": ("together.prune", {}),
        "streams": ("streams.resume_all", {"into": str(folder / "streams")}),
        "weights": ("streams.pretrained", {"path": path, "into": str(folder / "two")}),
    }
    for name in ("buckets", "wholes", "on_devices", "values"):
        for local in (False, True):
            scenes[f"{name}, local={local}"] = (f"together.{name}", {"local": local})
    return play(shared_crew, scenes)


numbers_of_one = functools.cache(together.numbers)


def assert_same(found, expected, rtol=1e-5):
    assert found.keys() == expected.keys()
    for name in expected:
        # Adam makes much of tiny differences in the last batches' gradients.
        atol = 1e-4 if name in ("weights", "predictions") else 0
        np.testing.assert_allclose(
            found[name], expected[name], rtol=rtol, atol=atol, err_msg=name
        )


SIX = ["Sharded", "Pmap", "ZeRO", "FSDP", "TensorParallel", "across"]
BLOCKS = ["Pipeline", "FSDP", "FSDP in groups"]
ONE = "SingleDevice"


@pytest.mark.parametrize("processes, devices, names, expected, options", [
    (2, 2, SIX, ONE, {}),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        (4, 1, ["Sharded", "FSDP"], ONE, {}),
        (2, 2, ["sequence", "rows and sequence"], ONE, {}),
        (2, 2, BLOCKS, ONE, {"deep": True, "epochs": 1}),
        (2, 2, ["LocalSGD"], "LocalSGD", {}),
        (2, 2, ["Bitwise", "Bitwise Pmap"], "Bitwise", {"epochs": 1}),
    )),
])  # fmt: skip
def test_the_numbers_are_those_of_one_process(
    crew, processes, devices, names, expected, options
):
    outputs = crew(
        "together.all_numbers",
        processes=processes,
        start={"devices": devices},
        cases={name: {"strategy": name, **options} for name in names},
    ).finish()
    first, *others = told(outputs)
    assert [each["name"] for each in first] == names
    for each in first:
        alone = numbers_of_one(expected, **options)
        assert_same(each["found"], alone)
        assert expected != "Bitwise" or each["found"] == alone
    assert all(other == first for other in others)  # to the bit


@pytest.mark.slow
def test_every_loader_gives_what_it_gives_one_process(crew, tell_alone):
    expected = tell_alone(together.loaders)
    outputs = crew("together.loaders").finish()
    found = [each[0] for each in told(outputs)]
    for name, losses in expected["found"].items():
        assert found[0]["found"][name] == found[1]["found"][name]
        np.testing.assert_allclose(
            found[0]["found"][name], losses, rtol=1e-5, err_msg=name
        )
    # Nobody reads what others train on, but for a row where there is none to be had.
    asked = [each["asked"] for each in found]
    assert set(asked[0]) | set(asked[1]) == set(range(together.ROWS))
    assert sum(map(len, asked)) <= 2 * together.ROWS + 2


@pytest.mark.slow
def test_loaders_of_their_own_may_end_at_different_times(scenes):
    first, second = told(scenes["local"])
    x, y = together.rows(sum(SIZES))
    alone = together.trainer("SingleDevice")
    expected = alone.validate([(x, y)])
    for name, value in expected.items():
        assert first[0]["before"][name] == pytest.approx(value, rel=1e-5)
    assert first[0]["before"] == second[0]["before"]
    assert [first[0]["own"], second[0]["own"]] == SIZES
    for (each, *_), size in zip((first, second), SIZES, strict=True):
        assert each["by_batch"] == [size, pytest.approx(each["sums"][0], rel=1e-4)]
    everyone = float(alone.predict([(x, y)]).sum())
    own = first[0]["sums"][0] + second[0]["sums"][0]
    assert own == pytest.approx(everyone, rel=1e-4)
    assert [each[0]["everyone"] for each in (first, second)] == [54, 54]
    assert first[0]["sums"][1] == pytest.approx(everyone, rel=1e-4)
    assert first[0]["rows"] == 54 and first[0]["batches"] == 6
    assert first[0]["steps"] == 12
    assert first[0]["losses"] == second[0]["losses"]
    assert first[1:] == second[1:] == [{"good": True}]


@pytest.mark.slow
def test_plans_know_what_is_between_processes(slow_scenes):
    (first,), (second,) = told(slow_scenes["plans"])
    assert first["before"] == second["before"]
    for plan in (first["before"], first["running"]):
        assert (plan["hosts"], plan["rows"]) == (2, 16)
        assert plan["crosses"] and all(plan["crosses"])
    assert first["faked"] == 8
    assert first["local"] == 2 * 16


@pytest.mark.slow
def test_a_job_is_resumed_by_another_number_of_processes(crew, tmp_path):
    whole, cut = str(tmp_path / "whole"), str(tmp_path / "cut")
    two = {"devices": 2}
    straight = crew("together.straight", start=two, strategy="FSDP", into=whole)
    stopped = crew("together.stopped", start=two, strategy="FSDP", into=cut)
    codes, outputs = stopped.join()
    assert codes == [143, 143], stopped.all_outputs()
    ends = [each[0] for each in told(outputs)]
    assert ends[0] == ends[1] and ends[0]["end"] == "Preempted"
    step = ends[0]["step"]
    assert step < 12 and step in steps_in(cut)
    codes, outputs = straight.join()
    assert codes == [0, 0], straight.all_outputs()
    expected = told(outputs)[0][0]
    assert told(outputs)[1][0] == expected
    copies = []
    for _ in range(2):
        copies.append(shutil.copytree(cut, tmp_path / f"copy{len(copies)}"))
    same = crew("together.resumed", start=two, strategy="FSDP", into=cut)
    four = crew(
        "together.resumed", processes=4, strategy="Sharded", into=str(copies[0])
    )
    for job, count in ((same, 2), (four, 4)):
        codes, outputs = job.join()
        assert codes == [0] * count, job.all_outputs()
        for (found,) in told(outputs):
            if job is same:  # to the bit
                assert found == {**expected, "losses": expected["losses"][step:]}
            else:
                assert_resumed(found, expected, step)
    together.resumed("SingleDevice", str(copies[1]))


@pytest.mark.slow
def test_the_best_weights_come_from_disk_in_every_process(slow_scenes, folder):
    outputs = slow_scenes["best"]
    assert outputs[0].count("back to step 8, where val_loss was 1") == 3
    resumed_from = folder / "best" / "resumed" / "8"
    assert f"val_loss was 1, from {resumed_from}" in outputs[0]
    (first,), (second,) = told(outputs)
    assert first == second
    whole, resumed = first["weights"]
    assert resumed == whole


def assert_resumed(found, expected, step):
    np.testing.assert_allclose(found["losses"], expected["losses"][step:], rtol=1e-5)
    np.testing.assert_allclose(found["weights"], expected["weights"], atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("by, who, hook, code", [
    ("SIGTERM", 0, "on_validation_start", 143),
    ("SIGINT", 1, "on_train_batch_end", 130),
])  # fmt: skip
def test_a_signal_to_one_stops_all(crew, tmp_path, by, who, hook, code):
    folder = str(tmp_path / "saved")
    options = {"strategy": "Sharded", "into": folder, "by": by, "who": who}
    outputs = crew("together.stopped", **options, hook=hook).finish(code)
    ends = [each[0] for each in told(outputs)]
    assert ends[0] == ends[1]
    assert ends[0]["end"] == {143: "Preempted", 130: "KeyboardInterrupt"}[code]
    assert ends[0]["step"] in steps_in(folder)


def test_what_one_decides_all_do(scenes):
    first, second = told(scenes["decisions"])
    assert first == second
    found = {name: value for each in first for name, value in each.items()}
    assert 3 <= found["one_wants_to_stop"] < 2000
    assert 0 < found["max_time"] < 2000
    assert found["early_stopping"] == 8


def test_values_and_errors_are_exchanged(scenes):
    (first, failing), (second, failing_there) = told(scenes["exchanges"])
    assert first == second
    assert first["gathered"] == [[[0, n], [1, n]] for n in range(3)]
    what = "what is next: purpose 0 (process 0), purpose 1 (process 1). Their"
    assert f"RuntimeError: the processes of this job do not agree: {what}" in str(first)
    assert first["steps"][:3] == ["none"] * 3
    assert "at step 1: x: 0 (process 0), 1 (process 1). " in first["steps"][3]
    assert first["vote"][1] == [0, 1] and first["vote"][0] > 20
    assert failing == {"failing": "OSError: full"}
    assert failing_there == {"failing": "OSError: full (said process 0)"}


def test_hyperparameters_are_set_on_all(scenes):
    first, second = told(scenes["plateaus"])
    assert first == second
    assert first[0]["rate"] == first[1]["rate"] == 0.25
    message = "values in `set_hyperparams`: learning_rate: 0.1 (process 0)"
    assert message in first[1]["error"]


@pytest.mark.slow
def test_all_see_a_bad_batch(slow_scenes):
    first, second = told(slow_scenes["bad batches"])
    assert first == second
    found = {name: value for each in first for name, value in each.items()}
    assert found["skipped"] == [6]
    assert found["timed"]
    assert "FloatingPointError" in found["stopped"] and "step 6" in found["stopped"]


def test_files_are_saved_and_refused_together(scenes):
    for (found,) in told(scenes["files"]):
        assert found["same"]
        assert "FileExistsError" in found["there already"]
        assert "FileNotFoundError" in found["nothing there"]
        assert "CheckpointCorrupt" in found["damaged"]
        assert found["two folders at once"] == [8, 8]
        assert found["due"] == [".lock", *"12345678"]
        assert "none of the devices" in found["SingleDevice"]
        assert "Leave `devices` out" in found["one process's devices"]
        assert "data='global'" in found["local, bitwise"]
        assert "data='global'" in found["local, across"]
        assert "2 processes" in found["compare"]
    (first,), (second,) = told(scenes["files"])
    assert all("process_1/" in name for name in second["written"])
    for when in ("written", "read"):  # each file by one of them
        assert first[when] and second[when]
        assert not {*first[when]} & {*second[when]}


def test_one_process_speaks_for_all(scenes, folder):
    first, second = scenes["quiet"]
    assert "`loss` is not given" in first and "examples/s" in first
    # Gloo's threads write over each other, and tear their lines.
    ours = [line for line in second.splitlines() if "peer ranks" not in line]
    assert [line for line in ours if line.strip("[Glo] Rank0123456789")] == []
    assert (folder / "run" / "metrics.csv").exists()
    assert (folder / "run" / "report.html").exists()


@pytest.mark.slow
@pytest.mark.parametrize("local", [False, True])
def test_batches_of_several_shapes_are_those_of_one_process(
    slow_scenes, tell_alone, local
):
    expected = tell_alone(together.buckets)
    for (each,) in told(slow_scenes[f"buckets, local={local}"]):
        np.testing.assert_allclose(each["losses"], expected["losses"], rtol=1e-5)
        if local:
            assert "rows of [[2, 4], []] in process 0, of [[3, 4], []]" in each["wrong"]


@pytest.mark.slow
@pytest.mark.parametrize("local", [False, True])
def test_what_has_no_rows_is_whole_in_every_process(slow_scenes, tell_alone, local):
    expected = tell_alone(together.wholes, local)
    for (each,) in told(slow_scenes[f"wholes, local={local}"]):
        for name in "losses", "predicted":
            np.testing.assert_allclose(each[name], expected[name], rtol=1e-4)
        assert ("different values in a jaxdp.Whole" in each["wrong"]) == local


@pytest.mark.slow
@pytest.mark.parametrize("local", [False, True])
def test_batches_on_devices_give_the_bits_of_the_host(slow_scenes, local):
    for (each,) in told(slow_scenes[f"on_devices, local={local}"]):
        for name in "weights", "predictions":
            on_host, *others = each[name]
            assert others == [on_host] * 3
        assert "batch[0] is a jax.Array that spans processes" in each["wrong"]


@pytest.mark.slow
@pytest.mark.parametrize("local", [False, True])
def test_metrics_of_sets_and_own_values_are_those_of_one_process(
    slow_scenes, tell_alone, local
):
    expected = tell_alone(together.values, local)
    for (each,) in told(slow_scenes[f"values, local={local}"]):
        # The values of process 0 are everybody's, and end every process's fit.
        assert each["val_own"] == expected["val_own"] == [0.0, 1.0]
        assert each["process"] == [0.0, 0.0]
        assert each["val_kept_rows"] == [21.0, 21.0]
        means = each["val_kept_mean"], expected["val_kept_mean"]
        np.testing.assert_allclose(*means, rtol=1e-4)
        given = each["targets"], expected["targets"]
        if local:  # a process's rows come one behind the other
            given = [[sorted(rows) for rows in passes] for passes in given]
        assert given[0] == given[1]


@pytest.mark.slow
def test_a_trial_of_one_process_is_pruned_in_all(slow_scenes):
    expected = {"error": "TrialPruned", "epoch": 1, "step": 2}
    assert told(slow_scenes["pruned"]) == [[expected], [expected]]


@pytest.mark.slow
def test_loaders_of_other_libraries_go_on_in_several_processes(slow_scenes):
    expected = []
    for kind in streams.LOADERS:
        for local in (False, True):
            steps = 18 if local else 36
            ends = {"steps": steps, "saved": steps // 3 + 2, "ended": steps}
            expected.append({"kind": kind, "local": local, **ends, "same": True})
    assert told(slow_scenes["streams"]) == [expected, expected]


@pytest.mark.slow
def test_weights_of_a_file_and_adapters_are_split_between_processes(
    slow_scenes, folder, tell_alone
):
    (first,), (second,) = told(slow_scenes["weights"])
    assert first["same"] and first == second
    arguments = folder / "deep.safetensors", str(folder / "alone")
    expected = tell_alone(streams.pretrained, *arguments)
    np.testing.assert_allclose(first["weights"], expected["weights"], atol=2e-5)
