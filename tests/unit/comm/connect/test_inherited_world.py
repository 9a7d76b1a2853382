from __future__ import annotations

from dataclasses import replace

import pytest

from sparkhvd.comm.connect.commit_folder import CommitFolder
from sparkhvd.comm.connect.inherited_world import InheritedWorld, context_file, inherited_world
from sparkhvd.comm.connect.launch_context import LaunchContext, MembershipAddress
from sparkhvd.config import INHERITED_CONTEXT, Config
from sparkhvd.errors import LaunchError
from sparkhvd.store import S3Store
from sparkhvd.world import World

CONTEXT = LaunchContext(
    World(1, 3, 1, 2, 0, 2),
    (("10.0.0.1", 4711),),
    b"\x00secret\xff",
    "key",
    "10.0.0.2",
    Config(cache_capacity=7, thread_affinity=(1, 0)),
)


ELASTIC = replace(CONTEXT, membership=MembershipAddress(5, (("10.0.0.3", 4712), ("::1", 4712)), b"\x00other\xff"))


@pytest.mark.parametrize("context", [CONTEXT, ELASTIC])
def test_a_program_of_a_rank_inherits_its_world(monkeypatch, context):
    monkeypatch.setenv("SPARKHVD_TIMELINE", "old.json")
    with context_file(context) as path:
        assert "secret" not in path
        monkeypatch.setenv(INHERITED_CONTEXT, path)
        monkeypatch.setenv("HOROVOD_TIMELINE", "new.json")
        assert inherited_world() == InheritedWorld(context, {"SPARKHVD_TIMELINE": "old.json"})


def test_a_program_of_a_rank_inherits_where_commits_are_published(monkeypatch):
    store = S3Store("s3://bucket/commits", storage_options={"secret": "a word"})
    with context_file(ELASTIC, CommitFolder(store, "commits/7", 0.5)) as path:
        monkeypatch.setenv(INHERITED_CONTEXT, path)
        commits = inherited_world().commits
    assert (commits.folder, commits.interval, commits.store.url) == ("commits/7", 0.5, store.url)
    assert dict(commits.store.storage_options) == {"secret": "a word"}


def test_a_program_outside_a_rank_inherits_no_world(monkeypatch):
    monkeypatch.delenv(INHERITED_CONTEXT, raising=False)
    assert inherited_world() is None


def test_a_program_that_outlives_its_rank_gets_an_error(monkeypatch):
    with context_file(CONTEXT) as path:
        monkeypatch.setenv(INHERITED_CONTEXT, path)
    with pytest.raises(LaunchError, match="rank that started this program has ended"):
        inherited_world()
