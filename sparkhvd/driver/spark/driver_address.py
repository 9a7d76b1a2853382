"""The addresses at which the tasks of a job reach this driver."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from sparkhvd._util.addresses import LOOPBACK, address_to_bind, is_loopback, outgoing_address, without_brackets
from sparkhvd.compat.spark import is_connect

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Addresses for documentation (RFC 5737, RFC 3849): packets to them leave by the default route.
_REMOTE_ADDRESSES = ["192.0.2.1", "2001:db8::1"]


def driver_hosts(session: SparkSession) -> tuple[str, str]:
    """Return the name or address by which executors reach this driver, and the local address to bind."""
    if is_connect(session):
        remote = urlsplit(str(session.client.host)).hostname or str(session.client.host)
        address = LOOPBACK if is_loopback(remote) else outgoing_address(remote)
        return address, address
    master = str(session.sparkContext.master)
    own_host = without_brackets(str(session.conf.get("spark.driver.host", LOOPBACK)))
    # Even if the master runs on the driver's host, the workers run elsewhere.
    cluster_host = urlsplit(master).hostname if master.startswith("spark://") else ""
    peer_hosts = [cluster_host] if cluster_host and cluster_host != own_host else _REMOTE_ADDRESSES
    if master.startswith("local") or is_loopback(own_host):
        return LOOPBACK, LOOPBACK
    return own_host, address_to_bind(own_host, peer_hosts)
