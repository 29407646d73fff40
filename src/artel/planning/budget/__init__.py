"""Choose the model and its training for the time that a run may take: `model: {auto: true}`."""
