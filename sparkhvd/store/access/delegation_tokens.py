"""The lookup of a name node's delegation token in Hadoop's token file, for the HDFS client."""

from __future__ import annotations

import socket
from contextlib import suppress
from pathlib import Path


def name_with_token(authority: str, token_file: str | None) -> str:
    """Return ``host:port`` of a name node in the form that has a token in the file: unchanged, or with its address.

    Hadoop's tokens name a single name node by its address (``hadoop.security.token.service.use_ip``), and the client
    only accepts a token for exactly the name that it connects to. Name services have no port and keep their names.

    Args:
        authority: the authority of the URL.
        token_file: the value of ``HADOOP_TOKEN_FILE_LOCATION``.
    """
    host, _, port = authority.rpartition(":")
    if token_file is None or not host or not port.isdigit():
        return authority
    with suppress(OSError):  # no such file or host: the client reports the consequence
        tokens = Path(token_file).read_bytes()
        resolved = socket.getaddrinfo(host, int(port), socket.AF_INET, socket.SOCK_STREAM)
        for name in (authority, *(f"{address[0]}:{port}" for *_, address in resolved)):
            # In both formats of the file, a string follows its length.
            if bytes([len(name)]) + name.encode() in tokens:
                return name
    return authority
