"""Every benchmark at toy size; that peers do the same work, and that cheats show."""

import dataclasses
import functools
import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys import On, on_one_device

pytest.importorskip("torch")

import benchmarks.__main__ as everything
from benchmarks import memory, models, processes, quick, report
from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import steps
from benchmarks.peers import PEERS, Skip
from benchmarks.works import WORKS

pytestmark = pytest.mark.slow


TOYS = {name: work.toy() for name, work in WORKS.items()}
KINDS = ["W1", "W2", "W3", "W4", "W5"]


@pytest.fixture(autouse=True)
def plain_jax():
    """Benchmarks add biases as everyone does, by implicit broadcasting."""
    with jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.parametrize("name", KINDS)
def test_the_referee_agrees_with_jax(name):
    work = TOYS[name]
    x, y = work.arrays()
    mean_loss = eqx.filter_jit(models.mean_loss)
    expected = mean_loss(models.build(work), x, y, work.criterion)
    assert work.loss(work.weights()) == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("name", KINDS)
def test_augmented_and_ready_batches_are_those_of_the_loader(name):
    work = TOYS[name]
    for expected, found in zip(work.batches(), work.loader(), strict=True):
        for a, b in zip(expected, found, strict=True):
            np.testing.assert_array_equal(a, b.numpy())


@functools.cache
def final_loss_of_the_expert(name):
    return TOYS[name].loss(PEERS["expert"].train(TOYS[name], lambda: None))


# The other peers are below, in processes of their own: with eight faked devices and
# warnings as errors they are not what users start.
HERE = [*((name, "jaxdp") for name in [*KINDS, "W6"]), ("W6", "jaxdp_pmap")]
HERE += [
    ("W1", "jaxdp32"),
    ("W1", "jaxdp_ready"),
    ("W1", "tutorial"),
    ("W6", "tutorial"),
]
HERE += [("W1", "expert_flat"), ("W1", "expert_loader"), ("W5", "computing")]
HERE += [(name, "torch") for name in KINDS]


@pytest.mark.parametrize(("name", "peer"), HERE)
def test_a_peer_does_the_work_of_the_expert(name, peer):
    work, marks = TOYS[name], []
    try:
        weights = PEERS[peer].train(work, lambda: marks.append(1))
    except Skip as skip:
        pytest.skip(str(skip))
    expected = final_loss_of_the_expert(name)
    assert work.loss(weights) == pytest.approx(expected, rel=1e-4)
    assert expected < work.loss(work.weights())
    assert len(marks) == work.epochs


@pytest.mark.parametrize(
    "peer", [name for name, peer in PEERS.items() if {*peer.needs}]
)
@pytest.mark.parametrize("name", ["W1", "W2", "W4"])
def test_an_installed_library_does_the_work_of_the_expert(name, peer):
    for package in PEERS[peer].needs:
        pytest.importorskip(package)
    if not PEERS[peer].does(WORKS[name]):
        pytest.skip(f"{peer} is not for {name}")
    one = processes.run_round(WORKS[name], ["expert", peer], toy=True)
    assert one["failed"] == {}
    assert set(one["loss"]) == {"expert", peer}


def test_a_peer_that_trains_less_is_found_out():
    work = TOYS["W1"]
    lazy = dataclasses.replace(work, epochs=work.epochs - 1)
    losses = {
        "expert": work.loss(PEERS["expert"].train(work, lambda: None)),
        "jaxdp": work.loss(PEERS["expert"].train(lazy, lambda: None)),
    }
    found = processes.find_cheats(work, losses | {"torch": losses["expert"]})
    assert list(found) == ["jaxdp"]
    assert found["jaxdp"].startswith("its final loss is")


@pytest.mark.slow
def test_all_in_one_command_writes_json_a_table_and_a_chart(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    arguments = ["--toy", "--only", "W1", "--peers", "torch", "--output", str(tmp_path)]
    everything.main([*arguments, "--repeats", "1"])
    results = everything.main([*arguments, "--repeats", "1", "--add"])

    assert json.loads((tmp_path / "results.json").read_text()) == results
    assert [one["failed"] for one in results["rounds"]] == [{}, {}]
    times = [one["seconds_per_step"] for one in results["rounds"]]
    ratio = np.median([time["torch"] / time["expert"] for time in times])
    table = (tmp_path / "results.md").read_text()
    assert f"| torch, eager | {ratio:.2f} |" in table
    assert table in capsys.readouterr().out
    assert (tmp_path / "speed.png").read_bytes().startswith(b"\x89PNG")


def one_round(jaxdp, expert, busy=0.0):
    empty = {"skipped": {}, "failed": {}, "loss": {}}
    seconds = {"jaxdp": jaxdp, "expert": expert}
    busy = {"busy": {"expert": 0.0, "jaxdp": busy}}
    return {"work": "W1", "seconds_per_step": seconds, **busy, **empty}


def test_ratios_are_medians_of_ratios_within_quiet_rounds():
    rounds = [one_round(*pair) for pair in ((2.0, 1.0), (5.0, 10.0), (0.75, 1.0))]
    assert report.ratios(rounds)["W1"]["jaxdp"] == 0.75
    assert report.seconds(rounds, "W1", "expert") == 1.0
    loud = one_round(9.0, 1.0, busy=0.5)
    assert report.ratios([loud])["W1"]["jaxdp"] == 9.0
    assert report.ratios([loud, rounds[0]])["W1"]["jaxdp"] == 2.0
    assert "In 1 rounds of 1 other programs" in report.markdown([loud])


@pytest.mark.slow
def test_the_quick_watch_flags_what_became_slower(tmp_path, capsys):
    recorded = tmp_path / "recorded.json"
    arguments = ["--toy", "--only", "W1", "--repeats", "1", "--recorded", str(recorded)]
    assert quick.main([*arguments, "--record"]) == 0
    ratios = json.loads(recorded.read_text())["ratios"]
    assert ratios["W1"]["jaxdp"] > 0

    def rows(jaxdp, before):
        return quick.compare({"W1": {"jaxdp": jaxdp}}, {"W1": {"jaxdp": before}})

    assert [row[-1] for row in rows(1.14, 1.0)] == [False]
    assert [row[-1] for row in rows(1.16, 1.0)] == [True]
    assert quick.compare({"W1": {}}, {"W1": {"jaxdp": 1.0}})[0][-1]  # it fell out
    assert quick.compare({}, {"W4": {"jaxdp": 1.0}}) == []  # it was not asked for
    capsys.readouterr()


@pytest.mark.parametrize("what", ["steps", "trainers"])
def test_memory_is_flat(what, capsys):
    assert memory.main([f"--{what}", "40"]) == 0
    assert "| 40 |" in capsys.readouterr().out


def test_a_leak_of_arrays_is_seen():
    work, watch = TOYS["W1"], memory.Watch(40)
    kept = []
    hoards = On(on_train_batch_end=lambda *_: kept.append(jnp.zeros(2)))
    model = models.build(work)
    trainer = on_one_device(hoards, watch, model=model, loss="mse")
    trainer.fit(work.batches(), max_steps=200)
    assert memory.growth(watch.samples)[1] > memory.GROWTH_ARRAYS


def test_a_part_over_its_time_limit_is_stopped(tmp_path, monkeypatch):
    assert sum(part.time_limit for part in gpu.PARTS.values()) <= 560
    monkeypatch.setitem(gpu.PARTS, "bits", gpu.Part("", 1))
    result = gpu.run("bits", tmp_path, {"device": "1 x H100"}, toy=True)
    assert result["failed"] == "not done within 1 seconds"
    assert json.loads((tmp_path / "bits.json").read_text()) == result


@pytest.mark.slow
def test_gpu_benchmark_runs_anywhere_at_toy_size(tmp_path, capsys):
    code = gpu.main(["--toy", "--output", str(tmp_path)])
    table = capsys.readouterr().out
    assert code == 0, table
    assert {path.stem for path in tmp_path.glob("*.json")} == {*gpu.PARTS}
    found = {
        part: json.loads((tmp_path / f"{part}.json").read_text())["found"]
        for part in gpu.PARTS
    }
    for name in steps.make_cases(toy=True):
        case = found["steps"][name]
        assert not case["not_run"]
        assert case["loss"]["jaxdp"] == pytest.approx(case["loss"]["expert"], 1e-3)
    hashes = {
        one[name]
        for one in (*found["bits"]["default"], *found["bits"]["run"])
        for name in ("one run", "resumed", "8 steps a dispatch")
    }
    assert len(hashes) == 1
    assert "| correct | ok | a scatter-add is right |" in table
    assert "| memory | 64 rows, after that | trained |" in table


@pytest.mark.parametrize("name", ["tiny", "lenet"])
def test_operations_are_those_that_xla_counts(name):
    work = steps.make_cases(toy=True)[name].work
    params, static = eqx.partition(models.build(work), eqx.is_inexact_array)

    def compute_loss(params, x, y):
        return models.mean_loss(eqx.combine(params, static), x, y, work.criterion)

    gradient = jax.jit(jax.grad(compute_loss))
    compiled = gradient.lower(params, *work.batches()[0]).compile()
    found = compiled.cost_analysis()["flops"]
    # XLA also counts activations, biases and the loss: much of a tiny model.
    assert 0.6 * found < steps.count_operations(work) < found
