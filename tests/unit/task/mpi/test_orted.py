from __future__ import annotations

import tempfile

import pytest

from sparkhvd.errors import LaunchError
from sparkhvd.task.mpi.orted import Orted, orted_command


def test_quotes_of_the_remote_shell_are_removed():
    words = ["orted", "-mca", "orte_hnp_uri", '"3909.0;tcp://127.0.0.1:4711"', "-mca", "plm", '"rsh"']
    assert orted_command(words) == (
        {},
        ["orted", "-mca", "orte_hnp_uri", "3909.0;tcp://127.0.0.1:4711", "-mca", "plm", "rsh"],
    )


def test_leading_assignments_of_an_open_mpi_with_a_prefix_are_kept():
    line = (
        "PATH=/opt/mpi/bin:$PATH ; export PATH ; LD_LIBRARY_PATH=/opt/mpi/lib:$LD_LIBRARY_PATH ; /opt/mpi/bin/orted -x"
    )
    variables, command = orted_command(line.split(" "))
    assert variables == {"PATH": "/opt/mpi/bin:$PATH", "LD_LIBRARY_PATH": "/opt/mpi/lib:$LD_LIBRARY_PATH"}
    assert command == ["/opt/mpi/bin/orted", "-x"]


def test_only_orted_is_executed():
    with pytest.raises(LaunchError, match="executes only orted, got 'rm -rf /'"):
        orted_command(["rm", "-rf", "/"])
    with pytest.raises(LaunchError, match="command line cannot be parsed: No closing quotation"):
        orted_command(["orted", "'"])
    with pytest.raises(LaunchError, match="orted cannot be started: embedded null byte"):
        Orted(["orted", "\0"], {})


def test_a_full_disk_for_the_files_of_orted_is_reported(monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/no/such/folder")
    with pytest.raises(
        LaunchError, match=r"orted cannot be started: its temporary folder cannot be created: .*/no/such/folder"
    ):
        Orted(["orted"], {})


def test_the_end_of_orted_is_reported_with_its_output_and_its_folder_is_removed(tmp_path):
    program = tmp_path / "orted"
    program.write_text('#!/bin/sh\necho "$OMPI_MCA_orte_tmpdir_base" > "$1"\necho says $PATH\nexit 5\n')
    program.chmod(0o755)
    orted = Orted([f"PATH={tmp_path}:$PATH", ";", str(program), str(tmp_path / "folder")], {"PATH": "/bin:/usr/bin"})
    assert orted.wait() == (5, f"says {tmp_path}:/bin:/usr/bin\n")
    orted.close()
    folder = (tmp_path / "folder").read_text().strip()
    assert folder
    assert not (tmp_path / folder).exists()
