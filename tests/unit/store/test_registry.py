from __future__ import annotations

import os
import subprocess
import sys

import pytest

from sparkhvd.errors import StoreError
from sparkhvd.store import FilesystemStore, HDFSStore, LocalStore, Store, registry
from sparkhvd.store.registry import StoreEntry, scheme_of


@pytest.mark.parametrize(
    ("url", "scheme"),
    [
        ("/a", "file"),
        ("a/b", "file"),
        ("file:///a", "file"),
        ("S3://b/k", "s3"),
        ("hdfs:///x", "hdfs"),
        ("a:b", "file"),
    ],
)
def test_the_scheme_of_a_url_is_recognized_and_a_path_is_a_file(url, scheme):
    assert scheme_of(url) == scheme


def test_a_scheme_without_a_file_system_is_refused():
    listed = r"No file system serves nosuch:// URLs: Protocol not known: nosuch\. Common schemes are file, s3, hdfs, "
    with pytest.raises(StoreError, match=listed):
        Store.create("nosuch://x/y")
    with pytest.raises(StoreError, match=r"No file system serves s4:// URLs: .*\. Did you mean s3://\?"):
        Store.create("s4://bucket/x")


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("gs://bucket/x", r"\(Please install gcsfs to access .*\)\. Install it: pip install 'gcsfs>=2024\.12'\."),
        ("abfss://c@a.dfs.core.windows.net/x", r"\(.*: abfss\)\. Install it: pip install 'adlfs>=2024\.12'\."),
        ("dvc://x", r"\(Install dvc to access DVCFileSystem\)\."),
    ],
)
def test_a_missing_package_of_a_file_system_is_named(url, reason, monkeypatch):
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(StoreError, match=rf"^The Store for \w+:// needs a package that is not installed {reason}$"):
        Store.create(url)


@pytest.mark.parametrize(("name", "package"), [("S3Store", "s3"), ("HDFSStore", "hdfs")])
def test_a_missing_package_of_a_store_class_is_named(name, package, tmp_path):
    for module in ("s3fs", "hdfs_native"):
        (tmp_path / f"{module}.py").write_text("raise ModuleNotFoundError('No module named here')")
    code = f"from sparkhvd.store import {name}"
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1].endswith(f": pip install 'sparkhvd[{package}]'."), done.stderr


def test_a_url_of_a_store_that_is_not_a_string_is_refused(tmp_path):
    with pytest.raises(StoreError, match=r"^The URL of a Store must be a string, got PosixPath .*Pass it as str\("):
        Store.create(tmp_path)


def test_an_unknown_option_of_a_store_is_refused(tmp_path):
    with pytest.raises(StoreError, match=r"does not accept these options: .*'colour'"):
        Store.create(str(tmp_path), colour="blue")


def test_a_local_store_accepts_only_empty_storage_options(tmp_path):
    for none in (None, {}):
        assert Store.create(str(tmp_path), storage_options=none) == LocalStore(str(tmp_path))
    with pytest.raises(StoreError, match=r"^A LocalStore does not accept storage_options, got key\. Leave"):
        Store.create(str(tmp_path), storage_options={"key": "secret"})


def test_options_of_horovods_stores_without_a_counterpart_are_refused_by_name():
    with pytest.raises(StoreError, match=r"'/path' is not a URL; .*For a path use LocalStore"):
        FilesystemStore("/path")
    for arguments, named in [((None,) * 4 + ("libhdfs",), {}), ((), {"driver": "libhdfs"})]:
        with pytest.raises(StoreError, match="HDFSStore does not support driver='libhdfs'"):
            HDFSStore("/x", *arguments, **named)


def test_a_file_system_without_an_exclusive_write_is_read_only(tmp_path):
    # fsspec writes local files by the same generic method as files on SFTP, FTP and SMB.
    (tmp_path / "rows.txt").write_bytes(b"there before")
    store = FilesystemStore(f"local://{tmp_path}")
    message = rf"^There cannot be a Store at local://{tmp_path}: LocalFileSystem has no exclusive write, so two jobs .*"
    with pytest.raises(StoreError, match=message):
        store.publish("runs/claim", b"1")
    with pytest.raises(StoreError, match=message), store.open("runs/model", "wb") as file:
        file.write(b"2")
    assert store.list("") == ["rows.txt"]
    with store.open("rows.txt", "rb") as file:
        assert file.read() == b"there before"


def test_a_backend_that_cannot_be_imported_names_the_package_to_install(monkeypatch):
    entry = StoreEntry("sparkhvd.store.not_there:Store", "Install it: pip install 'sparkhvd[x]'.")
    monkeypatch.setattr(registry, "STORES", {"x": entry})
    with pytest.raises(StoreError, match=r"Store for x:// needs .*pip install 'sparkhvd\[x\]'"):
        Store.create("x://y")


def test_importing_store_and_data_loads_neither_spark_nor_arrow():
    code = (
        "import sys; from sparkhvd.store import Store, LocalStore; "
        "from sparkhvd.data import ParquetSource, Manifest, Plan, select, load, head, DataSchema; "
        "import sparkhvd.data.prepare.prepare; "
        "print([name for name in ('pyspark', 'pyarrow', 'pandas', 'torch') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


_LAKE = """
from sparkhvd.store import LocalStore


class LakeStore(LocalStore):
    def __init__(self, url, depth=1):
        super().__init__(f"{url.removeprefix('lake://')}/{depth}")
"""


def test_another_package_adds_the_store_of_a_scheme(install, tmp_path):
    with pytest.raises(StoreError, match="No file system serves lake:// URLs"):
        Store.create(f"lake://{tmp_path}")
    install(_LAKE, "sparkhvd.stores", "lake = added_package:LakeStore")
    lake = Store.create(f"lake://{tmp_path}", depth=3)
    assert (type(lake).__name__, lake.url) == ("LakeStore", LocalStore(f"{tmp_path}/3").url)
    assert type(Store.create(str(tmp_path))) is LocalStore


def test_the_error_for_a_missing_package_of_an_added_store_names_its_entry_point(install):
    install("import nothing_of_this_name", "sparkhvd.stores", "lake = added_package:LakeStore")
    with pytest.raises(StoreError, match=r"nothing_of_this_name.*The entry point 'lake' of sparkhvd\.stores names it"):
        Store.create("lake://a/b")


@pytest.mark.parametrize("url", ["http://host/folder", "https://host/folder"])
def test_http_is_refused_at_once(url):
    with pytest.raises(StoreError, match="HTTP servers take no files"):
        Store.create(url)


def test_fsspecs_own_scheme_for_local_folders_is_refused_with_the_right_url(tmp_path):
    with pytest.raises(StoreError, match=rf"Pass file://{tmp_path} instead"):
        Store.create(f"local://{tmp_path}")
