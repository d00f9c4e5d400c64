"""From a TOML file and dotted overrides to a checked `Config`, or to an error that says what to change."""

import difflib
import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from shared.config import Config
from shared.errors import ConfigError


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read `path`, apply overrides like `learner.lr=1e-5`, check everything.

    Without `run.name` in the file, the file's stem is the name. ConfigError names field, value and remedy.
    """
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}). Give the path of a run's TOML file.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    run = values.setdefault("run", {})
    if isinstance(run, dict):
        run.setdefault("name", path.stem)
    for override in overrides:
        _apply_override(values, override)
    return parse_config(values, source=str(path))


def parse_config(values: dict[str, Any], source: str = "config") -> Config:
    """Check plain values. ConfigError lists the faults, unknown keys with the nearest known name.

    Types are taken as written: `steps = true` or `steps = "7"` is no number.
    """
    try:
        return Config.model_validate(values, strict=True)
    except ValidationError as error:
        lines = [_explain(fault) for fault in error.errors()]
        raise ConfigError(f"{source}: " + "\n".join(lines)) from error


def _apply_override(values: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not all(part.strip() for part in key.split(".")):
        raise ConfigError(f"override {override!r} is not of the form section.key=value, such as learner.lr=1e-5")
    *sections, name = key.strip().split(".")
    table = values
    for section in sections:
        table = table.setdefault(section, {})
        if not isinstance(table, dict):
            raise ConfigError(f"override {override!r}: {section!r} is a value, not a section")
    table[name] = _parse_value(text.strip())


def _parse_value(text: str) -> Any:
    """A TOML value where it is one ('3', 'true', '[1]'), otherwise the text itself."""
    try:
        values = tomllib.loads(f"x = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return values["x"] if len(values) == 1 else text


def _explain(fault: Any) -> str:
    field = ".".join(str(part) for part in fault["loc"])
    section = _section_at(fault["loc"])
    if fault["type"] == "extra_forbidden":
        return f"unknown key {field!r}{_nearest(fault['loc'])}"
    if fault["type"] == "missing":
        required = [key for key, info in section.model_fields.items() if info.is_required()] if section else []
        names = " and ".join(f"{field}.{key}" for key in required) or field
        return f"{names} is missing; add it to the file or give it as an override ({names}=...)"
    message = fault["msg"].removeprefix("Value error, ")
    if fault["type"] == "value_error":  # our own cross-field checks already name field, value and remedy
        return message
    if section:
        keys = ", ".join(section.model_fields)
        return f"{field} = {fault['input']!r}: {field} is a section; give its keys, such as [{field}] in a file: {keys}"
    if fault["type"] == "string_type":
        message += f'; put it in quotes: {field} = "{fault["input"]}"'
    return f"{field} = {fault['input']!r}: {message}"


def _nearest(loc: tuple[str | int, ...]) -> str:
    """What an unknown key may have been meant as: a neighbor's name, or a key of that name in another section."""
    section = _section_at(loc[:-1])
    if section is None:
        return ""
    name, known = str(loc[-1]), list(section.model_fields)
    elsewhere = [
        f"{other}.{name}"
        for other in Config.model_fields
        if (found := _section_at((other,))) is not None and name in found.model_fields
    ]
    close = elsewhere or difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else f"; known here: {', '.join(known)}"


def _section_at(loc: tuple[str | int, ...]) -> type[BaseModel] | None:
    section: type[BaseModel] = Config
    for part in loc:
        field = section.model_fields.get(str(part))
        candidate = field.annotation if field else None
        if not (isinstance(candidate, type) and issubclass(candidate, BaseModel)):
            return None
        section = candidate
    return section


def load_resolved(path: Path) -> Config:
    """Read the `config.json` of a run directory back. ConfigError when it is missing or was changed by hand."""
    try:
        return parse_config(json.loads(path.read_text(encoding="utf-8")), source=str(path))
    except (OSError, json.JSONDecodeError) as error:
        raise ConfigError(f"{path}: not a run's config.json: {error}") from error
