"""What a conversion of another tool's configuration says of its keys."""

from artel.config.converters.keys import Converted


def reported(result: Converted) -> dict[str, str]:
    """The lines about what is not carried over, or differs, by their keys; the text was given the name `old`."""
    lines = [line for line in result.not_carried + result.differs if line.startswith("old:")]
    return {line.split(": ")[1].split(" = ")[0]: line for line in lines}
