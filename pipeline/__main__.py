"""``python -m pipeline FILE ...`` is ``kvsweep run FILE ...``: the first line of an executable sweep file calls it."""

from __future__ import annotations

import sys

from pipeline.cli import app, main

COMMANDS = {command.callback.__name__ for command in app.registered_commands if command.callback is not None}
COMMANDS |= {str(group.name) for group in app.registered_groups}

if __name__ == "__main__":
    words = sys.argv[1:]
    named = not words or words[0] in COMMANDS or words[0].startswith("-")
    sys.exit(main(words if named else ["run", *words]))
