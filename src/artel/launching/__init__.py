"""Starting the processes of a run: torchrun here."""

from artel.launching.interface import choose_interface, choose_interface_of_worker
from artel.launching.local import Hosts, is_worker, launch

__all__ = ["Hosts", "choose_interface", "choose_interface_of_worker", "is_worker", "launch"]
