from __future__ import annotations

import subprocess
import sys

import pytest

from sparkhvd.errors import StoreError
from sparkhvd.store import Store, registry
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
def test_the_scheme_of_a_url(url, scheme):
    assert scheme_of(url) == scheme


def test_a_scheme_that_nothing_serves_is_refused():
    with pytest.raises(StoreError, match=r"Nothing serves nosuch:// here: Protocol not known: nosuch"):
        Store.create("nosuch://x/y")


def test_a_file_system_whose_package_is_missing_says_what_to_install():
    with pytest.raises(StoreError, match=r"Nothing serves gs:// here: Please install gcsfs"):
        Store.create("gs://bucket/x")


def test_an_option_that_a_store_does_not_take_is_refused(tmp_path):
    with pytest.raises(StoreError, match=r"does not take these options: .*'colour'"):
        Store.create(str(tmp_path), colour="blue")


def test_a_backend_that_cannot_be_imported_says_what_to_install(monkeypatch):
    entry = StoreEntry("sparkhvd.store.not_there:Store", "Install it: pip install 'sparkhvd[x]'.")
    monkeypatch.setattr(registry, "STORES", {"x": entry})
    with pytest.raises(StoreError, match=r"Store for x:// needs .*pip install 'sparkhvd\[x\]'"):
        Store.create("x://y")


def test_importing_store_and_data_loads_neither_spark_nor_arrow():
    code = (
        "import sys; from sparkhvd.store import Store, LocalStore; "
        "from sparkhvd.data import ParquetSource, Manifest, Plan, select, load, head, DataSchema; "
        "import sparkhvd.data.prepare; "
        "print([name for name in ('pyspark', 'pyarrow', 'pandas', 'torch') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
