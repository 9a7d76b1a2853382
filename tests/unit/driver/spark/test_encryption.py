from __future__ import annotations

from types import SimpleNamespace

import pytest

from sparkhvd.driver.spark.encryption import unencrypted_spark

CLUSTER = {"spark.master": "spark://one:7077"}


@pytest.mark.parametrize(
    ("settings", "readable"),
    [
        ({"spark.master": "local[2]"}, False),
        ({"spark.master": "local"}, False),
        ({"spark.master": "local-cluster[2,1,1024]"}, True),
        ({}, True),  # the view of a Spark Connect client
        (CLUSTER, True),
        ({**CLUSTER, "spark.network.crypto.enabled": "true"}, True),  # has no effect without spark.authenticate
        ({**CLUSTER, "spark.network.crypto.enabled": "true", "spark.authenticate": "true"}, False),
        ({**CLUSTER, "spark.ssl.rpc.enabled": "true"}, False),
        ({**CLUSTER, "spark.ssl.enabled": "true"}, True),
    ],
)
def test_a_warning_appears_if_spark_sends_the_secret_unencrypted(settings, readable):
    message = unencrypted_spark(SimpleNamespace(conf=settings))
    assert bool(message) is readable
    assert not readable or "Set spark.authenticate and spark.network.crypto.enabled" in message
