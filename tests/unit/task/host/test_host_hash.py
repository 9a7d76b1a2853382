from __future__ import annotations

import subprocess
import sys

from sparkhvd.task.host.host_hash import hash_of, host_hash


def test_processes_of_one_host_have_the_same_hash():
    program = "from sparkhvd.task.host.host_hash import host_hash; import sys; sys.stdout.write(host_hash())"
    other = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert other.stdout == host_hash()


def test_any_differing_part_changes_the_hash():
    hashes = {hash_of(parts) for parts in (["a", "b"], ["ab", ""], ["", "ab"], ["a", "b", ""], ["b", "a"])}
    assert len(hashes) == 5
