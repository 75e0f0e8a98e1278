import os

import pytest

from jaxdp.supervisor import channel, leftovers
from jaxdp.supervisor.channel import open_channel
from jaxdp.supervisor.child import VARIABLE


@pytest.fixture
def supervised(tmp_path, monkeypatch):
    """As in a process that a supervisor has started; its folder."""
    path = leftovers.root_in(str(tmp_path)) / "session-0"
    path.mkdir()
    open_channel(str(path), every=4, deadman=60.0)
    settings = (path / "settings.json").read_text()
    ours, parents = f'"parent": {os.getpid()}', f'"parent": {os.getppid()}'
    (path / "settings.json").write_text(settings.replace(ours, parents))
    monkeypatch.setenv(VARIABLE, str(path))
    channel.cache_clear()
    yield path
    channel.cache_clear()
