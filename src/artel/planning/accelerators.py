"""Public figures of accelerators: memory, bandwidths and power, each from the maker's data sheet.

Peak FLOP/s stand in `models.flops`, by the name that the device reports. Bandwidths are peaks, of one accelerator in
one direction: data sheets give both directions together for NVLink and Infinity Fabric, and some do for PCIe.
"""

from __future__ import annotations

from typing import NamedTuple


class Accelerator(NamedTuple):
    """One kind of accelerator, as `planning.hardware` looks it up."""

    reports: str
    """The name by which CUDA knows it, without the maker's; its peak FLOP/s stand under that name."""
    gib: float
    """What PyTorch can see: the "total capacity" of its message when memory runs out, the smallest one reported in
    public. It is less than the data sheet's, as the driver and error correction take their share."""
    memory_bandwidth: float
    """GB/s."""
    link: str
    link_bandwidth: float
    """GB/s to the others of its node."""
    network_bandwidth: float
    """GB/s to other nodes: the adapters of the maker's own machine with eight of them, or of a common one."""
    watts: float
    """The most that the board may draw."""
    source: str


# Gen 3, 4 and 5 of PCIe x16, in one direction.
_PCIE3, _PCIE4, _PCIE5 = ("PCIe 3", 16.0), ("PCIe 4", 32.0), ("PCIe 5", 64.0)
# Networks of one accelerator: an adapter of 400, 200 or 100 Gb/s, or an eighth of 200 Gb/s in a node without one each.
_NDR, _HDR, _EDR, _SHARED = 50.0, 25.0, 12.5, 3.125

ACCELERATORS: dict[str, Accelerator] = {
    "h100-80gb": Accelerator(
        "H100 80GB HBM3", 79.10, 3350, "NVLink 4", 450, _NDR, 700, "NVIDIA H100 data sheet (SXM5); DGX H100 data sheet"
    ),
    "h100-80gb-pcie": Accelerator("H100 PCIe", 79.10, 2000, *_PCIE5, _NDR, 350, "NVIDIA H100 PCIe product brief"),
    "h100-96gb": Accelerator(
        "H100",
        95.04,
        2400,
        "NVLink 4",
        450,
        _NDR,
        500,
        "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md (HBM2e, 2.4 TB/s, 500 W); links of the SXM5",
    ),
    "h200": Accelerator("H200", 139.80, 4800, "NVLink 4", 450, _NDR, 700, "NVIDIA H200 data sheet (SXM)"),
    "b200": Accelerator(
        "B200", 178.35, 8000, "NVLink 5", 900, _NDR, 1000, "NVIDIA HGX B200 data sheet; DGX B200 data sheet"
    ),
    "a100-40gb": Accelerator(
        "A100-SXM4-40GB", 39.38, 1555, "NVLink 3", 300, _HDR, 400, "NVIDIA A100 data sheet (SXM4); DGX A100 data sheet"
    ),
    "a100-80gb": Accelerator(
        "A100-SXM4-80GB", 79.14, 2039, "NVLink 3", 300, _HDR, 400, "NVIDIA A100 data sheet (SXM4); DGX A100 data sheet"
    ),
    "a100-40gb-pcie": Accelerator("A100-PCIE-40GB", 39.38, 1555, *_PCIE4, _HDR, 250, "NVIDIA A100 data sheet (PCIe)"),
    "a100-80gb-pcie": Accelerator("A100 80GB PCIe", 79.14, 1935, *_PCIE4, _HDR, 300, "NVIDIA A100 data sheet (PCIe)"),
    "l40s": Accelerator("L40S", 44.39, 864, *_PCIE4, _HDR, 350, "NVIDIA L40S data sheet"),
    "l4": Accelerator("L4", 22.03, 300, *_PCIE4, _EDR, 72, "NVIDIA L4 data sheet"),
    "a10": Accelerator("A10", 21.99, 600, *_PCIE4, _EDR, 150, "NVIDIA A10 data sheet"),
    "t4": Accelerator("Tesla T4", 14.56, 320, *_PCIE3, _SHARED, 70, "NVIDIA T4 product brief"),
    "v100-16gb": Accelerator(
        "Tesla V100-SXM2-16GB", 15.77, 900, "NVLink 2", 150, _EDR / 2, 300, "NVIDIA V100 data sheet; DGX-1 data sheet"
    ),
    "v100-32gb": Accelerator(
        "Tesla V100-SXM2-32GB", 31.73, 900, "NVLink 2", 150, _EDR / 2, 300, "NVIDIA V100 data sheet; DGX-1 data sheet"
    ),
    "v100-16gb-pcie": Accelerator("Tesla V100-PCIE-16GB", 15.77, 900, *_PCIE3, _SHARED, 250, "NVIDIA V100 data sheet"),
    "v100-32gb-pcie": Accelerator("Tesla V100-PCIE-32GB", 31.73, 900, *_PCIE3, _SHARED, 250, "NVIDIA V100 data sheet"),
    "rtx-3090": Accelerator("GeForce RTX 3090", 23.57, 936, *_PCIE4, _SHARED, 350, 'NVIDIA white paper "GA102"'),
    "rtx-4090": Accelerator("GeForce RTX 4090", 23.52, 1008, *_PCIE4, _SHARED, 450, 'NVIDIA white paper "Ada"'),
    "rtx-5090": Accelerator(
        "GeForce RTX 5090", 31.34, 1792, *_PCIE5, _SHARED, 575, 'NVIDIA white paper "RTX Blackwell"'
    ),
    "mi300x": Accelerator(
        "AMD Instinct MI300X", 191.69, 5300, "Infinity Fabric", 448, _NDR, 750, "AMD Instinct MI300X data sheet"
    ),
}
