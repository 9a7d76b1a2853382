"""Delegation tokens of a real name node give other users access to the private files of their owner."""

from __future__ import annotations

import uuid

import pytest

from sparkhvd.errors import StoreError
from sparkhvd.store import HDFSStore, Store
from sparkhvd.store.access.delegation_tokens import name_with_token
from tests.hadoop import START_SECONDS, start_daemon

KERBEROS = {"hadoop.security.authentication": "kerberos"}  # clients look for tokens only with this setting
_FETCHER = "org.apache.hadoop.hdfs.tools.DelegationTokenFetcher"


@pytest.fixture(scope="module")
def token(hdfs, tmp_path_factory):
    """Return the file of a token that the name node issued to alice."""
    folder = tmp_path_factory.mktemp("tokens")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("HADOOP_USER_NAME", "alice")
        fetcher = start_daemon(hdfs.conf, _FETCHER, folder / "log", str(folder / "token"))
    assert fetcher.wait(START_SECONDS) == 0, (folder / "log").read_text()
    return folder / "token"


@pytest.fixture
def private_url(hdfs, monkeypatch):
    """Return the URL of a folder that only alice may read, and become another user."""
    url = f"{hdfs.url}/{uuid.uuid4().hex}"
    store = Store.create(url)
    store.publish("x", b"alice's")
    client, folder = store._filesystem().client, store._folders.root
    for path in (f"{folder}/x", folder):
        client.set_owner(path, "alice", "staff")
    client.set_permission(folder, 0o700)
    store._connection.close()
    monkeypatch.setenv("HADOOP_USER_NAME", "somebody")
    return url


def content_of(url, settings=KERBEROS):
    store = Store.create(url, storage_options=settings, retry_seconds=2)
    try:
        with store.open("x", "rb") as file:
            return file.read()
    finally:
        store._connection.close()


def test_a_token_gives_access_to_the_files_of_its_owner(private_url, token, monkeypatch):
    with pytest.raises(StoreError, match="Permission denied: user=somebody"):
        content_of(private_url)
    monkeypatch.setenv("HADOOP_TOKEN_FILE_LOCATION", str(token))
    assert content_of(private_url) == b"alice's"
    with pytest.raises(StoreError, match="Permission denied: user=somebody"):
        content_of(private_url, {})  # without Kerberos, the client does not use the token


def test_a_token_is_found_when_the_name_node_is_addressed_by_its_host_name(private_url, token, monkeypatch):
    monkeypatch.setenv("HADOOP_TOKEN_FILE_LOCATION", str(token))
    by_host = private_url.replace("127.0.0.1", "localhost")
    assert content_of(by_host) == b"alice's"
    server, _, folder = by_host.rpartition("/")
    by_default = HDFSStore(f"/{folder}", extra_conf={**KERBEROS, "fs.defaultFS": server})
    assert by_default.list("") == ["x"]
    assert by_default.url == f"hdfs:///{folder}"
    by_default._connection.close()


def test_files_are_written_as_the_owner_of_the_token(private_url, token, monkeypatch):
    monkeypatch.setenv("HADOOP_TOKEN_FILE_LOCATION", str(token))
    store = Store.create(private_url, storage_options=KERBEROS)
    store.publish("y", b"1")
    assert store._filesystem().client.get_file_info(f"{store._folders.root}/y").owner == "alice"
    store._connection.close()


def test_a_token_with_a_wrong_password_is_refused_without_retries(private_url, token, monkeypatch, tmp_path):
    content = bytearray(token.read_bytes())
    content[content.index(b"HDFS_DELEGATION_TOKEN") - 5] ^= 255  # the last byte of the token's password
    (tmp_path / "token").write_bytes(bytes(content))
    monkeypatch.setenv("HADOOP_TOKEN_FILE_LOCATION", str(tmp_path / "token"))
    with pytest.raises(StoreError, match=r"Cannot open hdfs://.*/x: .*DIGEST-MD5") as caught:
        content_of(private_url)
    assert "attempts" not in str(caught.value)


def test_a_host_name_is_kept_unless_a_token_was_issued_for_its_address(tmp_path):
    tokens = tmp_path / "tokens"
    tokens.write_bytes(b"HDTS\x0e127.0.0.1:8020")
    assert name_with_token("localhost:8020", str(tokens)) == "127.0.0.1:8020"
    for name in ("localhost:802", "service", "", "no-such-host.invalid:8020"):
        assert name_with_token(name, str(tokens)) == name
    assert name_with_token("localhost:8020", str(tmp_path / "gone")) == "localhost:8020"
    assert name_with_token("localhost:8020", None) == "localhost:8020"
