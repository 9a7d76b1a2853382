from __future__ import annotations

import sys
from importlib.metadata import version

from sparkhvd.rpc.registration import TaskOffer
from sparkhvd.task.host.versions import different_versions, frameworks_in_use, local_versions


def offers(*hosts: tuple[str, tuple[str, ...]]) -> list[TaskOffer]:
    return [TaskOffer(index, host, host, "", versions=versions) for index, (host, versions) in enumerate(hosts)]


def test_the_message_names_versions_that_differ_from_the_drivers_with_their_hosts():
    driver = ("torch 2.8.0+cpu", "keras 3.1")
    assert not different_versions(driver, [])
    assert not different_versions(driver, offers(("a", driver), ("b", ("torch 2.8.0+cu128", "keras 3.1"))))
    assert not different_versions(driver, offers(("a", ("keras 3.1",)))), "a missing framework causes its own error"
    message = different_versions(
        driver,
        offers(("a", driver), ("b", ("torch 2.7", "keras 3.0")), ("b", ("torch 2.7",)), ("c", ("torch 2.6",))),
    )
    assert message.startswith(
        "torch is 2.8.0+cpu on the driver, 2.6 on c, 2.7 on b; keras is 3.1 on the driver, 3.0 on b. "
    )
    many = different_versions(driver, offers(*((f"n{number}", ("keras 3.0",)) for number in range(7))))
    assert many.startswith("keras is 3.1 on the driver, 3.0 on n0, n1, n2, n3, n4 and 2 more hosts. ")


def test_frameworks_in_use_are_loaded_or_will_be_loaded_by_the_ranks(monkeypatch):
    for name in ("torch", "keras", "tensorflow", "lightning", "pytorch_lightning"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert frameworks_in_use(()) == ()
    installed = (f"torch {version('torch')}",)
    assert frameworks_in_use(("torch", "json")) == installed
    assert local_versions(("torch 0.1", "no-such-package 1")) == installed
    monkeypatch.setitem(sys.modules, "pytorch_lightning", sys)
    assert [framework.partition(" ")[0] for framework in frameworks_in_use(())] == ["lightning"]
