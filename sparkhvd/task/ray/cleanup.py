"""Cleanup after a rank whose actor Ray has killed.

Ray kills an actor together with its children. So the worker process cannot end its own children or remove its temporary
folder, as it does with other launchers. A shell that is not a child of the actor does both.
"""

from __future__ import annotations

import os
import subprocess

# The inner shell outlives the outer one, so its parent is not the actor. A line on its stdin means that nothing is left
# to clean.
_SCRIPT = 'exec 3<&0; (read -r line <&3 || { kill -s KILL -- "-$1"; rm -rf -- "$2"; }) </dev/null &'


class Cleanup:
    """Ends a process group and removes a folder if this process is killed before ``close``."""

    def __init__(self, process_group: int, folder: str | None) -> None:
        read_end, self._write_end = os.pipe()
        try:
            subprocess.run(
                ["/bin/sh", "-c", _SCRIPT, "sh", str(process_group), folder or "/nonexistent"],
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
        """Cancel the cleanup; the group has ended and the folder is removed."""
        os.write(self._write_end, b"\n")
        os.close(self._write_end)
