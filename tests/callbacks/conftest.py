"""A clock that only tests turn."""

import time

import pytest


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 0.0

        def turn(self, seconds=1.0):
            self.now += seconds

    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    return clock
