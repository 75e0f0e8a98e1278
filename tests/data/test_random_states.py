"""States of random generators, kept as JSON."""

import json

import pytest

torch = pytest.importorskip("torch")

from jaxdp.data.random_states import set_states, states_of  # noqa: E402


def draw(generator, count):
    return int(torch.randint(count, (), generator=generator))


def test_states_of_generators_survive_json():
    parts = {"a": torch.Generator().manual_seed(3)}
    draw(parts["a"], 10)
    saved = json.loads(json.dumps(states_of(parts)))
    expected = [draw(parts["a"], 10**6) for _ in range(700)]
    set_states(parts, saved)
    assert [draw(parts["a"], 10**6) for _ in range(700)] == expected
