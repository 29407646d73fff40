"""What a language part takes from the files of the whole: transformers' own table names the whole's tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedModel

from artel.models.loading.conversion import Conversion, LoadingPlan, plan_loading
from artel.models.loading.multimodal.language_part import Whole
from artel.models.loading.safetensors_files import TensorFiles


@dataclass(slots=True)
class PartConversion(Conversion):
    """A conversion of the whole's tensors. Its names, and those of what it gives, are the language part's."""

    whole: Whole | None = None

    def convert(
        self, reference: PreTrainedModel, files: TensorFiles, rows: slice | None = None
    ) -> dict[str, torch.Tensor]:
        """As `Conversion.convert`."""
        assert self.whole is not None
        inner = Conversion(self.whole.name_of(self.first), self.converter, self.sources)
        tensors = inner.convert(self.whole.model, files, rows)
        return {self.whole.name_in_part(name) or name: tensor for name, tensor in tensors.items()}


def plan_whole(whole: Whole, files: TensorFiles) -> LoadingPlan:
    """How the whole is made from its files. The whole remembers it, to be saved the same way."""
    plan = plan_loading(whole.model, files)
    whole.model._weight_conversions = plan.used
    return plan


def plan_part(whole: Whole, plan: LoadingPlan) -> LoadingPlan:
    """What the language part takes, by its own names. What the whole has no place for stays noted."""
    names = {full: name for full in whole.model.state_dict() if (name := whole.name_in_part(full))}
    converted: dict[str, Conversion] = {
        names[full]: _of_part(whole, entry) for full, entry in plan.converted.items() if full in names
    }
    info = replace(
        plan.info,
        missing_keys={names[full] for full in plan.info.missing_keys if full in names},
        mismatched_keys={(names[full], *shapes) for full, *shapes in plan.info.mismatched_keys if full in names},
    )
    same = {names[full]: key for full, key in plan.same.items() if full in names}
    return LoadingPlan(same, converted, info, plan.used, plan.unused)


def _of_part(whole: Whole, entry: Conversion) -> PartConversion:
    names = [whole.name_in_part(name) or name for name in entry.targets]
    first = whole.name_in_part(entry.first) or entry.first
    return PartConversion(first, entry.converter, entry.sources, names, whole)
