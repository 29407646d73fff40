"""`artel hardware`: measure this machine once, for `artel plan`."""

from __future__ import annotations

from artel.cli.common import AsJson, print_json, tell
from artel.launching.quiet_libraries import quiet_libraries


def hardware(as_json: AsJson = False) -> None:
    """Measure this machine once, in about a minute, for `artel plan`: products, attention, memory, all-reduce.

    The result stays in the cache folder (ARTEL_CACHE) until the device or PyTorch changes.

    Example: artel hardware
    """
    quiet_libraries()
    from artel.diagnostics.hardware.measure import measure_hardware

    measured = measure_hardware(tell)
    tell(*measured.lines())
    tell(f"saved in {measured.path}, after {measured.seconds:,.0f} s")
    if as_json:
        print_json(measured.to_json())
