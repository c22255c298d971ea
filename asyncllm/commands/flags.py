"""Command-line flags and YAML keys made from dataclass fields: one definition, three spellings.

A field `max_num_seqs: int` is the flag `--max-num-seqs`, also taken as `--max_num_seqs`, and the
YAML key of either spelling. Only what was given is returned, so a dataclass's own defaults hold and
the command line can win over the file.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import types
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

import yaml

from asyncllm.commands.flag_groups import GROUPS, OTHER

SHORT = {
    "quantization": ("-q",),
    "tensor_parallel_size": ("-tp",),
    "data_parallel_size": ("-dp",),
    "pipeline_parallel_size": ("-pp",),
    "enable_expert_parallel": ("-ep",),
}
_MULTIPLES = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}


class FlagParser(argparse.ArgumentParser):
    """Reports an error in two lines: the usage, with all flags, would push it off the screen.

    So would a help of all flags: where they come from parents, `--help` names their groups, and
    `--help=GROUP` shows one.
    Flags are not abbreviated: an abbreviation may mean another one in the next version.
    """

    def __init__(self, **options: Any) -> None:
        has_groups = bool(options.get("parents"))
        if has_groups:
            options["add_help"] = False
        super().__init__(**{"allow_abbrev": False, **options})
        if has_groups:
            self.add_argument("-h", "--help", action=_Help)

    def format_help(self) -> str:
        """Without the flags that are in groups of flag_groups.py, which are named."""
        groups = self._flag_groups()
        if not groups:
            return super().format_help()
        words = [str(each.metavar or each.dest) for each in self._get_positional_actions()]
        usage = " ".join(f"[{word}]" if word == "MODEL" else word for word in words)
        own = [group for group in self._action_groups if group.title not in groups]
        lines = [f"  {name:11} {group.description}" for name, group in groups.items()]
        return (
            f"usage: {self.prog} {usage} [flags]\n\n{self._format(own)}\nflags:\n"
            + "\n".join(lines)
            + f"\n\n{self.prog} --help=GROUP lists the flags of a group, --help=all of all groups; "
            "--help=FLAG says\nwhat is known of one.\n"
        )

    def format_flags(self, asked: str) -> str:
        """The text of `--help=asked`: "all", a group, or a part of a name. Raises `ValueError`."""
        groups = self._flag_groups()
        if asked == "all":
            return self._format(self._action_groups)
        if asked in groups:
            return self._format([groups[asked]])
        word = normalise([f"--{asked.lstrip('-')}"])[0][2:]
        formatter = self._get_formatter()
        found = [
            action for action in self._actions if any(word in o for o in action.option_strings)
        ]
        formatter.add_arguments(found)
        about = [getattr(action, "about", "") for action in found]  # vLLM's, which are not listed
        text = "\n".join(filter(None, [formatter.format_help().strip("\n"), *about]))
        if not text:
            raise ValueError(f"--help={asked}: no flag has that name, and the groups are "
                             f"{', '.join(groups)}, all")  # fmt: skip
        return f"{text}\n"

    def _format(self, groups: Sequence[Any]) -> str:
        formatter = self._get_formatter()
        for group in groups:
            formatter.start_section(group.title)
            formatter.add_text(group.description)
            formatter.add_arguments(group._group_actions)
            formatter.end_section()
        return formatter.format_help()

    def _flag_groups(self) -> dict[str, Any]:
        known = {*GROUPS, OTHER}
        return {str(each.title): each for each in self._action_groups if each.title in known}

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\nSee '{self.prog} --help'.\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse unknown flags here: a command's own parser knows which flags are similar."""
        namespace, unknown = super().parse_known_args(args, namespace)
        if unknown:
            flags = [word for word in unknown if word.startswith("-")]
            self.error(f"unrecognized arguments: {', '.join(map(self._shown, flags or unknown))}")
        return namespace, unknown

    def _shown(self, word: str) -> str:
        known = [flag for flag in self._option_string_actions if flag.startswith("--")]
        near = get_close_matches(word.partition("=")[0], known, 1)
        return f"{word} (did you mean {near[0]}?)" if near else word


class _Help(argparse.Action):
    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        hidden = argparse.SUPPRESS
        super().__init__(option_strings, hidden, "?", default=hidden, metavar="GROUP")
        self.help = "this, or the flags of a group"

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option: Any = None
    ) -> None:
        assert isinstance(parser, FlagParser)
        try:
            text = parser.format_help() if values is None else parser.format_flags(values)
        except ValueError as error:
            parser.error(str(error))
        print(text, end="")
        parser.exit(0)


def add_flags(parser: argparse.ArgumentParser, record: type) -> None:
    """One flag for each field of a dataclass, in its group."""
    groups = {group.title: group for group in parser._action_groups}
    hints = get_type_hints(record)
    fields = {field.name: field for field in dataclasses.fields(record)}
    grouped = {name for _, names in GROUPS.values() for name in names.split()}
    rest = {OTHER: ("the rest", " ".join(fields.keys() - grouped))}
    for title, (about, names) in (GROUPS | rest).items():
        members = [fields[name] for name in names.split() if name in fields]
        if members and title not in groups:
            groups[title] = parser.add_argument_group(title, about)
        for field in members:
            how_to_parse = _how_to_parse(hints[field.name])
            if field.name == "max_model_len":
                how_to_parse["type"] = _window
            groups[title].add_argument(
                f"--{field.name.replace('_', '-')}",
                *SHORT.get(field.name, ()),
                dest=field.name,
                default=argparse.SUPPRESS,
                help=_help(field),
                **how_to_parse,
            )


def normalise(argv: Sequence[str]) -> list[str]:
    """`--max_num_seqs=8` -> `--max-num-seqs=8`; values are left alone.

    vLLM's short ways too: `--flag.key.inner 1` -> `--flag={"key": {"inner": 1}}`, `-O3`.
    """
    words, given, nested = iter(argv), [], dict[str, dict[str, Any]]()
    for word in words:
        name, equals, value = word.partition("=")
        if optimization := re.fullmatch(r"-O(\d*)", name):
            given.append(f"--optimization-level={optimization[1] or value or next(words, '')}")
        elif name.startswith("--") and "." in name:
            flag, *keys = name.split(".")
            inner = nested.setdefault(_hyphens(flag), {})
            for key in keys[:-1]:
                if not isinstance(inner.get(key), dict):
                    inner[key] = {}
                inner = inner[key]
            inner[keys[-1]] = _value(value if equals else next(words, ""))
        else:
            given.append(_hyphens(word))
    return given + [f"{flag}={json.dumps(value)}" for flag, value in nested.items()]


def field_names(record: type) -> set[str]:
    return {field.name for field in dataclasses.fields(record)}


def pick(record: type, given: dict[str, Any]) -> dict[str, Any]:
    """The entries of `given` that are fields of `record`."""
    return {name: value for name, value in given.items() if name in field_names(record)}


def read_config_file(path: str, known: set[str]) -> list[str]:
    """A YAML mapping as the flags it stands for. Raises `ValueError` naming file and key."""
    try:
        content = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: {error}") from error
    if content is None:
        return []
    if not isinstance(content, dict):
        raise ValueError(f"{path}: must be a mapping of flag names to values")
    for key in content:
        if not isinstance(key, str) or key.replace("-", "_") not in known:
            raise ValueError(f"{path}: unknown key {key!r}")
    return [word for key, value in content.items() for word in _as_flag(path, key, value)]


def _as_flag(path: str, key: str, value: Any) -> list[str]:
    flag = f"--{key.replace('_', '-')}"
    if value is None:
        return []
    if isinstance(value, bool):
        return [flag if value else f"--no-{flag[2:]}"]
    if isinstance(value, dict):
        return [f"{flag}={json.dumps(value)}"]
    if isinstance(value, list):
        return [flag, *map(str, value)]
    return [f"{flag}={value}"]


def _hyphens(word: str) -> str:
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value


def _value(text: str) -> Any:
    """JSON, or else a text, as both are written without quotes on a command line."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _how_to_parse(hint: Any) -> dict[str, Any]:
    """argparse's keywords for a field's type."""
    if get_origin(hint) in (Union, types.UnionType):
        # Not what only Python can give.
        (hint,) = [arm for arm in get_args(hint) if arm not in (type(None), type)]
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}
    if get_origin(hint) is Literal:
        return {"choices": get_args(hint)}
    if get_origin(hint) is dict:
        return {"type": _json_object, "metavar": "JSON"}
    if get_origin(hint) is list:
        return {"nargs": "+", **_how_to_parse(get_args(hint)[0])}
    return {"type": _integer if hint is int else hint, "metavar": hint.__name__.upper()}


def _integer(text: str) -> int:
    """vLLM's short forms too: 8k is 8000, 8K is 8192."""
    multiple = _MULTIPLES.get(text[-1:], 1)
    return int(float(text[:-1]) * multiple) if multiple > 1 else int(text)


def _window(text: str) -> int:
    """vLLM's --max-model-len auto is -1."""
    return -1 if text == "auto" else _integer(text)


_integer.__name__ = _window.__name__ = "int"  # argparse says "invalid int value"


def _json_object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(f"{text!r} is no JSON object")
    return value


_json_object.__name__ = "JSON object"


def _help(field: dataclasses.Field[Any]) -> str:
    text = str(field.metadata.get("help", "")).replace("%", "%%")
    default = field.default
    if field.default_factory is not dataclasses.MISSING:
        default = " ".join(map(str, field.default_factory()))
    if default is True:
        text += " (default: on)"
    elif default is not None and default is not False:
        text += f" (default: {default})"
    return text
