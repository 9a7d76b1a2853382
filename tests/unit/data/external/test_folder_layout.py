from __future__ import annotations

import pytest

from sparkhvd.data.external.folder_layout import partition_columns, shown_files


@pytest.mark.parametrize(
    ("files", "shown"),
    [
        (["a.parquet", "_b.parquet", ".c.parquet", "_SUCCESS", ".a.parquet.crc", "_metadata"], ["a.parquet"]),
        (["_x=1.parquet", "b.parquet._COPYING_"], ["_x=1.parquet"]),
        (["_p=0/a", "p=1/b", ".p=2/c", "_p/d", "_metadata/e"], ["_p=0/a", "p=1/b"]),
        (["p=0/_q/a", "p=0/_q=1/b", "p=0/plain/c"], ["p=0/_q=1/b", "p=0/plain/c"]),
        (["root", "p=0/a"], ["p=0/a"]),
        (["root", "plain/a", "plain/deep/b"], ["root"]),
        (["plain/a", "plain/deep/b", "_hidden/c"], ["plain/a", "plain/deep/b"]),
        ([""], [""]),
        (["_SUCCESS"], []),
    ],
)
def test_files_that_spark_ignores_are_left_out(files, shown):
    assert shown_files(files) == shown


def test_columns_of_folders_have_their_own_names():
    assert partition_columns(["a=1/b=x%2Fy/f", "a=2/b=3/c=4.parquet", "plain/f"]) == {"a", "b"}
    assert partition_columns(["x%3Ay=1/f"]) == {"x:y"}
