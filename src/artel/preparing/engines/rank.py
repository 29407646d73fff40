"""A rank of a submission to a cluster, as a process: python -m artel.preparing.engines.rank FOLDER RANK RANKS."""

from __future__ import annotations

import sys
from pathlib import Path

from artel.errors import ArtelError
from artel.preparing.engines.cluster import Work


def main() -> int:
    """Run this rank's tasks; return the exit status."""
    folder, rank, ranks = sys.argv[1:]
    try:
        Work.read(Path(folder)).run(int(rank), int(ranks))
    except ArtelError as error:
        print(f"artel: {error.in_a_line}", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
