"""What `draftsmith serve` prints."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.environment import child_environment


def test_a_reader_that_has_left_changes_neither_what_is_done_nor_the_exit_status(tmp_path: Path) -> None:
    """`draftsmith serve | tee`: Ctrl-C ends both at once, and events are told after that."""
    program = "import sys; from flows.cli_serve import say; say('stopping'); say('stopped'); sys.exit(130)"
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as unread:
        done = subprocess.run(
            [sys.executable, "-c", program],
            stdout=unread, stderr=subprocess.PIPE, text=True, env=child_environment(tmp_path), timeout=60, check=False,
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (130, "")
