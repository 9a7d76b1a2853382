"""The package versions that must be equal on the driver and the tasks of a job."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from sparkhvd._util.counts import counted
from sparkhvd._util.frameworks import frameworks

if TYPE_CHECKING:
    from sparkhvd.rpc.registration import TaskOffer

_SHOWN_HOSTS = 5


def packages_of_frameworks() -> dict[str, tuple[str, ...]]:
    """Return the packages of all frameworks, with the other names that each has as a module or a distribution."""
    return {name: others for framework in frameworks() for name, others in framework.versions.items()}


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of the packages, without importing them; leave out packages that are not installed."""
    versions = {name: _installed_version(name) for name in packages}
    return {name: number for name, number in versions.items() if number is not None}


def _installed_version(name: str) -> str | None:
    with suppress(PackageNotFoundError):
        return version(name)
    for other in packages_of_frameworks().get(name, ()):
        with suppress(PackageNotFoundError):
            return version(other)
    return None


def frameworks_in_use(preload: Sequence[str]) -> tuple[str, ...]:
    """Return the frameworks that this process has loaded or its job will load, with versions, like ``torch 2.8.0``."""
    loaded = {*sys.modules, *preload}
    names = [name for name, others in packages_of_frameworks().items() if loaded & {name, *others}]
    return _version_texts(installed_versions(names))


def local_versions(wanted: Sequence[str]) -> tuple[str, ...]:
    """Return the versions in this process of the packages that ``frameworks_in_use`` found in the driver."""
    return _version_texts(installed_versions(name for name, _ in map(_name_and_version, wanted)))


def different_versions(driver: Sequence[str], offers: Sequence[TaskOffer]) -> str:
    """Return a warning if tasks have other versions than the driver; otherwise empty.

    A suffix after a plus names a build of the same version, such as one without GPUs, and is ignored.
    """
    differences = []
    for name, driver_version in map(_name_and_version, driver):
        hosts_of_version: dict[str, list[str]] = {}
        for offer in offers:
            task_version = dict(map(_name_and_version, offer.versions)).get(name, driver_version)
            hosts = hosts_of_version.setdefault(task_version, [])
            if task_version.partition("+")[0] != driver_version.partition("+")[0] and offer.host not in hosts:
                hosts.append(offer.host)
        shown = [
            f"{task_version} on {_listed(hosts)}" for task_version, hosts in sorted(hosts_of_version.items()) if hosts
        ]
        if shown:
            differences.append(f"{name} is {driver_version} on the driver, {', '.join(shown)}")
    if not differences:
        return ""
    return (
        f"{'; '.join(differences)}. Objects pickled with one version may fail to load or behave differently with "
        "another. Install the same versions on the driver and on every node."
    )


def _listed(hosts: Sequence[str]) -> str:
    more = len(hosts) - _SHOWN_HOSTS
    return ", ".join(hosts[:_SHOWN_HOSTS]) + (f" and {counted(more, 'more host')}" if more > 0 else "")


def _version_texts(versions: dict[str, str]) -> tuple[str, ...]:
    return tuple(f"{name} {number}" for name, number in versions.items())


def _name_and_version(text: str) -> tuple[str, str]:
    name, _, number = text.partition(" ")
    return name, number
