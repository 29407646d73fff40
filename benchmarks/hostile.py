"""Hostile, damaged and careless inputs, given to artel as people give them: writes benchmarks/hostile.md.

    python benchmarks/hostile.py [--family F] [--case C] [--short] [--jobs N] [--minutes M] [--list] [--keep]
                                 [--out FILE]

Each case (hostile/, by family) makes a folder of its own, gives commands there and says what is right for each: refused
(2), failed in words (1), works (0), and then what the ledger, the store or the model must hold. The harness alone
judges: no traceback, no line that a file forged, no silence of over 30 seconds, memory under the case's bound, every
file that artel did not make as it was, and nothing wrong behind an exit status of 0. `--short` takes a few quick cases
of each family, as the tests do. Exits 1 when a case is not right. Some need root or namespaces; without them they are
skipped, and the table says so.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from hostile.families import FAMILIES, all_cases
from hostile.judging import judge_all, short_form
from hostile.table import summary, table


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--family", choices=FAMILIES, action="append", help="cases of this family; may be repeated")
    options.add_argument("--case", action="append", help="this case, as FAMILY/NAME; may be repeated")
    options.add_argument("--short", action="store_true", help="a few quick cases of each family")
    options.add_argument("--seed", type=int, default=0, help="chooses those of the short form")
    options.add_argument("--jobs", type=int, default=1)
    options.add_argument("--seconds", type=float, default=90.0, help="after which a command is ended: it hangs")
    options.add_argument("--minutes", type=float, help="begin no further case after these; their order is by chance")
    options.add_argument("--list", action="store_true", help="print the cases' names, and run none")
    options.add_argument("--keep", action="store_true", help="keep the folders of cases that are not right")
    options.add_argument("--out", type=Path, help="the table; hostile.md beside this file when all cases are run")
    arguments = options.parse_args()
    cases = short_form(arguments.seed) if arguments.short else all_cases()
    if arguments.family:
        cases = [case for case in cases if case.family in arguments.family]
    if arguments.case:
        cases = [case for case in all_cases() if case.name in arguments.case]
    if arguments.list:
        print("\n".join(case.name for case in cases))
        return 0
    limit = {"minutes": arguments.minutes, "seed": arguments.seed} if arguments.minutes else {}
    verdicts = judge_all(cases, arguments.jobs, seconds=arguments.seconds, keep=arguments.keep, **limit)
    print("\n".join(summary(verdicts)))
    out = arguments.out or (Path(__file__).with_suffix(".md") if len(cases) == len(all_cases()) else None)
    if out:
        out.write_text(table(verdicts, len(all_cases()), " ".join(["python", "benchmarks/hostile.py", *sys.argv[1:]])))
    return int(any(verdict.faults for verdict in verdicts))


if __name__ == "__main__":
    sys.exit(main())
