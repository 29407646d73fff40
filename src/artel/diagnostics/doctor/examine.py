"""The examination: machine, software, environment, choices, and warnings with remedies."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

import artel
from artel import host
from artel.config import RunConfig
from artel.diagnostics.doctor.choices import Case, choices
from artel.diagnostics.doctor.software import environment, install, packages
from artel.diagnostics.doctor.troubles import troubles
from artel.errors import InputError, Problem
from artel.models.loading.check import check_model
from artel.models.loading.model_folder import read_config
from artel.objectives import objective_type
from artel.parallel import local_device
from artel.planning import machine
from artel.planning.machine import in_gib
from artel.planning.outline import outline_model
from artel.storage import cache_folder


@dataclass(frozen=True, slots=True)
class Fact:
    """A fact, as text and as data."""

    text: str
    data: Any


@dataclass(frozen=True, slots=True)
class Examination:
    """Facts by section and name, in the order in which they are printed."""

    sections: dict[str, dict[str, Fact]]
    warnings: list[Problem] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Sections by name, each fact as data: sizes in bytes, choices as value and why."""
        sections = {title: {name: fact.data for name, fact in facts.items()} for title, facts in self.sections.items()}
        return {**sections, "warnings": [asdict(problem) for problem in self.warnings]}

    def __str__(self) -> str:
        lines = []
        for title, facts in self.sections.items():
            width = max(map(len, facts), default=0)
            for_all = title == "choices" and "run" not in self.sections
            lines += [f"{title}, by default (artel doctor RUN prints those for a run)" if for_all else title]
            lines += [*(f"  {name:<{width}}  {fact.text}" for name, fact in facts.items()), ""]
        lines.append("warnings" if self.warnings else "no warnings")
        for problem in self.warnings:
            lines += [f"  {line}" for line in str(problem).splitlines()]
        home = machine.home()
        # The report may be pasted into an issue: it hides the user's name.
        return "\n".join(lines).replace(f"{home}/", "~/") if home and home != Path("/") else "\n".join(lines)


def examine(run: RunConfig | None, variables: Mapping[str, str]) -> Examination:
    """Look at this machine, for a run or for artel's defaults. `variables` are the environment as the user set it.

    Raises InputError for a run that could not be started. Nothing is written and no network is asked, provided that
    HF_HUB_OFFLINE is set, and TORCHINDUCTOR_CACHE_DIR names a folder that is there, before this is imported.
    """
    device = local_device()
    examined = run or RunConfig()
    model = _model(examined)
    gpus = _gpus()
    folders = {"cache folder": cache_folder(), "temporary files": _temporary(variables)}
    if run is not None:
        folders = {"run folder": Path(run.run), **folders}
    disks = {name: machine.disk(folder) for name, folder in folders.items()}
    chosen = choices(Case(examined, device, model))
    sections = {
        "machine": _machine(gpus, disks),
        "software": _software(),
        "environment": {name: Fact(value, value) for name, value in environment(variables).items()},
        **({"run": _run(run, model)} if run is not None else {}),
        "choices": {name: Fact(f"{choice.value} · {choice.why}", asdict(choice)) for name, choice in chosen.items()},
    }
    return Examination(sections, troubles(examined, device, gpus, disks, variables))


def _machine(gpus: list[dict[str, Any]], disks: dict[str, machine.Disk]) -> dict[str, Fact]:
    flags, cores, quota = machine.flags(), host.usable_cores(), host.core_quota()
    memory, shared = host.memory(), machine.shared_memory()
    compiler, headers = machine.cpp_compiler(), machine.python_headers()
    bounded = f", bounded to {in_gib(memory.limit)}" if memory.limit is not None else ""
    facts = {
        "processor": Fact(host.processor(), host.processor()),
        "instructions": Fact(" ".join(flags) or "none of those that matter here", flags),
        "cores": Fact(
            f"{cores} of {os.cpu_count()}" + (f", time for {quota:g}" if quota is not None else ""),
            {"usable": cores, "all": os.cpu_count(), "quota": quota},
        ),
        "memory": Fact(f"{in_gib(memory.total)}{bounded}, {in_gib(memory.free)} free", asdict(memory)),
    }
    for gpu in gpus:
        free = f", {in_gib(gpu['free'])} free" if gpu["free"] is not None else ""
        text = f"{gpu['name']}, {in_gib(gpu['memory'])}{free}, compute capability {gpu['capability']}"
        facts[f"GPU {gpu['number']}"] = Fact(text, gpu)
    if not gpus:
        facts["GPU"] = Fact("none that PyTorch can use", None)
    driver = machine.nvidia_driver()
    if driver:
        facts["NVIDIA driver"] = Fact(driver, driver)
    for name, disk in disks.items():
        refused = "" if disk.writable else ", not writable"
        data = {"folder": str(disk.folder), "free": disk.free, "total": disk.total, "writable": disk.writable}
        facts[name] = Fact(f"{disk.folder}: {in_gib(disk.free)} of {in_gib(disk.total)} free{refused}", data)
    if shared is not None:
        facts["/dev/shm"] = Fact(in_gib(shared), shared)
    facts["C++ compiler"] = Fact(compiler or "none", compiler)
    facts["Python's headers"] = Fact("installed" if headers else "not installed", headers)
    return facts


def _software() -> dict[str, Fact]:
    build_of = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "for processors alone"
    kernels = torch.backends.cpu.get_cpu_capability()
    facts = {
        "system": Fact(machine.system(), machine.system()),
        "Python": Fact(machine.python(), machine.python()),
        "artel": Fact(artel.__version__, artel.__version__),
    }
    by_extra = packages()
    for package in by_extra.pop("", []):
        name, text = package.requirement.name, str(package).partition(" ")[2]
        if name == "torch":
            text += f" {build_of}, kernels for {kernels}"
        facts[name] = Fact(text, {"version": package.installed, "fits": package.fits})
    if "torch" in facts:
        facts["torch"].data.update(cuda=torch.version.cuda, kernels=kernels)
    for extra, members in by_extra.items():
        complete = all(package.fits for package in members)
        text = ", ".join(map(str, members)) + ("" if complete else f": {install(extra)}")
        versions = {package.requirement.name: package.installed for package in members}
        data = {"packages": versions, "installed": complete, "install": None if complete else install(extra)}
        facts[f"extra {extra}"] = Fact(text, data)
    return facts


def _run(run: RunConfig, model: PreTrainedModel | None) -> dict[str, Fact]:
    facts = {"folder": Fact(run.run, run.run), "objective": Fact(run.objective, run.objective)}
    if model is None:
        facts["model"] = Fact(
            f"{run.model.from_}, not in the cache of this machine: what depends on it is left out", None
        )
        return facts
    count = sum(parameter.numel() for parameter in model.parameters())
    data = {"type": model.config.model_type, "class": type(model).__name__, "parameters": count}
    # "about": of a tokenizer that is not trained yet only the requested size is known.
    facts["model"] = Fact(f"{data['class']} ({data['type']}), about {count:,} parameters", data)
    return facts


def _model(run: RunConfig) -> PreTrainedModel | None:
    """The run's model without weights; None for one of the hub that is not in the cache. Raises InputError."""
    kind = objective_type(run)
    problems = kind.problems(run)
    if problems:
        raise InputError(problems)
    name = run.model.from_
    if name is not None and not Path(name).is_dir() and not name.startswith((".", "/", "~")):
        try:
            read_config(name, runs_code=run.model.runs_code)
        except InputError:
            return None
    else:
        check_model(run.model, kind.auto_class)
    return outline_model(run, kind.auto_class)


def _gpus() -> list[dict[str, Any]]:
    gpus = []
    for number in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(number)
        try:
            free: int | None = torch.cuda.mem_get_info(number)[0]
        except RuntimeError:  # another process has it to itself, or its memory is full
            free = None
        capability = f"{about.major}.{about.minor}"
        gpus.append(
            {"number": number, "name": about.name, "memory": about.total_memory, "free": free, "capability": capability}
        )
    return gpus


def _temporary(variables: Mapping[str, str]) -> Path:
    """The folder of compiled layers. `tempfile` would write a file to find it."""
    return Path(variables.get("TORCHINDUCTOR_CACHE_DIR") or variables.get("TMPDIR") or "/tmp")
