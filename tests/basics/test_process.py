"""Programs that are kept on disk for later starts."""

import os
import time

from jaxdp.basics.process import sweep_cache


def test_programs_are_deleted_after_a_month(tmp_path):
    for age_in_days in (0, 29, 31):
        path = tmp_path / str(age_in_days)
        path.touch()
        os.utime(path, (time.time() - 24 * 3600 * age_in_days,) * 2)
    sweep_cache(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["0", "29"]
