"""The language part of a model that takes images too: trained as a text model, and saved inside the whole."""
