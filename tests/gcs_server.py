"""A Google Cloud Storage server for the tests: an emulator in a separate process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

BUCKET = "sparkhvd-tests"


@contextmanager
def running_gcs() -> Iterator[dict[str, Any]]:
    """Run a server on a free port and yield the storage options for it."""
    process = subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        assert process.stdout is not None
        yield {"endpoint_url": json.loads(process.stdout.readline()), "token": "anon"}
    finally:
        process.kill()
        process.communicate(timeout=60)


def _serve() -> None:
    """Serve until stdin is closed, which also happens when the test process dies."""
    import threading  # noqa: PLC0415
    from functools import partial  # noqa: PLC0415
    from http import HTTPStatus  # noqa: PLC0415
    from http.server import HTTPServer  # noqa: PLC0415

    from gcp_storage_emulator.exceptions import NotFound  # noqa: PLC0415
    from gcp_storage_emulator.handlers import buckets  # noqa: PLC0415
    from gcp_storage_emulator.server import RequestHandler  # noqa: PLC0415
    from gcp_storage_emulator.storage import Storage  # noqa: PLC0415

    class ExistsError(Exception):
        pass

    class Files(Storage):
        """Rejects writes to existing files while ``only_new`` is set: the emulator ignores ``ifGenerationMatch``."""

        only_new = False

        def create_file(self, bucket: str, name: str, *content: Any) -> None:
            if self.only_new:
                try:
                    self.get_file_obj(bucket, name)
                except NotFound:
                    pass
                else:
                    raise ExistsError
            super().create_file(bucket, name, *content)

    class Handler(RequestHandler):
        def do_POST(self) -> None:  # noqa: N802
            files.only_new = "ifGenerationMatch=0" in self.path  # the server handles one request at a time
            try:
                super().do_POST()
            except ExistsError:
                self.send_error(HTTPStatus.PRECONDITION_FAILED)

    files = Files(use_memory_fs=True)
    buckets.create_bucket(BUCKET, files)
    server = HTTPServer(("127.0.0.1", 0), partial(Handler, files))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(json.dumps(f"http://127.0.0.1:{server.server_port}"), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    _serve()
