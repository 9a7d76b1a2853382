from __future__ import annotations

import io

import pytest

from sparkhvd.deadline import Deadline
from sparkhvd.driver.log_stream import LogStream
from sparkhvd.driver.mpi.command import mpirun_arguments, mpirun_settings
from sparkhvd.driver.mpi.service import DriverService, MpiHost, mpi_hosts
from sparkhvd.errors import DeadlineExceededError
from sparkhvd.rpc.messages import Acknowledged, FindTask, Register, Rejected, TaskAddress
from sparkhvd.rpc.registration import TaskOffer, TaskRegistration, TaskServer


def offer(index: int, key: str) -> TaskOffer:
    return TaskOffer(index, key, f"node-{key}", "", (str(index),))


def registration(index: int, attempt: int = 0, key: str = "a") -> TaskRegistration:
    servers = (TaskServer("eth0", f"10.0.0.{index}", 4000 + index, "10.0.0.0/24"),)
    return TaskRegistration(attempt, offer(index, key), servers, "/usr/bin/orted")


def service(num_tasks: int = 2) -> DriverService:
    return DriverService(num_tasks, LogStream(io.StringIO(), io.StringIO(), timestamps=False))


def test_hosts_are_in_rank_order_under_names_without_digits():
    hosts = mpi_hosts([offer(0, "x"), offer(1, "y"), offer(2, "x"), offer(3, "z")])
    assert hosts == [
        MpiHost("sparkhvd-a", "x", (0, 2)),
        MpiHost("sparkhvd-b", "y", (1,)),
        MpiHost("sparkhvd-c", "z", (3,)),
    ]
    names = [host.name for host in mpi_hosts([offer(i, str(i)) for i in range(1000)])]
    assert len(set(names)) == 1000
    assert not any(character.isdigit() for name in names for character in name)


def test_the_tasks_of_a_later_attempt_replace_those_of_an_earlier_attempt():
    driver = service()
    for index, attempt in ((0, 3), (1, 9), (0, 8), (1, 4)):  # Spark assigns consecutive numbers to the tasks of a stage
        assert driver.handle(Register(registration(index, attempt))) == Acknowledged()
    attempt, tasks = driver.await_registrations(-1, Deadline.after(1.0))
    assert attempt == 8
    assert [(task.offer.task_index, task.attempt) for task in tasks] == [(0, 8), (1, 9)]
    with pytest.raises(DeadlineExceededError, match="2 of 2 registered"):
        driver.await_registrations(8, Deadline.after(0.01))


def test_missing_tasks_are_counted_and_late_tasks_are_refused():
    driver = service()
    driver.handle(Register(registration(0)))
    with pytest.raises(DeadlineExceededError, match=r"Spark tasks to register: 1 of 2 registered"):
        driver.await_registrations(-1, Deadline.after(0.01))
    driver.end("The job has ended.")
    assert driver.handle(Register(registration(1))) == Rejected("The job has ended.")
    with pytest.raises(DeadlineExceededError, match="The job has ended"):
        driver.await_registrations(-1, Deadline.after(60.0))


def test_missing_reports_the_tasks_that_have_not_registered():
    driver = service(3)
    assert driver.missing() == [0, 1, 2]
    for index, attempt in ((0, 0), (1, 1), (2, 5), (0, 3)):  # task 2 belongs to a new attempt
        driver.handle(Register(registration(index, attempt)))
    assert driver.missing() == [1]


def test_a_task_index_out_of_range_is_refused():
    driver = service()
    for index in (-1, 2):
        assert driver.handle(Register(registration(index))) == Rejected(
            f"Task index {index} is out of range: this job has 2 tasks."
        )


def test_agents_receive_only_the_servers_of_known_hosts():
    driver = service()
    server = registration(0).servers[0]
    driver.serve_hosts({"sparkhvd-a": server})
    assert driver.handle(FindTask("sparkhvd-a")) == TaskAddress(server)
    assert driver.handle(FindTask("sparkhvd-b")) == Rejected("No task of this job runs on host sparkhvd-b.")


def test_the_command_line_has_one_rank_per_task_and_the_users_arguments_last():
    hosts = [MpiHost("sparkhvd-a", "x", (0, 2)), MpiHost("sparkhvd-b", "y", (1,))]
    arguments = mpirun_arguments(hosts, ["-x", "NCCL_DEBUG=INFO"], root=True)
    assert arguments[:5] == ["--allow-run-as-root", "-np", "3", "-H", "sparkhvd-a:2,sparkhvd-b:1"]
    assert arguments[-5:-2] == ["-x", "NCCL_DEBUG=INFO", "/bin/sh"]
    assert "--allow-run-as-root" not in mpirun_arguments(hosts, [], root=False)
    settings = mpirun_settings(hosts, ["10.0.0.0/24", "10.0.1.0/24", "10.0.0.0/24"], set())
    assert settings["OMPI_MCA_oob_tcp_if_include"] == "10.0.0.0/24,10.0.1.0/24"
    assert not any("secret" in value.lower() for value in [*arguments, *settings.values()])
