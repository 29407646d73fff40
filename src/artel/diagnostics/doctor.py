"""`artel doctor`: reports this machine, its software, artel's choices on it with reasons, and likely failures."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

import artel
from artel import host
from artel.config import RunConfig
from artel.diagnostics.machine_problems import machine_problems
from artel.diagnostics.software import environment, install_command, list_packages
from artel.errors import InputError, Problem
from artel.models import Choice
from artel.models.attention_masks import attention_choice
from artel.models.attention_switch import use_artel_attention
from artel.models.compile import compile_choice
from artel.models.device import bf16_is_native, pick_precision
from artel.models.loading.check import check_model
from artel.models.loading.model_folder import read_config
from artel.objectives import objective_type
from artel.parallel import local_device
from artel.planning import machine
from artel.planning.machine import format_gib
from artel.planning.outline import outline_model
from artel.registry import OPTIMIZERS
from artel.storage import cache_folder


@dataclass(frozen=True, slots=True)
class Fact:
    """A fact, as text and as data."""

    text: str
    data: Any


@dataclass(frozen=True, slots=True)
class DoctorReport:
    """Facts by section and name, in the order of printing, and warnings."""

    sections: dict[str, dict[str, Fact]]
    warnings: list[Problem] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return sections by name, each fact as data: sizes in bytes, choices as value and why."""
        sections = {title: {name: fact.data for name, fact in facts.items()} for title, facts in self.sections.items()}
        return {**sections, "warnings": [asdict(problem) for problem in self.warnings]}

    def __str__(self) -> str:
        lines = []
        for title, facts in self.sections.items():
            width = max(map(len, facts), default=0)
            is_default = title == "choices" and "run" not in self.sections
            lines += [f"{title}, by default (artel doctor RUN prints the choices for a run)" if is_default else title]
            lines += [*(f"  {name:<{width}}  {fact.text}" for name, fact in facts.items()), ""]
        lines.append("warnings" if self.warnings else "no warnings")
        for problem in self.warnings:
            lines += [f"  {line}" for line in str(problem).splitlines()]
        home = machine.find_home()
        # The report may be pasted into an issue: it hides the user's name.
        return "\n".join(lines).replace(f"{home}/", "~/") if home and home != Path("/") else "\n".join(lines)


def examine(config: RunConfig | None, variables: Mapping[str, str]) -> DoctorReport:
    """Examine this machine, for a run or for artel's defaults. `variables`: the environment as set by the user.

    Raise InputError for a run that cannot be started on it. Write nothing and use no network, provided that before the
    import of this module HF_HUB_OFFLINE was set, and TORCHINDUCTOR_CACHE_DIR set to an existing folder.
    """
    device = local_device()
    examined_run = config or RunConfig()
    model = _outline_run_model(examined_run)
    gpus = _list_gpus()
    # The folder of compiled layers. `tempfile` would write a file to find it.
    temporary_folder = Path(variables.get("TORCHINDUCTOR_CACHE_DIR") or variables.get("TMPDIR") or "/tmp")
    folders = {"cache folder": cache_folder(), "temporary files": temporary_folder}
    if config is not None:
        folders = {"run folder": Path(config.run), **folders}
    disks = {name: machine.get_disk(folder) for name, folder in folders.items()}
    context = _ChoiceContext(examined_run, device, model)
    choices = {name: choice for name, choose in _CHOICES.items() if (choice := choose(context)) is not None}
    sections = {
        "machine": _machine_facts(gpus, disks),
        "software": _software_facts(),
        "environment": {name: Fact(value, value) for name, value in environment(variables).items()},
        **({"run": _run_facts(config, model)} if config is not None else {}),
        "choices": {name: Fact(f"{choice.value} · {choice.why}", asdict(choice)) for name, choice in choices.items()},
    }
    return DoctorReport(sections, machine_problems(examined_run, device, gpus, disks, variables))


def _machine_facts(gpus: list[dict[str, Any]], disks: dict[str, machine.Disk]) -> dict[str, Fact]:
    flags = machine.read_cpu_flags()
    cores, quota = host.usable_cores(), host.core_quota()
    memory = host.memory()
    shared_memory = machine.get_shared_memory_bytes()
    compiler = machine.find_cpp_compiler()
    has_headers = machine.has_python_headers()
    limit = f", limited to {format_gib(memory.limit)}" if memory.limit is not None else ""
    facts = {
        "processor": Fact(host.processor_name(), host.processor_name()),
        "instructions": Fact(" ".join(flags) or "none that matter here", flags),
        "cores": Fact(
            f"{cores} of {os.cpu_count()}" + (f", time for {quota:g}" if quota is not None else ""),
            {"usable": cores, "all": os.cpu_count(), "quota": quota},
        ),
        "memory": Fact(f"{format_gib(memory.total)}{limit}, {format_gib(memory.free)} free", asdict(memory)),
    }
    for gpu in gpus:
        free = f", {format_gib(gpu['free'])} free" if gpu["free"] is not None else ""
        text = f"{gpu['name']}, {format_gib(gpu['memory'])}{free}, compute capability {gpu['capability']}"
        facts[f"GPU {gpu['number']}"] = Fact(text, gpu)
    if not gpus:
        facts["GPU"] = Fact("none that PyTorch can use", None)
    driver = machine.read_nvidia_driver_version()
    if driver:
        facts["NVIDIA driver"] = Fact(driver, driver)
    for name, disk in disks.items():
        access = "" if disk.writable else ", not writable"
        data = {"folder": str(disk.folder), "free": disk.free, "total": disk.total, "writable": disk.writable}
        facts[name] = Fact(f"{disk.folder}: {format_gib(disk.free)} of {format_gib(disk.total)} free{access}", data)
    if shared_memory is not None:
        facts["/dev/shm"] = Fact(format_gib(shared_memory), shared_memory)
    facts["C++ compiler"] = Fact(compiler or "none", compiler)
    facts["Python's headers"] = Fact("installed" if has_headers else "not installed", has_headers)
    return facts


def _software_facts() -> dict[str, Fact]:
    build = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "for CPUs only"
    kernels = torch.backends.cpu.get_cpu_capability()
    facts = {
        "system": Fact(machine.describe_system(), machine.describe_system()),
        "Python": Fact(machine.describe_python(), machine.describe_python()),
        "artel": Fact(artel.__version__, artel.__version__),
    }
    by_extra = list_packages()
    for package in by_extra.pop("", []):
        name, text = package.requirement.name, str(package).partition(" ")[2]
        if name == "torch":
            text += f" {build}, kernels for {kernels}"
        facts[name] = Fact(text, {"version": package.installed, "fits": package.fits})
    if "torch" in facts:
        facts["torch"].data.update(cuda=torch.version.cuda, kernels=kernels)
    for extra, members in by_extra.items():
        is_complete = all(package.fits for package in members)
        install = None if is_complete else install_command(extra)
        text = ", ".join(map(str, members)) + (f": {install}" if install else "")
        versions = {package.requirement.name: package.installed for package in members}
        data = {"packages": versions, "installed": is_complete, "install": install}
        facts[f"extra {extra}"] = Fact(text, data)
    return facts


def _run_facts(config: RunConfig, model: PreTrainedModel | None) -> dict[str, Fact]:
    facts = {"folder": Fact(config.run, config.run), "objective": Fact(config.objective, config.objective)}
    if model is None:
        facts["model"] = Fact(
            f"{config.model.from_}, not in the cache of this machine: choices that depend on it are not shown", None
        )
        return facts
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    data = {"type": model.config.model_type, "class": type(model).__name__, "parameters": num_parameters}
    # "about", because the size of an untrained tokenizer is only a request.
    facts["model"] = Fact(f"{data['class']} ({data['type']}), about {num_parameters:,} parameters", data)
    return facts


def _outline_run_model(config: RunConfig) -> PreTrainedModel | None:
    """Return the run's model without weights. None if it is on the hub but not in the cache.

    Raise InputError if the run file does not fit the objective or the model cannot be built.
    """
    objective = objective_type(config)
    problems = objective.problems(config)
    if problems:
        raise InputError(problems)
    name = config.model.from_
    if name is not None and not Path(name).is_dir() and not name.startswith((".", "/", "~")):
        try:
            read_config(name, runs_code=config.model.runs_code)
        except InputError:
            return None
    else:
        check_model(config.model, objective.auto_class)
    return outline_model(config, objective.auto_class)


def _list_gpus() -> list[dict[str, Any]]:
    gpus = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        try:
            free: int | None = torch.cuda.mem_get_info(index)[0]
        except RuntimeError:  # used exclusively by another process, or its memory is full
            free = None
        gpu = {"number": index, "name": properties.name, "memory": properties.total_memory, "free": free}
        gpus.append(gpu | {"capability": f"{properties.major}.{properties.minor}"})
    return gpus


@dataclass(frozen=True, slots=True)
class _ChoiceContext:
    """A run or the defaults, with its model on the meta device, if the model is known."""

    config: RunConfig
    device: torch.device
    model: PreTrainedModel | None


def _choose_precision(context: _ChoiceContext) -> Choice:
    train = context.config.train
    device = "CPU" if context.device.type == "cpu" else "GPU"
    value = pick_precision(train.precision, context.device, train.weights)
    if train.precision != "auto":
        return Choice(value, f"train.precision: {train.precision}")
    if bf16_is_native(context.device):
        return Choice(value, f"the {device} multiplies bf16 in hardware")
    if value == "bf16":
        return Choice(value, "train.weights: bf16")
    return Choice(value, f"the {device} would emulate bf16, which is very slow")


def _choose_attention(context: _ChoiceContext) -> Choice | None:
    if context.model is None:
        return None
    use_artel_attention(context.model)
    isolated = objective_type(context.config).uses_document_mask(context.config)
    return attention_choice(context.model, context.device, documents=isolated)


def _choose_compile(context: _ChoiceContext) -> Choice:
    mode, steps, budget = context.config.train.compile, context.config.train.steps, context.config.train.budget
    quantize = context.config.model.quantize
    if steps is not None or budget is not None:
        return compile_choice(mode, context.device, steps, budget, quantize)
    short, long = (compile_choice(mode, context.device, steps, None, quantize) for steps in (1, 10**9))
    if short.value == long.value:
        return Choice(short.value, short.why)
    return Choice(f"{long.value} in a long run, {short.value} in a short one", "compiling takes time first")


def _choose_optimizer(context: _ChoiceContext) -> Choice:
    name = context.config.train.optimizer
    suffix = "; weights in bf16, rounded stochastically" if context.config.train.weights == "bf16" else ""
    return Choice(name, f"{OPTIMIZERS[name].summary}{suffix}")


def _choose_micro_batch(context: _ChoiceContext) -> Choice:
    value = context.config.train.micro_batch
    if value == "auto":
        return Choice("auto", "the largest that fits is found when the run starts, and remembered")
    return Choice(str(value), f"train.micro_batch: {value}")


def _choose_encoder(context: _ChoiceContext) -> Choice:
    if find_spec("fastokens") is None:
        return Choice("tokenizers", f"fastokens, up to 20 times as fast, is not installed: {install_command('fast')}")
    return Choice("fastokens", "installed; it encodes large texts while its ids equal those of tokenizers")


def _choose_threads(context: _ChoiceContext) -> Choice:
    value = context.config.train.threads
    if value is not None:
        return Choice(str(value), f"train.threads: {value}")
    return Choice(str(host.usable_cores()), "one per usable core, divided among the processes of a run")


_CHOICES: dict[str, Callable[[_ChoiceContext], Choice | None]] = {
    "precision": _choose_precision,
    "attention": _choose_attention,
    "compile": _choose_compile,
    "optimizer": _choose_optimizer,
    "micro-batch": _choose_micro_batch,
    "threads": _choose_threads,
    "text encoder": _choose_encoder,
}
"""Name -> function that makes the choice, or returns None if it depends on an unknown model."""
