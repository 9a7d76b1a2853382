from __future__ import annotations

import pytest

from sparkhvd.driver.host_process import ELASTIC_JOB, SrunOptions, SshOptions, host_command
from sparkhvd.driver.hosts import Host, parse_hostfile, parse_hosts, take_slots
from sparkhvd.errors import ConfigError, SlotsError


def test_hosts_have_one_slot_by_default():
    assert parse_hosts("a:2, b,c.d-e:4") == (Host("a", 2), Host("b", 1), Host("c.d-e", 4))


def test_ipv6_addresses_need_brackets_before_slots():
    hosts = parse_hosts("[::1]:2,[fd00::5],c:1")
    assert hosts == (Host("::1", 2), Host("fd00::5", 1), Host("c", 1))
    assert [host.text for host in hosts] == ["[::1]:2", "[fd00::5]:1", "c:1"]
    assert parse_hostfile("fd00::5 slots=4\n[fd00::6]\n") == (Host("fd00::5", 4), Host("fd00::6", 1))


def test_a_host_file_may_have_comments_and_empty_lines():
    text = "# the cluster\n\nnode1 slots=4  # new\n  node2\n"
    assert parse_hostfile(text) == (Host("node1", 4), Host("node2", 1))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "lists no host"),
        ("a:1,a:2", "lists a host twice"),
        ("a:0", "The number of slots of host a must be a positive integer, got '0'"),
        ("a:many", "The number of slots of host a must be a positive integer, got 'many'"),
        ("-oProxyCommand=x:1", "is not a valid host name"),
        ("a b:1", "is not a valid host name"),
        ("fd00::5:2", r"'fd00::5:2' is ambiguous: .* Write \[fd00::5:2\] or \[ADDRESS\]:SLOTS"),
        ("[node1]:2", r"'node1' in '\[node1\]:2' is not an IPv6 address"),
        ("[fd00::5", "is not a valid host. Write hosts like"),
        ("[::1]:2,[::1]", "lists a host twice"),
    ],
)
def test_an_invalid_list_of_hosts_is_refused(text, words):
    with pytest.raises(ConfigError, match=words):
        parse_hosts(text)


def test_an_invalid_line_of_a_host_file_is_shown():
    with pytest.raises(ConfigError, match="has an invalid line 'node1 cores=4'"):
        parse_hostfile("node1 cores=4")


def test_slots_are_taken_in_the_order_of_the_hosts():
    hosts = parse_hosts("a:2,b:2,c:2")
    assert take_slots(hosts, 3) == (Host("a", 2), Host("b", 1))
    assert take_slots(hosts, None) == hosts
    with pytest.raises(SlotsError, match=r"num_proc=7 is more than the 6 slots of the hosts \(a:2,b:2,c:2\)"):
        take_slots(hosts, 7)


def test_ssh_gets_one_quoted_command_and_never_asks_for_a_password():
    command = host_command("node1", "/a path/python", SshOptions(2222, "/key"))
    assert command[:4] == ["ssh", "-T", "-o", "BatchMode=yes"]
    assert "ControlMaster=no" in command, "another connection of the user would end with the job"
    assert command[-6:-1] == ["-p", "2222", "-i", "/key", "node1"]
    assert command[-1].endswith("'/a path/python' -P -m sparkhvd.task.host.main")
    assert host_command("localhost", "", SshOptions())[0] == "env"
    assert host_command("node1", "", SshOptions(), ELASTIC_JOB)[-1].endswith(" -P -m sparkhvd.task.elastic.host")


def test_srun_starts_one_task_per_host_of_a_slurm_job():
    command = host_command("node1", "/a path/python", SrunOptions("17"))
    assert command[:3] == ["srun", "--jobid=17", "--nodelist=node1"]
    assert command[-4:] == ["/a path/python", "-P", "-m", "sparkhvd.task.host.main"]
    assert host_command("localhost", "", SrunOptions("17"))[0] == "env"
