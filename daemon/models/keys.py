"""A model's configuration as keys that are read with their types checked; what cannot be served is refused by name."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


class ConfigError(ValueError):
    """A model that cannot be served; the message names the key, its value and what is supported."""


MOST_LAYERS = 10_000
TEXT_EOS = "text_eos_token_id"
"""The key that has what the keys of a text part themselves call the tokens that end a text, whatever stands beside."""


class Keys:
    """The keys of a model's configuration, by their names in Hugging Face's ``config.json``.

    Which keys were asked for is remembered: `check_the_rest` refuses others that would change the maths.

    Attributes:
        where: the file, for messages.
        values: what the keys say.
    """

    def __init__(
        self, where: Path, values: Mapping[str, Any], prefix: str = "", spelled: Mapping[str, str] | None = None
    ) -> None:
        """Take the keys of a file.

        Args:
            where: the file, for messages.
            values: by Hugging Face's name.
            prefix: what stands before every name in the file, for messages.
            spelled: what the file calls keys that it does not call by Hugging Face's names, for messages.
        """
        self.where = where
        self.values = dict(values)
        self._prefix = prefix
        self._spelled = spelled or {}
        self._read: set[str] = set()

    @classmethod
    def load(cls, path: Path) -> Keys:
        """Read a JSON object from a file.

        Raises:
            ConfigError: there is no such file, or it holds something else.
        """
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(f"{path}: no such file; a model folder has a config.json and *.safetensors") from None
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path}: cannot be read: {error}") from error
        if not isinstance(values, dict):
            raise ConfigError(f"{path}: must hold one JSON object")
        return cls(path, values)

    def get(self, key: str) -> Any:
        """The value of a key as it stands in the file; None where it is absent."""
        self._read.add(key)
        return self.values.get(key)

    def says(self, key: str) -> bool:
        """Whether the file has the key, be it null."""
        self._read.add(key)
        return key in self.values

    def refusal(self, key: str, supported: str) -> ConfigError:
        """The error that a key's value is not supported; `supported` says what is."""
        name = self._prefix + self._spelled.get(key, key)
        if key not in self.values:
            return ConfigError(f"{self.where}: {name} is absent; expected {supported}")
        value = json.dumps(self.values[key], default=str)[:200]
        return ConfigError(f"{self.where}: {name} = {value} is not supported; supported: {supported}")

    def inner(self, key: str) -> Keys:
        """The keys of the object that is a key's value; none if it is absent or null.

        Raises:
            ConfigError: it is no object.
        """
        value = self.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.refusal(key, "an object")
        return Keys(self.where, value or {}, prefix=f"{self._prefix}{self._spelled.get(key, key)}.")

    def filled(self, defaults: Mapping[str, Any]) -> Keys:
        """The same keys with others where they are absent or null."""
        given = {key: value for key, value in self.values.items() if value is not None or key not in defaults}
        filled = Keys(self.where, {**defaults, **given}, self._prefix, self._spelled)
        filled._read = self._read
        return filled

    def also(self, names: Mapping[str, str]) -> Keys:
        """The same keys where a file may call some otherwise; messages tell what it calls them.

        Args:
            names: what it may call keys, by Hugging Face's names.

        Raises:
            ConfigError: it has a key by both names, and they say different things.
        """
        there = {key: other for key, other in names.items() if self.get(other) is not None}
        for key, other in there.items():
            if self.values.get(key) is not None:
                self.only(other, self.values[key])
        values = self.values | {key: self.values[other] for key, other in there.items()}
        made = Keys(self.where, values, self._prefix, {**self._spelled, **there})
        made._read = self._read
        return made

    def size(self, key: str, default: int | None = None, least: int = 1, most: int | None = None) -> int:
        """A whole number of at least `least` and, if that is given, at most `most`; `default` where the key is absent
        or null."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self.refusal(key, f"a whole number of at least {least}")
        if most is not None and value > most:
            raise self.refusal(key, f"a whole number of at most {most}")
        return value

    def layers(self) -> int:
        """How many layers the model has: `MOST_LAYERS` at most, as a damaged file could fill memory with lists."""
        return self.size("num_hidden_layers", most=MOST_LAYERS)

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number; `default` where the key is absent or null."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise self.refusal(key, "a positive number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """True or false; `default` where the key is absent or null."""
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.refusal(key, "true or false")
        return value

    def one_of(self, key: str, supported: Iterable[str], default: str | None = None) -> str:
        """One of some words; `default` where the key is absent or null."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        words = list(supported)
        if not isinstance(value, str) or value not in words:
            raise self.refusal(key, ", ".join(words))
        return value

    def only(self, key: str, *values: Any) -> None:
        """Refuse any value of a key but these; absent or null, it says nothing."""
        value = self.get(key)
        if value is not None and value not in values:
            raise self.refusal(key, f"only {' or '.join(map(json.dumps, values))}" if values else "only its absence")

    def tokens(self, key: str) -> list[int]:
        """A token id or a list of them; none where the key is absent or null."""
        value = self.get(key)
        if value is None:
            return []
        tokens = value if isinstance(value, list) else [value]
        if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in tokens):
            raise self.refusal(key, "a token id or a list of them")
        return tokens

    def check_the_rest(self, neutral: Mapping[str, tuple[Any, ...]]) -> None:
        """Refuse keys that nobody has read and that change the maths.

        Args:
            neutral: such keys, with the values (besides null) that change nothing.
        """
        for key, values in neutral.items():
            if key not in self._read and self.values.get(key) is not None and self.values[key] not in values:
                raise self.refusal(key, f"only {json.dumps(values[0])}" if values else "only its absence")
