"""The command `artel`; `python -m artel` is the same."""

import sys


def main() -> None:
    """Run the command line and exit, even if Ctrl-C arrives while it is still being imported."""
    try:
        from artel.cli.main import main as run
    except KeyboardInterrupt:
        print("artel: interrupted", file=sys.stderr)
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
