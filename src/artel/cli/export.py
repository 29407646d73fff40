"""`artel export`: export a trained model to another format."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from artel.cli.common import AsJson, print_json, print_status
from artel.launching.quiet_libraries import quiet_libraries


def export(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="A run, model or adapter folder, or a DeepSpeed checkpoint."),
    ],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to write; it must not exist yet.")],
    settings: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings of the exporter of --to.")
    ] = None,
    merge: Annotated[bool, typer.Option("--merge", help="Merge an adapter into its base model.")] = False,
    gguf: Annotated[
        str | None,
        typer.Option(
            metavar="TYPE",
            help="Write model.gguf and a Modelfile for Ollama: f16, bf16, q8_0, q4_k_m, … llama.cpp is found in "
            "$LLAMA_CPP or on $PATH.",
        ),
    ] = None,
    to: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Exporter: gguf, onnx (encoders) or one of a plugin."),
    ] = None,
    deepspeed: Annotated[
        bool,
        typer.Option("--deepspeed", help="Export a run's newest checkpoint in DeepSpeed's universal format too."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Export a model as a Hugging Face folder, a peft adapter, GGUF, ONNX or a DeepSpeed checkpoint.

    Examples: artel export runs/assistant exported --merge --gguf q4_k_m
              artel export runs/ruroberta-mlm exported --to onnx
    """
    print_status(f"loading {name}")
    quiet_libraries()
    from artel.config import Overrides
    from artel.errors import InputError
    from artel.inference import export as write
    from artel.inference import export_for_deepspeed

    if gguf is not None and to is not None:
        raise InputError.at("--to", "cannot be combined with --gguf TYPE, which means --to gguf", "remove one of them")
    if settings and to is None:
        raise InputError.at(settings[0], "is a setting of an exporter, but --to is missing", "add --to NAME")
    if deepspeed and (merge or gguf is not None or to is not None):
        raise InputError.at("--deepspeed", "cannot be combined with --merge, --gguf or --to", "remove one of them")
    if deepspeed:
        exported = export_for_deepspeed(name, folder)
    else:
        values = Overrides.parse(settings)
        if values.problems:
            raise InputError([problem for problems in values.problems.values() for problem in problems])
        if gguf is not None:
            to, values = "gguf", Overrides({"type": gguf})
        exported = write(name, folder, merge=merge, to=to, settings=values)
    merged = f", merged into {exported.merged_into} in {exported.dtype}" if exported.merged_into else ""
    print_status(f"{exported.kind}{merged}: {exported.folder}")
    if as_json:
        print_json(exported.to_json())
