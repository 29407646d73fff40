"""How one global batch is run: by one process or by many."""

from artel.parallel.layout import Layout, Replicated
from artel.parallel.processes import Processes, device_here, open_processes

__all__ = ["Layout", "Processes", "Replicated", "device_here", "open_processes"]
