from __future__ import annotations

import os

import pytest


@pytest.fixture(scope="session", autouse=True)
def _folder_for_compiled_code(tmp_path_factory: pytest.TempPathFactory) -> None:
    """torch creates this folder as soon as an optimizer is used, and keeps it for the life of the process."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path_factory.mktemp("torchinductor"))
