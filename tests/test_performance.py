"""The time of a step from its operations: closed forms, monotony. No clock is read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from artel.diagnostics.hardware_operators import ON_GPU, Sizes, measure
from artel.planning.hardware import ACCELERATORS, Hardware, find_hardware
from artel.planning.operations import (
    ATTENTION,
    COLLECTIVE,
    DISK,
    DISPATCH,
    HOST,
    MATMUL,
    MEMORY,
    PAGEABLE,
    PINNED,
    TO_DEVICE,
    TO_HOST,
    TRANSFER,
    WAITED,
    Operation,
)
from artel.planning.performance import (
    MeasuredCost,
    PublicCost,
    Range,
    extrapolate,
    find_slowest_stage,
    forecast_run,
    pipeline_bubble,
    predict_step_time,
)
from artel.planning.rates import Rates, measurement_identity, read_rates, save_rates

CPU = torch.device("cpu")


@pytest.fixture
def node() -> Hardware:
    return find_hardware("h100-80gb:8", nodes=2)


def test_an_all_reduce_sends_each_part_twice_and_a_gather_once(node: Hardware) -> None:
    cost = PublicCost(node)
    ranks = tuple(range(8))

    def seconds(name: str, size: int, ranks: tuple[int, ...] = ranks) -> float:
        return cost.seconds(Operation(COLLECTIVE, name, bytes=size, ranks=ranks))

    latency = seconds("c10d.allreduce_", 0)
    assert seconds("c10d.allreduce_", 8 * 10**9) - latency == pytest.approx(2 * 7e9 / 370e9)
    gathered = seconds("c10d._allgather_base_", 8 * 10**9) - seconds("c10d._allgather_base_", 0)
    assert gathered == pytest.approx(7e9 / 370e9)
    # Eight ranks on two nodes go by the network, 50 GB/s each; one rank alone sends nothing.
    across = seconds("c10d.allreduce_", 8 * 10**9, (0, 1, 2, 3, 8, 9, 10, 11))
    assert across == pytest.approx(2 * 7e9 / 50e9, rel=1e-3)
    assert seconds("c10d.allreduce_", 8 * 10**9, (3,)) == 0


def test_a_product_takes_the_longer_of_computing_and_reading(node: Hardware) -> None:
    cost = PublicCost(node)
    large = Operation(MATMUL, "aten.mm", "bf16", "nn", flops=10**15, bytes=10**6)
    assert cost.seconds(large) == pytest.approx(1 / (0.9895 * 0.803))
    thin = Operation(MATMUL, "aten.mm", "bf16", "nn", flops=10**6, bytes=335 * 10**9)
    assert cost.seconds(thin) == pytest.approx(0.1 / 0.84)


def test_more_work_takes_longer_and_faster_hardware_less(node: Hardware) -> None:
    def step(flops: int, hardware: Hardware) -> float:
        work = {Operation(MATMUL, "aten.mm", "bf16", "nn", flops, 10**9): 3, Operation(MEMORY, "aten.add"): 1}
        return predict_step_time(work, hardware).seconds.mid

    assert step(10**13, node) < step(2 * 10**13, node)
    assert step(10**13, find_hardware("b200:8")) < step(10**13, node) < step(10**13, find_hardware("a100-80gb:8"))
    time = predict_step_time({Operation(MATMUL, "aten.mm", "bf16", "nn", 10**13): 1}, node)
    assert time.seconds.low < time.seconds.mid < time.seconds.high
    tokens = time.tokens_per_second(1000)
    assert tokens.low < tokens.mid < tokens.high
    assert tokens.mid == pytest.approx(1000 / time.seconds.mid)


def test_gradients_hide_behind_computing_on_a_gpu_and_those_of_tensor_parallelism_do_not(node: Hardware) -> None:
    ranks = tuple(range(8))
    computing = Operation(MATMUL, "aten.mm", "bf16", "nn", 10**15)
    buckets = {Operation(COLLECTIVE, "c10d.allreduce_", bytes=10**8, ranks=ranks): 10}
    waited = {Operation(COLLECTIVE, "_c10d_functional.all_reduce", bytes=10**8, ranks=ranks): 10}
    alone = predict_step_time({computing: 1}, node).seconds.mid
    one = PublicCost(node).seconds(next(iter(buckets)))
    assert predict_step_time({computing: 1, **buckets}, node).seconds.mid == pytest.approx(alone + 2 * one)
    assert predict_step_time({computing: 1, **waited}, node).seconds.mid == pytest.approx(alone + 10 * one)
    assert predict_step_time(buckets, node).seconds.mid == pytest.approx(10 * one)  # nothing to hide behind


def test_offloaded_weights_wait_for_pcie_and_the_optimizer_for_the_hosts_memory() -> None:
    """By the DGX-2's published rates: 12 GB/s for one GPU, 3 for each of 16; 256 GB/s of host memory."""
    one, all16 = find_hardware("v100-32gb:1"), find_hardware("v100-32gb:16")

    def seconds(operation: Operation, hardware: Hardware) -> float:
        return predict_step_time({operation: 1}, hardware).seconds.mid

    copied = Operation(TRANSFER, TO_DEVICE, PINNED, bytes=12 * 10**9)
    assert (seconds(copied, one), seconds(copied, all16)) == pytest.approx((1, 4))
    assert seconds(replace(copied, dtype=PAGEABLE), one) == pytest.approx(2)
    stepped = Operation(HOST, "optimizer", bytes=256 * 10**9)
    assert (seconds(stepped, one), seconds(stepped, all16)) == pytest.approx((1 / 0.43, 16 / 0.43))
    assert seconds(Operation(DISK, WAITED, bytes=16 * 10**8), all16) == pytest.approx(1)
    # Both directions at once, beside the computation; the step on the host waits for them.
    computing = Operation(MATMUL, "aten.mm", "fp16", "nn", 3 * 125 * 75 * 10**10)
    back = Operation(TRANSFER, TO_HOST, PINNED, bytes=60 * 10**9)
    time = predict_step_time({computing: 1, copied: 1, back: 1, stepped: 1}, one)
    assert time.seconds.mid == pytest.approx(5 + 1 / 0.43)
    assert time.by_kind[TRANSFER] == pytest.approx(2)
    assert predict_step_time({computing: 1, copied: 1}, one).by_kind[TRANSFER] == 0
    assert predict_step_time({computing: 1, replace(copied, name=WAITED): 1}, one).by_kind[TRANSFER] == pytest.approx(1)


def test_a_gpu_waits_for_its_host_where_operations_are_small(node: Hardware) -> None:
    """A thousand products that take nothing take the time in which the host starts them; large ones hide it."""
    small = {Operation(MATMUL, "aten.mm", "bf16", "nn", 10**6): 1000}
    large = {Operation(MATMUL, "aten.mm", "bf16", "nn", 10**12): 1000}
    assert predict_step_time(small, node).seconds.mid == pytest.approx(1000 * 1e-5)
    assert predict_step_time(large, node).by_kind["launches"] == 0.0


def test_the_bubble_of_each_schedule() -> None:
    assert pipeline_bubble("1f1b", 4, 12) == pipeline_bubble("gpipe", 4, 12) == 3 / 12
    assert pipeline_bubble("interleaved", 4, 12) == 3 / 24
    assert pipeline_bubble("zero_bubble", 4, 12) == 0
    assert pipeline_bubble("sequential", 4, 12) == 3
    work = {Operation(MATMUL, "aten.mm", "bf16", "nn", 10**15): 1}
    node = find_hardware("h100-80gb:4")
    assert predict_step_time(work, node, bubble=0.25).seconds.mid == pytest.approx(
        1.25 * predict_step_time(work, node).seconds.mid
    )


def test_a_stage_waits_while_the_others_run_a_micro_batch() -> None:
    """Of two micro-batches: 10 s of the slowest stage, of which 2 are the optimizer's, and 6 / 2 of the other one."""
    assert find_slowest_stage("1f1b", 2, [7.0, 10.0], [6.0, 8.0]) == (1, 3 / 10)
    assert find_slowest_stage("1f1b", 12, [8.0] * 4, [8.0] * 4) == (0, pipeline_bubble("1f1b", 4, 12))
    assert find_slowest_stage("1f1b", 12, [8.0], [8.0]) == (0, 0.0)


@pytest.mark.parametrize("name", ACCELERATORS)
def test_every_accelerator_has_a_time_for_every_precision(name: str) -> None:
    for dtype in ("fp32", "tf32", "bf16", "fp16", "fp8"):
        work = {Operation(MATMUL, "aten.mm", dtype, "nn", 10**15): 1}
        assert 0.1 < predict_step_time(work, find_hardware(name)).seconds.mid < 1000


def test_hours_energy_and_cost(node: Hardware) -> None:
    work = {Operation(MATMUL, "aten.mm", "bf16", "nn", 10**15): 1}
    step = predict_step_time(work, node)
    run = forecast_run(step, tokens=1000, hours=Range(0.8, 1.0, 1.2), hardware=node, price_per_hour=40.0)
    assert run.tokens_per_second.mid == pytest.approx(1000 / step.seconds.mid)
    assert run.energy_kwh is not None
    assert run.cost is not None
    assert run.energy_kwh.mid == pytest.approx(16 * 0.7, rel=1e-3)
    assert run.cost.mid == pytest.approx(40, rel=1e-3)
    assert forecast_run(step, 1000, run.hours, find_hardware("cpu")).cost is None


def test_a_model_of_more_layers_from_two_shorter_ones() -> None:
    layer, head = Operation(MATMUL, "aten.mm", flops=2), Operation(MATMUL, "aten.mm", flops=3)
    assert extrapolate({layer: 2, head: 1}, {layer: 4, head: 1}, factor=10) == {layer: 24, head: 1}


def test_an_operation_on_all_layers_grows_with_them() -> None:
    """Like an optimizer's step, here of two groups of weights. Another operation runs once per layer."""

    def adamw(size: int) -> Operation:
        return Operation(MEMORY, "aten._fused_adamw_", bytes=size)

    small, large = {adamw(110): 1, adamw(7): 1, adamw(2): 2}, {adamw(120): 1, adamw(8): 1, adamw(2): 3}
    assert extrapolate(small, large, factor=5) == {adamw(170): 1, adamw(13): 1, adamw(2): 8}


def test_rates_are_exact_where_they_were_measured_and_keep_between_and_beyond() -> None:
    rates = Rates(1, {"memory aten.add fp32": [(100, 1.0), (10_000, 25.0)]})
    key = "memory aten.add fp32"
    assert (rates.seconds(key, 100), rates.seconds(key, 10_000)) == (1.0, 25.0)
    assert rates.seconds(key, 50) == 0.5  # at 100 a second
    assert rates.seconds(key, 20_000) == 50.0  # at 400 a second
    assert rates.seconds(key, 1000) == pytest.approx(1000 / 200)  # halfway along the logarithm
    cost = MeasuredCost(rates)
    assert cost.seconds(Operation(MEMORY, "aten.unheard_of", bytes=100)) == 1.0


def test_what_was_not_measured_has_the_rate_of_the_nearest_that_was() -> None:
    backward = "aten._scaled_dot_product_flash_attention_for_cpu_backward"
    names = ("memory aten.add fp32", "memory aten.silu bf16", "product bf16 nn", "product fp32 nt",
             "attention bf16 backward", "attention bf16 backward by PyTorch")  # fmt: skip
    points = {name: [(1, float(number))] for number, name in enumerate(names, 1)}

    def seconds(kind: str, name: str, dtype: str, layout: str = "", *, is_backward: bool = False) -> float:
        operation = Operation(kind, name, dtype, layout, flops=1, bytes=1, is_backward=is_backward)
        return MeasuredCost(Rates(1, points)).seconds(operation)

    assert seconds(MEMORY, "aten.silu", "fp32") == 2.0
    assert seconds(MEMORY, "aten.erf", "bf16") == 1.0
    assert seconds(MATMUL, "aten.mm", "bf16", "tt") == 3.0
    assert seconds(MATMUL, "aten.mm", "fp16", "nn") == 3.0
    assert seconds(MATMUL, "aten.mm", "fp32", "nt") == 4.0
    assert seconds(ATTENTION, "artel.cpu_attention_backward", "bf16", is_backward=True) == 5.0
    assert seconds(ATTENTION, backward, "bf16", is_backward=True) == 6.0
    assert seconds(ATTENTION, backward, "fp32", is_backward=True) == 6.0
    assert seconds(ATTENTION, "artel.cpu_attention", "bf16") == 5.0  # the other pass


def test_processes_wait_where_they_meet() -> None:
    """Two meetings, before each of which both compute for a second."""
    rates = Rates(2, {"product fp32 nn": [(1, 1.0)], "all_gather": [(8, 0.25)], "waiting": [(1.0, 0.5)]})
    gathered = Operation(COLLECTIVE, "c10d._allgather_base_", bytes=8, ranks=(0, 1))
    alone = Operation(COLLECTIVE, "c10d.allreduce_", bytes=8, ranks=(0,))
    product = Operation(MATMUL, "aten.mm", "fp32", "nn", flops=1)
    time = predict_step_time({product: 2, gathered: 2, alone: 5}, find_hardware("cpu:2"), rates)
    assert (time.by_kind["collective"], time.by_kind["waiting"]) == (2 * 0.25, 2 * 0.5)
    assert time.seconds.mid == 2 + 0.5 + 1.0


def test_a_cpu_starts_each_operator_and_computes_experts_one_after_another() -> None:
    points = {"product fp32 nn": [(100, 1.0), (10_000, 10.0)], "start": [(10, 0.5)], "dispatch": [(4, 2.0)],
              "all_reduce": [(1000, 3.0)]}  # fmt: skip
    rates, node = Rates(2, points), find_hardware("cpu:2")
    grouped = Operation(MATMUL, "aten._grouped_mm", "fp32", "nn", flops=800, num_matmuls=8)
    dispatched = Operation(DISPATCH, "dtensor")
    expected = {"matmul": 2 * 8 * 1.0, "dispatch": 6 * 0.5, "launches": 2 * 0.05, "collective": 0.0, "waiting": 0.0}
    assert predict_step_time({grouped: 2, dispatched: 6}, node, rates).by_kind == expected
    exchanged = Operation(COLLECTIVE, "c10d.allreduce_", bytes=4, ranks=(0, 1))
    assert MeasuredCost(rates).seconds(exchanged) == 3.0  # processes must meet, however small the message


def test_a_measurement_is_kept_for_this_device_and_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ARTEL_CACHE", str(tmp_path))
    assert read_rates(1, CPU) is None
    measured = [Rates(1, {"fused": [(10, 1.0)]}), Rates(2, {"fused": [(10, 3.0)]})]
    path = save_rates(measurement_identity(CPU), measured)
    for processes, seconds in ((1, 1.0), (2, 3.0), (4, 6.0)):
        rates = read_rates(processes, CPU)
        assert rates is not None
        assert rates.seconds("fused", 10) == seconds
    save_rates(measurement_identity(CPU) | {"torch": "1.0"}, measured)
    assert read_rates(1, CPU) is None
    path.write_text("{}")
    assert read_rates(1, CPU) is None


def test_a_damaged_measurement_is_told_and_not_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ARTEL_CACHE", str(tmp_path))
    about = measurement_identity(CPU)
    path = save_rates(about, [Rates(1, {"fused": [(10, 1.0)]})])
    torn = path.read_bytes()[:-9]
    wrong = (*({"1": {"fused": points}} for points in ([], [[10]], [[10, -1.0]], [[0, 1.0]])), {"x": {}}, [], "1")
    whole = (json.dumps(about | {"processes": processes}).encode() for processes in wrong)
    for content in (b"[]", b'"x"', b"null", b"1", b"", torn, *whole):
        caplog.clear()
        path.write_bytes(content)
        assert read_rates(1, CPU) is None
        assert f"{path}: is damaged" in caplog.text, content
        assert "artel hardware measures it again" in caplog.text


@pytest.mark.parametrize("width", [Sizes().width, ON_GPU.width])
def test_what_is_measured_is_what_a_step_asks_for(width: int) -> None:
    """On tiny sizes: the names of a measurement are those by which a step's operations are looked up."""
    sizes = Sizes(seconds=0, matmuls=((16, 8, 32),), heads=((1, 2, 16, 8),), elements=(2 * width,), width=width,
                  vocabulary=64, cache_elements=8)  # fmt: skip
    measured = measure(CPU, can_compile=False, sizes=sizes)
    assert all(size > 0 and seconds > 0 for points in measured.values() for size, seconds in points)
    products = {f"product {dtype} {layout}" for dtype in ("bf16", "fp32") for layout in ("nn", "nt", "tn")}
    attention = {f"attention {dtype} {way}" for dtype in ("bf16", "fp32") for way in ("forward", "backward by PyTorch")}
    memory = {f"memory aten.{name} fp32" for name in ("add", "native_layer_norm", "_fused_adamw_", "silu")}
    memory |= {f"memory aten.{name} bf16" for name in ("_to_copy", "silu", "clone")}
    assert products | attention | memory | {"start"} <= measured.keys()
