"""The principal of a Kerberos ticket cache."""

from __future__ import annotations

import struct
from pathlib import Path

from sparkhvd.errors import StoreError

_KIND = "FILE:"
_VERSIONS = (b"\x05\x03", b"\x05\x04")


def principal_of(cache: str) -> str:
    """Return the principal of a ticket cache, such as ``me@EXAMPLE.COM``.

    The format is MIT's, versions 3 and 4, as ``kinit`` writes it:
    https://web.mit.edu/kerberos/krb5-devel/doc/formats/ccache_file_format.html

    Args:
        cache: its path, with or without the prefix ``FILE:``.

    Raises:
        StoreError: the file cannot be read or is not a ticket cache.
    """
    path = Path(cache.removeprefix(_KIND))
    try:
        content = path.read_bytes()
    except OSError as error:
        raise StoreError(f"Cannot read the Kerberos ticket cache {path}: {error.strerror or error}.") from error
    if content[:2] not in _VERSIONS:
        raise StoreError(f"{path} is not a Kerberos ticket cache; pass the file that kinit -c wrote.")
    try:
        return _principal(content, 2 if content[:2] == _VERSIONS[0] else 4 + struct.unpack_from(">H", content, 2)[0])
    except (struct.error, UnicodeDecodeError) as error:
        raise StoreError(f"The Kerberos ticket cache {path} is damaged; write it again with kinit -c.") from error


def _principal(content: bytes, at: int) -> str:
    _, count = struct.unpack_from(">II", content, at)
    at += 8
    names = []
    for _ in range(count + 1):
        (length,) = struct.unpack_from(">I", content, at)
        (name,) = struct.unpack_from(f">{length}s", content, at + 4)
        names.append(name.decode())
        at += 4 + length
    realm, *parts = names
    return f"{'/'.join(parts)}@{realm}"
