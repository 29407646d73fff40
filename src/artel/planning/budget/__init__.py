"""A model and how it is trained, chosen for the time that a run may take: `model: {auto: true}`."""
