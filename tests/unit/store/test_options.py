from __future__ import annotations

import pickle
import traceback

import pytest

from sparkhvd.data import torch_loader
from sparkhvd.data.external.locate import Access, locate
from sparkhvd.errors import StoreError
from sparkhvd.store import FilesystemStore, HDFSStore, S3Store, Store
from sparkhvd.store.backends.s3 import storage_options_from
from sparkhvd.store.options import StorageOptions, refuse_credentials

SECRETS = {"secret": "hunter22", "client_kwargs": {"aws_session_token": "a-long-token"}, "endpoint_url": "http://x:1"}


def test_secret_values_are_hidden_but_survive_pickling():
    options = StorageOptions(SECRETS)
    assert repr(options) == "StorageOptions(client_kwargs, endpoint_url, secret; values not shown)"
    assert f"{options}" == repr(options)
    assert pickle.loads(pickle.dumps(options)) == options
    assert dict(options) == SECRETS


def test_secrets_are_removed_from_texts():
    options = StorageOptions(SECRETS)
    assert options.scrubbed("hunter22 a-long-token http://x:1") == "*** *** http://x:1"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("s3://key:hunter22@bucket/x", r"s3://\*\*\*@bucket/x has"),
        ("s3a://key:hunter22/and/more@bucket/x", r"s3a://\*\*\*@bucket/x has"),
        ("s3://key:hunter22/x", r"s3://\*\*\* has"),
        ("simplecache::s3://key:hunter22@bucket/x", r"s3://\*\*\*@bucket/x has"),
        ("zip://x/y::s3://key:hunter22@bucket/x", r"s3://\*\*\*@bucket/x has"),
        ("hdfs://me:hunter22@namenode:8020/x", r"hdfs://\*\*\*@namenode:8020/x has"),
    ],
)
def test_a_url_with_credentials_in_it_is_refused_without_showing_them(url, shown):
    for use in (Store.create, FilesystemStore, lambda url: locate([url], Access()), lambda url: torch_loader(url, 1)):
        with pytest.raises(StoreError, match=rf"^{shown} credentials in it, which logs and messages") as caught:
            use(url)
        assert "hunter22" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize(
    "url",
    ["abfss://container@account.dfs.core.windows.net/x", "hdfs://namenode:8020/a:b@c", "hdfs://[::1]:8020/x", "/a:b@c"],
)
def test_texts_that_resemble_credentials_are_not_refused(url):
    refuse_credentials(url)


def test_an_error_omits_a_cause_with_a_secret():
    store = FilesystemStore("memory://x", storage_options=SECRETS)

    def fail(_):
        raise ValueError("the connection string AccountKey=hunter22 is malformed")

    with pytest.raises(StoreError, match=r"Cannot list memory:///x: the connection string AccountKey=\*\*\*") as caught:
        store._do("list", "/x", fail)
    assert "hunter22" not in "".join(traceback.format_exception(caught.value))


def test_the_authentication_method_is_not_a_secret():
    options = StorageOptions({"hadoop.security.authentication": "kerberos", "headers": {"Authorization": "Bearer"}})
    assert options.scrubbed("no kerberos ticket for the Bearer") == "no kerberos ticket for the ***"


def test_an_existing_file_is_reported_even_if_the_traceback_contains_a_secret():
    store = FilesystemStore("memory://exists", storage_options={"password": "FileExistsError"})
    store.publish("x", b"first")
    with pytest.raises(StoreError, match="it exists already, and published files are never changed") as caught:
        store.publish("x", b"second")
    assert "FileExistsError" not in "".join(traceback.format_exception(caught.value))


def test_a_chain_of_file_systems_is_refused():
    with pytest.raises(StoreError, match="chains file systems, but a Store uses only one"):
        FilesystemStore("simplecache::memory://x")


@pytest.mark.parametrize("path", ["", "user/x", "s3://bucket/x", "file:///x", "/"])
def test_invalid_hdfs_urls_are_refused(path):
    if path == "/":
        assert HDFSStore(path).url == "hdfs://"
        return
    with pytest.raises(StoreError, match="is not a folder on HDFS"):
        HDFSStore(path)


@pytest.mark.parametrize(
    ("arguments", "url"),
    [
        (("/user/x",), "hdfs:///user/x"),
        (("hdfs:///user/x/",), "hdfs:///user/x"),
        (("hdfs:/user/x",), "hdfs:///user/x"),
        (("HDFS://nn:8020/user/x",), "hdfs://nn:8020/user/x"),
        (("hdfs://service/user/x",), "hdfs://service/user/x"),
        (("/user/x", "nn", 8020), "hdfs://nn:8020/user/x"),
        (("/user/x", "default", 0), "hdfs:///user/x"),
        (("hdfs://nn:1/user/x", "other", 2), "hdfs://other:2/user/x"),
    ],
)
def test_hdfs_accepts_horovods_arguments(arguments, url):
    store = HDFSStore(*arguments)
    assert store.url == url
    assert store.spark_url("a") == f"{url}/a"


def test_settings_of_hadoop_are_kept_for_the_client_and_for_spark():
    store = HDFSStore("/x", kerb_ticket="/tmp/ticket", extra_conf={"dfs.ha.namenodes.a": "b"})
    assert store.spark_options() == {"dfs.ha.namenodes.a": "b"}
    completed = store.with_spark_settings(
        {"dfs.ha.namenodes.a": "c", "fs.defaultFS": "hdfs://a", "dfs.replication": "2"}
    )
    assert completed.spark_options() == {"dfs.ha.namenodes.a": "b", "fs.defaultFS": "hdfs://a"}
    assert completed.url == store.url
    assert store.with_spark_settings({"fs.defaultFS": "file:///"}) == store


def test_paths_on_two_file_systems_are_refused():
    with pytest.raises(StoreError, match=r"must be on one file system, got hdfs://a:1 and hdfs://b:1"):
        HDFSStore(train_path="hdfs://a:1/x", val_path="hdfs://b:1/x")


def test_paths_without_a_common_folder_need_a_prefix():
    with pytest.raises(StoreError, match="have no folder in common"):
        S3Store(train_path="s3://a/x", val_path="s3://b/x")
    with pytest.raises(StoreError, match="needs a folder: set prefix_path"):
        S3Store()


@pytest.mark.parametrize("url", ["s3://", "s3:///", "gs://bucket/x", "bucket/x"])
def test_invalid_s3_urls_are_refused(url):
    with pytest.raises(StoreError, match="is not a folder on S3"):
        S3Store(url)


def test_all_schemes_of_s3_are_equivalent():
    assert S3Store("s3a://b/x") == S3Store("s3n://b/x/") == S3Store("s3://b/x")
    assert S3Store("s3://b/x").spark_url("y") == "s3a://b/x/y"


def test_s3fs_and_hadoop_get_equivalent_options():
    options = {
        "key": "k",
        "secret": "s",
        "token": "t",
        "endpoint_url": "http://host:1",
        "client_kwargs": {"region_name": "eu-west-1"},
        "config_kwargs": {"s3": {"addressing_style": "path"}},
    }
    settings = S3Store("s3://b.c/x", storage_options=options).spark_options()
    assert settings["fs.s3a.bucket.b.c.session.token"] == "t"
    assert storage_options_from(settings, "b.c") == options
    assert storage_options_from(settings, "b") == {}
    anonymous = S3Store("s3://b/x", storage_options={"anon": True}).spark_options()
    assert storage_options_from(anonymous, "b") == {"anon": True}


def test_an_endpoint_without_a_scheme_takes_it_from_sparks_setting():
    settings = {"fs.s3a.endpoint": "host:1", "fs.s3a.connection.ssl.enabled": "false"}
    assert storage_options_from(settings, "b") == {"endpoint_url": "http://host:1"}
    assert storage_options_from({"fs.s3a.endpoint": "host"}, "b") == {"endpoint_url": "https://host"}


SAID_BY_SPARK = {
    "fs.s3a.access.key": "spark's",
    "fs.s3a.secret.key": "spark's",
    "fs.s3a.session.token": "spark's",
    "fs.s3a.endpoint": "http://spark:1",
    "fs.s3a.endpoint.region": "spark's",
}
SPARKS_KEYS = {"key": "spark's", "secret": "spark's", "token": "spark's"}
SPARKS_REGION = {"client_kwargs": {"region_name": "spark's"}}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {**SPARKS_KEYS, "endpoint_url": "http://spark:1", **SPARKS_REGION}),
        ({"endpoint_url": "http://mine:1"}, {**SPARKS_KEYS, "endpoint_url": "http://mine:1", **SPARKS_REGION}),
        ({"key": "a", "secret": "b"}, {"key": "a", "secret": "b", "endpoint_url": "http://spark:1", **SPARKS_REGION}),
        ({"anon": True}, {"anon": True, "endpoint_url": "http://spark:1", **SPARKS_REGION}),
        (
            {"client_kwargs": {"endpoint_url": "http://mine:1"}},
            {**SPARKS_KEYS, "client_kwargs": {"endpoint_url": "http://mine:1", "region_name": "spark's"}},
        ),
        (
            {"client_kwargs": {"region_name": "mine"}, "config_kwargs": {"read_timeout": 5}},
            {
                **SPARKS_KEYS,
                "endpoint_url": "http://spark:1",
                "client_kwargs": {"region_name": "mine"},
                "config_kwargs": {"read_timeout": 5},
            },
        ),
    ],
)
def test_sparks_settings_complete_the_options_of_s3(given, expected):
    store = S3Store("s3://b/x", storage_options=given).with_spark_settings(SAID_BY_SPARK)
    assert dict(store.storage_options) == expected
