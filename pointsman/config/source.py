"""Where documents come from: a file, or text with a folder that its paths are relative to."""

from pathlib import Path

from pointsman.config.problems import Problem
from pointsman.errors import ConfigError


def text_of(path: Path) -> str:
    """The text of a file. Raises `ConfigError` if there is none."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError([Problem(str(path), 0, "", f"cannot be read: {error.strerror}")]) from error
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ConfigError([Problem(str(path), line, "", "this is not UTF-8 text")]) from error
