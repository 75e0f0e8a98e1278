"""Durations, such as `max_time` and `train_time_interval`."""

import datetime

import pytest

from jaxdp.basics.arguments import parse_duration


@pytest.mark.parametrize("duration, seconds", [
    ("00:00:01:30", 90),
    ("01:02:03:04", 93784),
    (datetime.timedelta(hours=2), 7200),
    (12.5, 12.5),
    (0, 0),
])  # fmt: skip
def test_durations_are_read_in_every_form(duration, seconds):
    assert parse_duration(duration) == seconds


@pytest.mark.parametrize("duration, error, match", [
    *((wrong, ValueError, "`max_time` must be 0 or more.* or 'DD:HH:MM:SS'; got")
      for wrong in (-1, float("inf"), datetime.timedelta(-1))),
    *((wrong, TypeError, "`max_time` must be a number .* or 'DD:HH:MM:SS'; got")
      for wrong in ("8h", {"hours": 1}, [1], True)),
])  # fmt: skip
def test_other_durations_are_refused(duration, error, match):
    with pytest.raises(error, match=match):
        parse_duration(duration, "max_time")
