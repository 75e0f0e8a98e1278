"""Processes that are about to do different things: an error in all that says what."""

import re

import pytest

pytest.importorskip("torch")

import tasks

DIFFERENT = {
    "seed": ({"seed": 1}, "`seed`: 0 (process 0), 1 (process 1)"),
    "model": (
        {"width": 9},
        "the model's first.weight: float32[8, 4] (process 0), float32[9, 4] (process 1",
    ),
    "weights": ({"key": 1}, "the bits of the model's first.weight: "),
    "loss": ({"loss": tasks.half}, "the compiled programs: "),
    "rows": (
        {"batch": 16, "rows": 128},
        "rows of a train batch: 8 (process 0), 16 (process 1)",
    ),
    "length": (
        {"rows": 48},
        "its number of batches: 8 (process 0), 6 (process 1)",
    ),
}


@pytest.mark.slow
def test_different_scripts_are_found_at_the_start_of_a_fit(crew):
    cases = {name: {"other": other} for name, (other, _) in DIFFERENT.items()}
    outputs = crew("fit_in_turn", cases=cases | {"none": {}}).finish()
    for output in outputs:
        told = dict(re.findall(r"^case (\w+)\n(.*?)(?=^case |\Z)", output, re.M | re.S))
        for name, (_, text) in DIFFERENT.items():
            assert text in told[name]
            assert "done 1\n" not in told[name]
        assert "ended 16 " in told["none"]  # they can go on together


def test_other_versions_are_named(crew):
    outputs = crew("fit", start={"versions": {1: {"jax": "0.1.2"}}}).finish(1)
    for output in outputs:
        assert re.search(r"the version of jax: \S+ \(process 0\), 0.1.2 \(proc", output)


@pytest.mark.slow
def test_evaluations_that_differ_are_found(crew):
    outputs = crew("evaluate_apart").finish()
    for output in outputs:
        found = re.findall(r"^found .*what is next: (.*?)\. Their", output, re.M)
        assert found == [
            "the start of test (process 0), the start of predict (process 1)",
            "batch 5 of test (process 0), the end of test (process 1)",
            "batch 5 of predict (process 0), the end of predict (process 1)",
        ]
    # And they can go on together.
    ends = [re.findall("test_loss .*", output) for output in outputs]
    assert ends[0] == ends[1] != []


@pytest.mark.slow
def test_who_waits_for_whom_is_said(crew):
    outputs = crew(
        "fit", at=(1, 5, tasks.linger), lockstep={"warn_after": 3.0}
    ).finish()
    # Process 0 may wait at the end of its step, or at the next one.
    told = r"process 0 \(step [56] of epoch 0\) has waited for 3 s for process 1"
    assert re.search(told, outputs[0])
    assert "has waited" not in outputs[1]


@pytest.mark.slow
def test_meeting_rarely_is_enough_to_find_it(crew):
    outputs = crew("fit", at=(1, 5, tasks.skip), lockstep={"every_n_steps": 4}).finish(
        1
    )
    for output in outputs:
        assert "do not agree: what is next: " in output
