"""Cleanup after a rank whose actor Ray has killed.

Ray kills an actor together with its children. So the worker process cannot end its own children or remove its temporary
folder, as it does with other launchers. A shell that is not a child of the actor does both.
"""

from __future__ import annotations

import os
import subprocess

# The inner shell outlives the outer one, so its parent is not the actor. A line on its stdin means that nothing is left
# to clean. The session of a process is the fourth field after its name in /proc.
_SCRIPT = """exec 3<&0; (read -r line <&3 || {
    leader=$1; folder=$2; kill -s KILL -- "-$leader"
    for process in /proc/[0-9]*; do
        read -r line < "$process/stat" || continue
        set -- ${line##*) }
        [ "$4" != "$leader" ] || kill -s KILL "${process#/proc/}"
    done
    rm -rf -- "$folder"
}) </dev/null &"""


class Cleanup:
    """Ends a session and removes a folder if this process is killed before ``close``.

    Args:
        leader: the process that leads the session.
        folder: the folder; None removes none.
    """

    def __init__(self, leader: int, folder: str | None) -> None:
        read_end, self._write_end = os.pipe()
        try:
            subprocess.run(
                ["/bin/sh", "-c", _SCRIPT, "sh", str(leader), folder or "/nonexistent"],
                stdin=read_end,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ray ends the process group of the actor
                check=True,
            )
        except BaseException:
            os.close(self._write_end)
            raise
        finally:
            os.close(read_end)

    def close(self) -> None:
        """Cancel the cleanup; the session has ended and the folder is removed."""
        os.write(self._write_end, b"\n")
        os.close(self._write_end)
