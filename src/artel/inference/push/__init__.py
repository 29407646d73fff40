"""A run's model on the Hugging Face hub, with a model card made from the run."""

from artel.inference.push.options import PushOptions
from artel.inference.push.push import Pushed, push

__all__ = ["PushOptions", "Pushed", "push"]
