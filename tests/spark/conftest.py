from __future__ import annotations

import pytest


@pytest.fixture(scope="module", autouse=True)
def _environment_of_ranks(request, tmp_path_factory):
    """Fork the ranks of a module from one warm process; importing the frameworks would take most of the time.

    A module whose tests need each rank to be a child of its task sets ``RANKS_ARE_CHILDREN``.

    torch makes the folder as soon as an optimizer is used, and keeps it for the life of the process.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARKHVD_WARM_SECONDS", "0" if hasattr(request.module, "RANKS_ARE_CHILDREN") else "60")
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("torchinductor")))
        yield
