from __future__ import annotations

import queue
from types import SimpleNamespace

from sparkhvd.driver.elastic.spark_workers import LeaseBook, SparkWorkers


class Failing(SparkWorkers):
    """Leases in a session whose jobs all fail; it ends after some pauses, which it records instead of waiting."""

    def __init__(self, pauses):
        context = SimpleNamespace(_jsc=SimpleNamespace(sc=lambda: SimpleNamespace(isStopped=lambda: False)))
        self._spark = SimpleNamespace(sparkContext=context)
        self._inbox, self._runs, self.pauses = queue.SimpleQueue(), {}, []
        self._book = LeaseBook(None, None, self._inbox)
        self._book.heard.set()  # another lease works, so these failures are not final
        self._closing = SimpleNamespace(is_set=lambda: len(self.pauses) == pauses, wait=self.pauses.append)

    def _run_job(self, tag, task):
        return RuntimeError("the executor cannot reach the driver")


def test_a_lease_that_fails_for_days_is_still_submitted_again():
    workers = Failing(pauses=2000)
    workers._keep_lease(0, "tag", None)
    assert workers.pauses[:3] == [0.5, 1.0, 2.0]
    assert workers.pauses[-1] == 30.0
