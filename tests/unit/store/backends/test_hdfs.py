from __future__ import annotations

from types import SimpleNamespace

from sparkhvd.store import HDFSStore

CHILDREN = {"/store": ["/store/removed", "/store/kept", "/store/file"], "/store/kept": ["/store/kept/file"]}


class NameNode:
    """A client of an HDFS on which another process removes the folder ``/store/removed`` during every listing."""

    def list_status(self, path, recursive):
        if recursive:
            raise FileNotFoundError("/store/removed")
        if path not in CHILDREN:
            raise FileNotFoundError(path)
        return [SimpleNamespace(path=child, isdir=not child.endswith("file")) for child in CHILDREN[path]]


def test_a_folder_that_vanishes_during_a_listing_does_not_hide_other_files(monkeypatch):
    filesystem = SimpleNamespace(client=NameNode(), async_impl=False)
    monkeypatch.setattr(HDFSStore, "_filesystem", lambda _store: filesystem)
    store = HDFSStore("hdfs://name/store")
    assert store.list("") == ["file", "kept/file"]
    assert store.list("kept") == ["kept/file"]
    assert store.list("removed") == []
