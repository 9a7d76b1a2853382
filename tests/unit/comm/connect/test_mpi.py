"""Ranks started by the real mpirun."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from sparkhvd.comm import session
from sparkhvd.comm.connect.launch_context import LaunchContext
from tests.ranks import RankGroup

_ROOT = Path(__file__).parents[3]

needs_mpirun = pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun is not installed")


def run_by_mpi(tmp_path: Path, ranks: int, script: str, **variables: str) -> list[object]:
    """Return the values of every rank's ``report(...)``, by rank of MPI's world; the script must succeed."""
    head = """
        import json, os, sys
        from pathlib import Path
        import numpy as np
        from mpi4py import MPI
        from sparkhvd.comm import session
        from sparkhvd.comm.collectives.buffers import ReduceOp
        world = MPI.COMM_WORLD
        def report(value):
            Path(sys.argv[1], str(world.rank)).write_text(json.dumps(value))
        def total(value):
            return session.current().allreduce(np.array([float(value)]), ReduceOp.SUM).item()
    """
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(head) + textwrap.dedent(script))
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", str(ranks), sys.executable, str(path)]
    command.append(str(tmp_path))
    environment = {**os.environ, **variables}
    result = subprocess.run(
        command, cwd=_ROOT, capture_output=True, text=True, timeout=120, check=False, env=environment
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return [json.loads((tmp_path / str(rank)).read_text()) for rank in range(ranks)]


@needs_mpirun
def test_a_rendezvous_that_cannot_start_is_an_error_on_all_ranks(tmp_path):
    script = """
        from unittest import mock
        from sparkhvd.errors import CollectiveError
        with mock.patch("sparkhvd.comm.connect.mpi.RendezvousServer", side_effect=CollectiveError("no port is left")):
            try:
                session.init()
                report("joined")
            except CollectiveError as error:
                report(str(error))
    """
    messages = run_by_mpi(tmp_path, 2, script)
    assert messages[0] == messages[1]
    assert messages[0].startswith("Rank 0 on host ")
    assert messages[0].endswith("cannot start the rendezvous server: no port is left")


@needs_mpirun
def test_ranks_wait_in_init_for_other_ranks_until_the_start_timeout(tmp_path):
    script = """
        from sparkhvd.errors import DeadlineExceededError
        if world.rank == 0:
            try:
                session.init()
            except DeadlineExceededError as error:
                report(str(error))
            world.send("timed out", 1)
        else:
            report(world.recv(source=0))
            world.Ibarrier().Wait()
    """
    first, second = run_by_mpi(tmp_path, 2, script, SPARKHVD_START_TIMEOUT="1.5")
    assert "Rank 0 waited start_timeout=1.5 s in init() for all 2 ranks that MPI started" in first
    assert second == "timed out"


@needs_mpirun
@pytest.mark.parametrize("comm", ["None", "[0, 1]", "MPI.COMM_WORLD"])
def test_after_a_timeout_in_init_another_call_joins_the_late_rank(comm, tmp_path):
    script = """
        from sparkhvd.errors import DeadlineExceededError
        timeouts = []
        if world.rank == 0:
            try:
                session.init(COMM)
            except DeadlineExceededError as error:
                timeouts.append(str(error))
            world.send("timed out", 1)
        else:
            world.recv(source=0)
        session.init(COMM)
        report([timeouts, session.rank(), total(1 + world.rank)])
        session.shutdown()
    """.replace("COMM)", f"{comm})")
    first, second = run_by_mpi(tmp_path, 2, script, SPARKHVD_START_TIMEOUT="3")
    assert len(first[0]) == 1
    assert first[0][0].startswith("Rank 0 waited start_timeout=3 s in init() for all 2 ranks that MPI started")
    assert [first[1:], second] == [[0, 3.0], [[], 1, 3.0]]


@needs_mpirun
def test_a_rank_that_calls_init_after_another_rank_has_given_up_has_a_time_limit(tmp_path):
    script = """
        from sparkhvd.errors import DeadlineExceededError
        if world.rank == 1:
            world.recv(source=0)
        try:
            session.init()
        except DeadlineExceededError as error:
            report(str(error))
        world.send("ended", 1 - world.rank)
        if world.rank == 0:
            world.recv(source=1)
    """
    _, second = run_by_mpi(tmp_path, 2, script, SPARKHVD_START_TIMEOUT="2")
    assert "waited start_timeout=2 s" in second


@needs_mpirun
def test_a_process_set_of_a_communicator_that_a_rank_does_not_add_has_a_time_limit(tmp_path):
    script = """
        from sparkhvd.errors import DeadlineExceededError
        session.init()
        if world.rank == 0:
            try:
                session.add_process_set(world.Split(0))
            except DeadlineExceededError as error:
                report(str(error))
            world.send("ended", 1)
        else:
            world.Split(0)
            report(world.recv(source=0))
    """
    first, second = run_by_mpi(tmp_path, 2, script, SPARKHVD_COLLECTIVE_TIMEOUT="2")
    assert "process_sets.add" in first
    assert second == "ended"


@needs_mpirun
@pytest.mark.parametrize("late", ["a rank calls nothing", "a rank passes another communicator"])
def test_finding_or_adding_a_process_set_without_all_members_has_a_time_limit(late, tmp_path):
    script = """
        from sparkhvd.errors import DeadlineExceededError
        first, second = world.Split(0), world.Split(0)
        session.init()
        try:
            if LATE == "a rank passes another communicator":
                session.add_process_set(first if world.rank == 0 else second)
            elif world.rank == 0:
                session.init(process_sets=[first])
        except DeadlineExceededError as error:
            report(str(error))
        else:
            report("")
        world.send("ended", 1 - world.rank)
        world.recv(source=1 - world.rank)
    """.replace("LATE", repr(late))
    messages = run_by_mpi(tmp_path, 2, script, SPARKHVD_START_TIMEOUT="3")
    assert messages[0].startswith("Rank 0 waited start_timeout=3 s for all members of an MPI communicator")
    assert ("did not. Register the set on all members" in messages[1]) == (late != "a rank calls nothing")


@needs_mpirun
def test_init_takes_rank_and_size_from_mpi_and_both_work_in_one_program(tmp_path):
    script = """
        import sparkhvd.numpy as hvd
        hvd.init()
        assert hvd.mpi_enabled() and hvd.mpi_threads_supported()
        sums = []
        for step in range(3):
            handle = hvd.allreduce_async(np.full(1000, float(hvd.rank())), op=hvd.Sum)
            by_mpi = world.allreduce(hvd.rank())
            sums.append([hvd.synchronize(handle)[0].item(), by_mpi])
        requests = [world.isend(hvd.rank(), other) for other in range(world.size)]
        hvd.barrier()
        heard = [world.recv(source=other) for other in range(world.size)]
        sharing = len(session.current().local_ranks())
        report([hvd.rank(), hvd.size(), hvd.local_rank(), hvd.cross_size(), sharing, sums, heard])
        hvd.shutdown()
    """
    assert run_by_mpi(tmp_path, 3, script) == [[rank, 3, rank, 1, 3, [[3.0, 3]] * 3, [0, 1, 2]] for rank in range(3)]


@needs_mpirun
def test_parts_of_mpis_world_become_separate_jobs(tmp_path):
    """Pass a communicator, then ranks in another order, then nothing, without a shutdown at the end."""
    script = """
        found = []
        session.init(half := world.Split(world.rank % 2))
        found.append([session.rank(), session.size(), total(world.rank), session.global_process_set.mpi_comm is half])
        session.shutdown()
        if world.rank != 1:
            session.init(comm=[3, 0, 2])
            found.append([session.rank(), session.size(), total(world.rank)])
            session.shutdown()
        try:
            session.init(comm=[(world.rank + 1) % 4])
        except ValueError as error:
            found.append(str(error))
        session.init(comm=MPI.COMM_SELF)
        found.append(session.size())
        session.shutdown()
        session.init()
        found.append(total(world.rank))
        report(found)
    """
    first, second, third, fourth = run_by_mpi(tmp_path, 4, script)
    refusal = "Rank 0 is not in comm=[1]; only those ranks may call init()."
    assert first == [[0, 2, 2.0, True], [1, 3, 5.0], refusal, 1, 6.0]
    assert second == [[0, 2, 4.0, True], refusal.replace("[1]", "[2]").replace("Rank 0", "Rank 1"), 1, 6.0]
    assert third[:2] == [[1, 2, 2.0, True], [2, 3, 5.0]]
    assert fourth[:2] == [[1, 2, 4.0, True], [0, 3, 5.0]]


@needs_mpirun
def test_process_sets_are_made_from_communicators_of_mpi(tmp_path):
    script = """
        from sparkhvd.comm.process_sets import ProcessSet
        communicator = world.Split(world.rank % 2)
        halves = ProcessSet(communicator)
        session.init(process_sets=[halves])
        again = ProcessSet(communicator)
        session.init(process_sets=[again])
        own = session.current().allreduce(np.array([world.rank + 1.0]), ReduceOp.SUM, process_set=halves).item()
        same = again.process_set_id == halves.process_set_id and halves.mpi_comm is communicator
        report([again.ranks, halves.rank(), own, total(world.rank), same, session.global_process_set.mpi_comm])
        session.shutdown()
    """
    found = run_by_mpi(tmp_path, 3, script)
    assert found == [
        [[0, 2], 0, 4.0, 3.0, True, None],
        [[1], 0, 2.0, 3.0, True, None],
        [[0, 2], 1, 4.0, 3.0, True, None],
    ]


@needs_mpirun
def test_a_launchers_context_takes_precedence_over_mpi(tmp_path):
    script = """
        from sparkhvd.comm.connect.launch_context import LaunchContext
        session.set_launch_context(LaunchContext())
        session.init()
        report([session.size(), session.uses_mpi()])
    """
    assert run_by_mpi(tmp_path, 2, script) == [[1, False]] * 2


@needs_mpirun
def test_processes_of_another_mpis_mpirun_do_not_train_alone():
    code = "import warnings; warnings.simplefilter('ignore'); from sparkhvd.comm import session; session.init()"
    environment = {**os.environ, "PMI_SIZE": "2", "PMI_RANK": "0"}  # set by MPICH's mpirun; mpi4py finds Open MPI
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=environment,
    )
    assert "ConfigError: mpirun started 2 processes, but mpi4py uses another MPI than mpirun" in done.stderr


# Ranks of a launcher, without MPI.


def part_and_join():
    session.shutdown()
    rank = session._session.context.world.rank
    worlds = []
    for ranks in ([2, 0], [1]) if rank != 1 else ([1],):
        if rank in ranks:
            session.init(ranks)
            worlds.append((session.rank(), session.size(), session.local_size(), total(rank)))
            session.shutdown()
    session.init()
    worlds.append(total(rank))
    return worlds


def total(value):
    import numpy as np  # noqa: PLC0415  a rank's own

    from sparkhvd.comm.collectives.buffers import ReduceOp  # noqa: PLC0415

    return session.current().allreduce(np.array([float(value)]), ReduceOp.SUM).item()


def test_a_subset_of_a_launched_job_becomes_a_separate_job():
    with RankGroup(3, hosts=("one", "two", "one")) as group:
        assert group.run(part_and_join) == [[(1, 2, 2, 2.0), 3.0], [(0, 1, 1, 1.0), 3.0], [(0, 2, 2, 2.0), 3.0]]


def test_an_empty_list_means_all_ranks():
    session.set_launch_context(LaunchContext())
    session.init(comm=[])
    assert session.size() == 1
    session.shutdown()


@pytest.mark.parametrize("ranks", [[0, 0], [0, 1], [-1]])
def test_ranks_outside_the_job_are_refused(ranks):
    session.set_launch_context(LaunchContext())
    with pytest.raises(ValueError, match=r"must list distinct ranks from 0 to 0\."):
        session.init(ranks)
    assert not session.is_initialized()
