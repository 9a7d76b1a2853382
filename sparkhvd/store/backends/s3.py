"""A Store on S3, or on any service with the same protocol."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import s3fs
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    FlexibleChecksumError,
    HTTPClientError,
    NoCredentialsError,
    PartialCredentialsError,
)
from botocore.exceptions import (
    ConnectionError as BotoConnectionError,
)

from sparkhvd.errors import StoreError
from sparkhvd.store.access.retry import is_transient
from sparkhvd.store.backends.filesystem import FilesystemStore

# Defaults that bound every request; config_kwargs in storage_options takes precedence.
_CLIENT_DEFAULTS: Mapping[str, Any] = {
    "connect_timeout": 10,
    "read_timeout": 30,
    "retries": {"mode": "standard", "total_max_attempts": 2},
}
_CREDENTIALS_COME_FROM = (
    "Pass storage_options={'key': ..., 'secret': ...} (or {'profile': ...}, or {'anon': True} for a public bucket), "
    "set spark.hadoop.fs.s3a.access.key and spark.hadoop.fs.s3a.secret.key in Spark's session, or AWS_ACCESS_KEY_ID "
    "and AWS_SECRET_ACCESS_KEY in the environment of the driver and all executors"
)
_WRITING = "sparkhvd-writing"  # metadata that identifies the writer of a file
_REQUEST_ATTEMPTS = 2  # of s3fs, for example for one part of a large file, before the Store retries the operation
_RETRYABLE_STATUSES = frozenset({408, 409, 425, 429})  # those below 500
_NO_UPLOAD = "NoSuchUpload"  # an upload in parts has ended: its completion succeeded, but the response was lost
# Operations whose responses always have content; the client takes an empty response for an empty list or a success.
_ANSWERED_WITH_CONTENT = frozenset(
    {"ListObjects", "ListObjectsV2", "DeleteObjects", "CopyObject", "CreateMultipartUpload", "CompleteMultipartUpload"}
)
_ALREADY_DELETED = frozenset({"NoSuchKey", "NoSuchVersion"})


class S3Store(FilesystemStore):
    """A Store at ``s3://bucket/folder``; ``s3a://`` and ``s3n://`` mean the same.

    A file appears all at once, when it is complete. ``publish`` uses S3's conditional write.

    Args:
        prefix_path: the folder; None if ``train_path`` and the other paths are enough.
        storage_options: options of s3fs: ``key``, ``secret``, ``token``, ``endpoint_url``, ``anon``, ``profile``,
            ``client_kwargs``, ``config_kwargs`` ... Machines with a role or a profile need none.
        paths: as in ``FilesystemStore``.
    """

    def __init__(
        self, prefix_path: str | None = None, *, storage_options: Mapping[str, Any] | None = None, **paths: Any
    ) -> None:
        super().__init__(prefix_path, storage_options=storage_options, **paths)

    def spark_url(self, path: str) -> str:
        return f"s3a://{self._folders.of(path, self.url)}"

    def spark_options(self) -> dict[str, str]:
        bucket = self._folders.root.partition("/")[0]
        return hadoop_settings(self.storage_options or {}, bucket)

    def with_spark_settings(self, settings: Mapping[str, str]) -> S3Store:
        options = storage_options_from(settings, self._folders.root.partition("/")[0])
        return replace(self, storage_options=completed_options(self.storage_options or {}, options))

    def _normalized(self, url: str) -> str:
        scheme, separator, rest = url.partition("://")
        if not separator or scheme.lower() not in {"s3", "s3a", "s3n"} or not rest.strip("/"):
            raise StoreError(f"{url!r} is not a folder on S3; use s3://bucket/folder.")
        return super()._normalized(f"s3://{rest}")

    def _location_of_url(self, url: str) -> str:
        return url.removeprefix("s3://")

    def _new_filesystem(self) -> Any:
        options = dict(self.storage_options or {})
        options["config_kwargs"] = {**_CLIENT_DEFAULTS, **options.get("config_kwargs", {})}
        filesystem = _S3FileSystem(**{"use_listings_cache": False, **options}, skip_instance_cache=True)
        filesystem.retries = _REQUEST_ATTEMPTS
        return filesystem

    def _create(self, filesystem: Any, location: str, content: bytes, name: str) -> None:
        limit = self._limit(filesystem, len(content))
        filesystem.pipe_file(location, content, mode="create", Metadata={_WRITING: name}, **limit)

    def _created(self, filesystem: Any, location: str, content: bytes, name: str, attempt: int) -> bool:  # noqa: ARG002
        # The client retries requests too, so even the first attempt may find its own file.
        return bool(filesystem.metadata(location, refresh=True, **self._limit(filesystem)).get(_WRITING) == name)

    def _explain(self, error: Exception) -> str:
        answer = error.__cause__
        if isinstance(answer, ClientError) and _code_of(answer) == "NoSuchBucket":
            return "the bucket does not exist"
        if isinstance(error, (NoCredentialsError, PartialCredentialsError)):
            return f"{super()._explain(error)}. {_CREDENTIALS_COME_FROM}"
        return super()._explain(error)

    def _is_transient(self, error: Exception) -> bool:
        answer = error if isinstance(error, ClientError) else error.__cause__
        if isinstance(answer, ClientError):
            status = int(answer.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
            return status >= 500 or status in _RETRYABLE_STATUSES or _code_of(answer) == _NO_UPLOAD
        # The errors of the HTTP client, such as that of a body that ends too early. s3fs itself tries only twice.
        if isinstance(error, s3fs.core.S3_RETRYABLE_ERRORS):
            return True
        if isinstance(error, BotoCoreError):
            return isinstance(error, (BotoConnectionError, HTTPClientError, FlexibleChecksumError))
        return is_transient(error)


def _code_of(answer: ClientError) -> str:
    return str(answer.response.get("Error", {}).get("Code"))


class _S3FileSystem(s3fs.S3FileSystem):  # type: ignore[misc]  # it has no types
    """s3fs, but with errors for empty responses and for files that a server did not delete."""

    async def get_s3(self, bucket: str | None = None) -> Any:
        client = await super().get_s3(bucket)
        for event, handler in (
            ("before-parse.s3", _refuse_empty_answer),
            ("after-call.s3.DeleteObjects", _raise_failed_deletions),
        ):
            client.meta.events.register(event, handler, unique_id=f"sparkhvd-{handler.__name__}")
        return client


def _refuse_empty_answer(operation_model: Any, response_dict: Mapping[str, Any], **_: object) -> None:
    if operation_model.name not in _ANSWERED_WITH_CONTENT or response_dict["status_code"] != 200:
        return
    if not response_dict["body"].strip():
        raise ConnectionError("the server sent an empty answer")


def _raise_failed_deletions(parsed: Mapping[str, Any], **_: object) -> None:
    failed = [error for error in parsed.get("Errors", ()) if error.get("Code") not in _ALREADY_DELETED]
    if failed:
        first = failed[0]
        kind = PermissionError if first.get("Code") == "AccessDenied" else ConnectionError
        reason = str(first.get("Message") or first.get("Code")).rstrip(".")
        raise kind(f"{reason} (file {first.get('Key')})")


# The storage option for each of Spark's settings below fs.s3a., for options that are text on both sides.
_NAMES = {"access.key": "key", "secret.key": "secret", "session.token": "token", "endpoint": "endpoint_url"}
# Options that identify the user; credentials from two sources must not be mixed. The last three are in client_kwargs.
_CREDENTIALS = frozenset(
    {"key", "secret", "token", "anon", "profile", "session", "username", "password"}
    | {"aws_access_key_id", "aws_secret_access_key", "aws_session_token"}
)
_NESTED = frozenset({"client_kwargs", "config_kwargs"})
_ANONYMOUS = "org.apache.hadoop.fs.s3a.AnonymousAWSCredentialsProvider"
_TEMPORARY = "org.apache.hadoop.fs.s3a.TemporaryAWSCredentialsProvider"


def storage_options_from(settings: Mapping[str, str], bucket: str) -> dict[str, Any]:
    """Translate Hadoop's s3a settings into options of s3fs.

    Args:
        settings: names such as ``fs.s3a.access.key``; those with ``fs.s3a.bucket.<bucket>.`` take precedence.
        bucket: the bucket to use.
    """
    general, special = "fs.s3a.", f"fs.s3a.bucket.{bucket}."
    hadoop = {name[len(general) :]: value for name, value in settings.items() if name.startswith(general)}
    hadoop |= {name[len(special) :]: value for name, value in settings.items() if name.startswith(special)}
    options: dict[str, Any] = {ours: hadoop[name] for name, ours in _NAMES.items() if hadoop.get(name)}
    if "endpoint_url" in options and "://" not in options["endpoint_url"]:
        secure = hadoop.get("connection.ssl.enabled", "true").lower() != "false"
        options["endpoint_url"] = f"{'https' if secure else 'http'}://{options['endpoint_url']}"
    if hadoop.get("endpoint.region"):
        options["client_kwargs"] = {"region_name": hadoop["endpoint.region"]}
    if hadoop.get("path.style.access", "").lower() == "true":
        options["config_kwargs"] = {"s3": {"addressing_style": "path"}}
    if "Anonymous" in hadoop.get("aws.credentials.provider", ""):
        options["anon"] = True
    return options


def completed_options(own: Mapping[str, Any], from_spark: Mapping[str, Any]) -> dict[str, Any]:
    """Fill in missing options from Spark's settings; all credentials come from one source."""
    client = own.get("client_kwargs", {})
    set_names = {*own, *client}
    if set_names & _CREDENTIALS:
        set_names |= _CREDENTIALS
    more = {name: value for name, value in from_spark.items() if name not in set_names or name in _NESTED}
    inner = {name: {**more[name], **own[name]} for name in _NESTED & own.keys() & more.keys()}
    return {**more, **own, **inner}


def hadoop_settings(options: Mapping[str, Any], bucket: str) -> dict[str, str]:
    """Translate options of s3fs into Hadoop's s3a settings for one bucket, the inverse of ``storage_options_from``."""
    endpoint = options.get("endpoint_url") or options.get("client_kwargs", {}).get("endpoint_url")
    known = {**options, "endpoint_url": endpoint}
    hadoop = {name: str(known[ours]) for name, ours in _NAMES.items() if known.get(ours)}
    if endpoint:
        hadoop["connection.ssl.enabled"] = str(not str(endpoint).startswith("http://")).lower()
    if region := options.get("client_kwargs", {}).get("region_name"):
        hadoop["endpoint.region"] = str(region)
    if options.get("config_kwargs", {}).get("s3", {}).get("addressing_style") == "path":
        hadoop["path.style.access"] = "true"
    if options.get("anon"):
        hadoop["aws.credentials.provider"] = _ANONYMOUS
    elif options.get("token"):
        hadoop["aws.credentials.provider"] = _TEMPORARY
    return {f"fs.s3a.bucket.{bucket}.{name}": value for name, value in hadoop.items()}
