from __future__ import annotations

import pytest


@pytest.fixture(scope="module", autouse=True)
def _environment_of_ranks(tmp_path_factory):
    """Fork the ranks of a module from one warm process; importing the frameworks would take most of the time.

    torch makes the folder as soon as an optimizer is used, and keeps it for the life of the process.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARKHVD_WARM_SECONDS", "60")
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("torchinductor")))
        yield
