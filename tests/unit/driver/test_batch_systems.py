from __future__ import annotations

import pytest

from sparkhvd.driver.batch_systems import find_allocation
from sparkhvd.errors import ConfigError


def hosts(**environment):
    allocation = find_allocation(environment)
    return "" if allocation is None else ",".join(host.text for host in allocation.hosts)


def slurm(nodes, tasks=None):
    more = {} if tasks is None else {"SLURM_TASKS_PER_NODE": tasks}
    return hosts(SLURM_JOB_ID="17", SLURM_JOB_NODELIST=nodes, **more)


def test_outside_of_a_batch_job_there_is_no_allocation():
    assert find_allocation({}) is None
    assert find_allocation({"SLURM_CONF": "/etc/slurm.conf", "LSB_SHAREDIR": "/share"}) is None


@pytest.mark.parametrize(
    ("nodes", "tasks", "text"),
    [
        ("node1", "4", "node1:4"),
        ("node1,gpu-a", "2,3", "node1:2,gpu-a:3"),
        ("node[01-03,7]", "2(x3),1", "node01:2,node02:2,node03:2,node7:1"),
        ("r[1-2]n[8-9],login", "1(x5)", "r1n8:1,r1n9:1,r2n8:1,r2n9:1,login:1"),
        ("node[008-010]-ib.cluster", "8(x3)", "node008-ib.cluster:8,node009-ib.cluster:8,node010-ib.cluster:8"),
        ("node[1-2]", None, "node1:1,node2:1"),
        ("node[1-3]", "2,0,1", "node1:2,node3:1"),
    ],
)
def test_slurm_lists_nodes_and_their_tasks(nodes, tasks, text):
    assert slurm(nodes, tasks) == text


def test_lsf_lists_hosts_in_a_file_or_in_variables(tmp_path):
    file = tmp_path / "ranks"
    file.write_text("hostB\nhostA\nhostA\n\n")
    job = {"LSB_JOBID": "5"}
    assert hosts(**job, LSB_DJOB_RANKFILE=str(file), LSB_HOSTS="other") == "hostB:1,hostA:2"
    assert hosts(**job, LSB_MCPU_HOSTS="hostA 2 hostB 4 ", LSB_HOSTS="other") == "hostA:2,hostB:4"
    assert hosts(**job, LSB_HOSTS="hostA hostA hostB") == "hostA:2,hostB:1"
    assert hosts(**job) == ""


def test_the_batch_job_is_named():
    assert find_allocation({"SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "a"}).job == "Slurm job 17"
    assert find_allocation({"LSB_JOBID": "5", "LSB_HOSTS": "a"}).job == "LSF job 5"


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"SLURM_JOB_NODELIST": "n[1-x]"}, r"SLURM_JOB_NODELIST='n\[1-x\]' has an unknown form: '1-x' is not a range"),
        ({"SLURM_JOB_NODELIST": "n[1-2"}, "its brackets do not match"),
        ({"SLURM_JOB_NODELIST": "n1],m"}, "its brackets do not match"),
        ({"SLURM_JOB_NODELIST": "n[3-1]"}, "'3-1' ends before it begins"),
        ({"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "2"}, "it has 1 entries for 2 nodes"),
        ({"SLURM_JOB_NODELIST": "n1", "SLURM_TASKS_PER_NODE": "many"}, "'many' is not a number of tasks"),
        ({"LSB_JOBID": "5", "LSB_MCPU_HOSTS": "a 2 b"}, "must consist of pairs of a host and its slots"),
        ({"LSB_JOBID": "5", "LSB_DJOB_RANKFILE": "/no/such"}, "LSB_DJOB_RANKFILE=/no/such cannot be read"),
    ],
)
def test_an_unknown_form_is_refused_with_an_alternative(environment, words):
    with pytest.raises(ConfigError, match=words + r".*Name the hosts with -H"):
        find_allocation(environment)
