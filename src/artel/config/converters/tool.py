from artel.config.converters.tools import Tool

__all__ = ["Tool"]
