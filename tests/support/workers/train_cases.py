"""Trains several run files one after another in one launch: starting processes costs more than the cases do.

torchrun --nproc-per-node N train_cases.py CASE.yaml ...
"""

import sys

from artel.config import load_run
from artel.parallel import join_world
from artel.preparing import prepare
from artel.training.loop import train

if __name__ == "__main__":
    prepared = [prepare(load_run(name)) for name in sys.argv[1:]]
    with join_world(threads=1) as processes:
        for store in prepared:
            train(store.config, store, processes)
