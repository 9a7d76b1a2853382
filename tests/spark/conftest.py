from __future__ import annotations

import pytest


@pytest.fixture(scope="module", autouse=True)
def _folder_for_compiled_code(tmp_path_factory):
    """torch makes this folder as soon as an optimizer is used, and keeps it for the life of the process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("torchinductor")))
        yield
