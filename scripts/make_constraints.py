"""Print every release that an environment made by `make setup` holds, as a constraints file for pip.

Usage: python scripts/make_constraints.py .venv > constraints.txt
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

# Installed beside the environment (see the Makefile), where `pip freeze` does not look by itself.
_BESIDE = ("torchao", "deepspeed")


def main(environment: Path) -> None:
    """Print the releases in alphabetical order, without the local part of a version (`+cpu`)."""
    freeze = [str(environment / "bin/python"), "-m", "pip", "freeze", "--exclude-editable"]
    releases: set[str] = set()
    for arguments in ([], *(["--path", str(environment / name)] for name in _BESIDE)):
        lines = subprocess.run([*freeze, *arguments], capture_output=True, text=True, check=True).stdout.splitlines()
        releases.update(line.partition("+")[0] for line in lines if "==" in line)
    print("# The releases that the tests ran with; `make constraints` writes this file anew.")
    print("\n".join(sorted(releases, key=str.lower)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
