"""Starting the processes of a run: torchrun here."""

from artel.launching.local import Hosts, is_worker, launch

__all__ = ["Hosts", "is_worker", "launch"]
