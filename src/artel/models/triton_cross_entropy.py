"""Cross-entropy of rows of logits on a GPU, in Triton: a row is read from memory once and overwritten by its gradient.

PyTorch's operators move 44 bytes for each logit in bf16, this kernel 4 (the second read is served by the cache). Each
program has a row. Its lanes keep their own maximum and sums, which are reduced once (Milakov and Gimelshein 2018,
"Online normalizer calculation for softmax").
"""

from __future__ import annotations

import triton
import triton.language as tl

from artel.models.cross_entropy_rows import Rows

_WIDTH: tl.constexpr = tl.constexpr(8)  # columns of a lane at a time: 16 bytes of bf16
_LOWEST: tl.constexpr = tl.constexpr(-3.4028234663852886e38)  # the lowest finite float32
_IGNORED: tl.constexpr = tl.constexpr(-100)


@triton.jit  # type: ignore[untyped-decorator]
def _load(logits, offsets, columns, width, cap, HAS_CAP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load logits as float32, -inf for padding. The mask is by `width`, since loads of 16 bytes need an aligned one."""
    scores = tl.load(logits + offsets, mask=offsets < width, other=0.0).to(tl.float32)
    if HAS_CAP:
        decay = tl.exp(-2.0 * tl.abs(scores) / cap)
        scores = tl.where(scores < 0, -cap, cap) * (1.0 - decay) / (1.0 + decay)
    return tl.where(offsets < columns, scores, -float("inf"))


@triton.jit  # type: ignore[untyped-decorator]
def _cross_entropy_kernel(  # type: ignore[no-untyped-def]
    logits,
    stride,
    targets,
    factors,
    statistics,
    guesses,
    columns,
    width,
    first_id,
    num_ids,
    cap,
    HAS_FACTORS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    STATISTICS: tl.constexpr,
    GRAD: tl.constexpr,
    LANES: tl.constexpr,
):
    row, count = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    logits += row * stride
    target = tl.load(targets + row)
    column = target - first_id
    is_local = (column >= 0) & (column < columns)
    lanes = tl.arange(0, LANES)
    offsets = lanes[:, None] * _WIDTH + tl.arange(0, _WIDTH)[None, :]
    if STATISTICS:
        at_target = _load(logits, tl.where(is_local, column, 0), columns, width, cap, HAS_CAP)
        is_id = (target == _IGNORED) | ((target >= 0) & (target < num_ids))
        at_target = tl.where(is_id, tl.where(is_local, at_target, 0.0), float("nan"))
        lane_max = tl.full([LANES], _LOWEST, tl.float32)
        lane_starts = tl.zeros([LANES], tl.int32)
        lane_sums = tl.zeros([LANES], tl.float32)
        lane_weighted = tl.zeros([LANES], tl.float32)
        for start in range(0, columns, LANES * _WIDTH):
            scores = _load(logits, start + offsets, columns, width, cap, HAS_CAP)
            block_max = tl.max(scores, axis=1)
            new_max = tl.maximum(lane_max, block_max)
            lane_starts = tl.where(block_max > lane_max, start, lane_starts)
            shift = lane_max - new_max
            distances = scores - new_max[:, None]
            exponentials = tl.exp(distances)
            # A logit of -inf must give 0, not NaN.
            weighted = tl.sum(exponentials * tl.maximum(distances, -1e4), axis=1)
            lane_weighted = (lane_weighted + shift * lane_sums) * tl.exp(shift) + weighted
            lane_sums = lane_sums * tl.exp(shift) + tl.sum(exponentials, axis=1)
            lane_max = new_max
        best = tl.max(lane_max, axis=0)
        shift = tl.maximum(lane_max - best, -1e4)
        total = tl.sum(lane_sums * tl.exp(shift), axis=0)
        weighted = tl.sum((lane_weighted + shift * lane_sums) * tl.exp(shift), axis=0)
        candidates = tl.where((lane_max == best)[:, None], lane_starts[:, None] + offsets, columns)
        is_best = _load(logits, candidates, columns, width, cap, HAS_CAP) == best
        guess = tl.min(tl.min(tl.where(is_best, candidates, columns - 1), axis=1), axis=0)
        tl.store(statistics + row, best)
        tl.store(statistics + count + row, total)
        tl.store(statistics + 2 * count + row, at_target)
        tl.store(statistics + 3 * count + row, weighted)
        tl.store(guesses + row, guess.to(tl.int64))
    else:
        best = tl.load(statistics + row)
        total = tl.load(statistics + count + row)
    if GRAD:
        factor = 1.0
        if HAS_FACTORS:
            factor = tl.load(factors + row)
        has_target = target != _IGNORED
        scale = tl.where(has_target, factor / total, 0.0)
        subtracted = tl.where(has_target & is_local, factor, 0.0)
        if STATISTICS:
            tl.debug_barrier()  # all threads have read the logits of the target and of the guess
        for start in range(0, columns, LANES * _WIDTH):
            scores = _load(logits, start + offsets, columns, width, cap, HAS_CAP)
            grad = tl.exp(scores - best) * scale - tl.where(start + offsets == column, subtracted, 0.0)
            if HAS_CAP:
                grad *= 1.0 - (scores / cap) * (scores / cap)
            # Zero also if a logit of a row without a target is not finite.
            grad = tl.where(has_target & (start + offsets < columns), grad, 0.0)
            tl.store(logits + start + offsets, grad.to(logits.dtype.element_ty), mask=start + offsets < width)


def launch(rows: Rows, *, with_statistics: bool, with_grad: bool, lanes: int = 512) -> None:
    """Run the kernel: a `RowFunction`. Each program reads `lanes` times 8 columns at a time."""
    logits, targets, factors = rows.logits, rows.targets, rows.factors
    if not len(logits):
        return
    assert logits.stride(1) == 1
    assert rows.statistics.is_contiguous()
    _cross_entropy_kernel[(len(logits),)](
        logits,
        logits.stride(0),
        targets.contiguous(),
        targets if factors is None else factors.contiguous(),
        rows.statistics,
        rows.guesses,
        rows.columns,
        logits.shape[1],
        rows.first_id,
        rows.num_ids,
        rows.soft_cap,
        HAS_FACTORS=factors is not None,
        HAS_CAP=rows.soft_cap != 0,
        STATISTICS=with_statistics,
        GRAD=with_grad,
        LANES=lanes,
        num_warps=lanes // 32,
    )
