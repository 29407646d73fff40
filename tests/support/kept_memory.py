"""What a call leaves in memory: what a forward pass keeps for the backward pass."""

import gc

from torch.profiler import ProfilerActivity, profile


def bytes_kept(call):
    """(what ``call()`` returns, bytes of tensors that are still there when it has returned).

    The profiler counts every release, also that of a model which an earlier test left in a reference cycle.
    The collector finds such a cycle whenever it likes, so it runs before the call and not within.
    """
    gc.collect()
    gc.disable()
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as measured:
            result = call()
    finally:
        gc.enable()
    return result, sum(event.self_cpu_memory_usage for event in measured.key_averages())
