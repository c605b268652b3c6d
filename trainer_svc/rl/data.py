"""Examples and rewards: a user's own functions, found by name."""

from __future__ import annotations

import importlib
import itertools
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from common.config import suggestion
from common.errors import ConfigError
from trainer_svc.rl.jsonl import read_jsonl

Example = dict[str, Any]
"""`messages` (chat) or `prompt` (text), and whatever the reward function needs beside it."""

Reward = Callable[[Example, str], float]
"""From an example and the text of a completion to a number."""


def load_function(name: str, *, field: str) -> Callable[..., Any]:
    """Import `module:function`; modules in the current directory are found too.

    Raises:
        ConfigError: naming the field, and the nearest function of the module.
    """
    module_name, _, function_name = name.partition(":")
    if not function_name:
        raise ConfigError(f"{field}: found {name!r}; write it as module:function")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        module = importlib.import_module(module_name)
    except (ImportError, SyntaxError) as error:
        raise ConfigError(f"{field}: {name!r}: {error}; is its folder on PYTHONPATH?") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        names = [key for key, value in vars(module).items() if callable(value)]
        raise ConfigError(
            f"{field}: {module_name} has no function {function_name!r}"
            f"{suggestion(function_name, names)}"
        )
    return function  # type: ignore[no-any-return]


def load_examples(source: str, *, seed: int) -> Iterator[Example]:
    """Endless examples from a JSONL file (shuffled anew each epoch) or a generator function.

    Raises:
        ConfigError: the file or the function is missing, or the file holds no usable line.
    """
    if not source.endswith(".jsonl"):
        return iter(load_function(source, field="rl.data")(seed))
    path = Path(source)
    lines = read_jsonl(path, field="rl.data")
    for number, example in lines:
        if not {"messages", "prompt"} & set(example):
            raise ConfigError(f"rl.data: {path}:{number}: needs a `messages` or a `prompt` key")
    return _epochs([example for _, example in lines], random.Random(seed))


def skip(examples: Iterator[Example], count: int) -> Iterator[Example]:
    """What follows the first `count`: where a resumed run goes on."""
    return itertools.islice(examples, count, None)


def _epochs(examples: list[Example], rng: random.Random) -> Iterator[Example]:
    while True:
        yield from rng.sample(examples, len(examples))
