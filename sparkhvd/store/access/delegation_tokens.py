"""How the client of HDFS finds the delegation token of a name node in Hadoop's token file."""

from __future__ import annotations

import socket
from contextlib import suppress
from pathlib import Path


def name_with_token(authority: str, token_file: str | None) -> str:
    """``host:port`` of a name node, by the address that a token is for, where there is one.

    Hadoop's tokens name a single name node by its address (``hadoop.security.token.service.use_ip``), and the client
    only takes one that names the node as it was given. Name services, which have no port, go by their names.

    Args:
        authority: of the URL.
        token_file: what ``HADOOP_TOKEN_FILE_LOCATION`` says.
    """
    host, _, port = authority.rpartition(":")
    if token_file is None or not host or not port.isdigit():
        return authority
    with suppress(OSError):  # no such file, no such host: the client says what follows from it
        tokens = Path(token_file).read_bytes()
        found = socket.getaddrinfo(host, int(port), socket.AF_INET, socket.SOCK_STREAM)
        for name in (authority, *(f"{address[0]}:{port}" for *_, address in found)):
            # In both of the file's formats a text comes after its length.
            if bytes([len(name)]) + name.encode() in tokens:
                return name
    return authority
