"""`python -m artel` is the same as the command `artel`."""

from artel.cli.main import main

if __name__ == "__main__":
    main()
