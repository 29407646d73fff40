"""Start the processes of a run: with torchrun's machinery on this host, or as another launcher's environment says."""

from artel.launching.accelerate import take_over
from artel.launching.hosts import Hosts
from artel.launching.interface import choose_interface, choose_interface_of_process
from artel.launching.local import launch
from artel.launching.meeting import Meeting
from artel.launching.started import check_worker, read_launcher
from artel.launching.worker import end_with_launcher, is_worker, raising_lost_others

__all__ = [
    "Hosts",
    "Meeting",
    "check_worker",
    "choose_interface",
    "choose_interface_of_process",
    "end_with_launcher",
    "is_worker",
    "launch",
    "raising_lost_others",
    "read_launcher",
    "take_over",
]
