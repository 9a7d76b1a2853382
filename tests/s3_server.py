"""An S3 server for the tests: moto's server in a separate process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

BUCKET = "sparkhvd-tests"
SECRET = "the-secret-key-of-the-tests"


@dataclass(frozen=True)
class S3:
    """A running server with one bucket.

    Attributes:
        endpoint: its URL.
        options: the storage options for it.
    """

    endpoint: str
    options: dict[str, Any] = field(repr=False)


def options_for(endpoint: str) -> dict[str, Any]:
    """Return the storage options for a server at this URL."""
    return {
        "key": "the-access-key",
        "secret": SECRET,
        "endpoint_url": endpoint,
        "client_kwargs": {"region_name": "us-east-1"},
        "config_kwargs": {"s3": {"addressing_style": "path"}},
    }


@contextmanager
def running_s3(python: str = sys.executable, address: str = "127.0.0.1") -> Iterator[S3]:
    """Run a server on a free port of an address, in a Python that has moto."""
    process = subprocess.Popen(
        [python, __file__, address], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        assert process.stdout is not None
        endpoint = json.loads(process.stdout.readline())["endpoint"]
        yield S3(endpoint, options_for(endpoint))
    finally:
        process.kill()
        process.communicate(timeout=60)


def _serve(address: str) -> None:
    """Serve until stdin is closed, which also happens when the tests die."""
    import threading  # noqa: PLC0415

    import boto3  # noqa: PLC0415
    from moto.server import DomainDispatcherApplication, create_backend_app  # noqa: PLC0415
    from werkzeug.serving import make_server  # noqa: PLC0415

    application = DomainDispatcherApplication(create_backend_app)
    one_at_a_time = threading.Lock()

    def serve(environ: dict[str, Any], start_response: Any) -> Any:
        # S3 decides a conditional write atomically, but moto checks first and writes afterwards.
        if "HTTP_IF_NONE_MATCH" in environ and environ["REQUEST_METHOD"] in {"PUT", "POST"}:
            with one_at_a_time:
                return list(application(environ, start_response))
        return application(environ, start_response)

    server = make_server(address, 0, serve, threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    options = options_for(f"http://{address}:{server.port}")
    client = boto3.client(
        "s3",
        endpoint_url=options["endpoint_url"],
        region_name="us-east-1",
        aws_access_key_id=options["key"],
        aws_secret_access_key=options["secret"],
    )
    client.create_bucket(Bucket=BUCKET)
    print(json.dumps({"endpoint": options["endpoint_url"]}), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    _serve(sys.argv[1])
