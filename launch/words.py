"""What the words of all commands have in common: help, and options among recipes and overrides."""

from collections.abc import Callable, Sequence

from hybrid_megatron.errors import ConfigError


def help_if_asked(text: str, words: list[str], *, needs_words: bool = True) -> None:
    """Print the help and end if it is asked for; with exit code 2 if the command needs words and there are none."""
    if (needs_words and not words) or {"-h", "--help"} & set(words):
        print(text.strip())
        raise SystemExit(0 if words else 2)


def split_options(
    command: str, words: list[str], with_value: Sequence[str], alone: Sequence[str], hint: Callable[[str], str] = lambda name: ""
) -> tuple[list[str], dict[str, str]]:
    """Recipes and overrides, and options by name. `hint(name)` ends the error of an option whose value is missing."""
    plain, options, rest = [], {}, iter(words)
    for word in rest:
        name, equals, value = word.partition("=")
        if not word.startswith("-"):
            plain.append(word)
        elif name in with_value:
            value = value if equals else next(rest, "")
            if not value or value.startswith("--"):
                raise ConfigError(f"{name}: a value must follow{hint(name)}")
            options[name] = value
        elif word in alone:
            options[word] = ""
        else:
            raise ConfigError(f"{command} has no option {word}; options are {', '.join((*with_value, *alone))}")
    return plain, options


def whole_numbers(option: str, text: str, rule: str) -> list[int]:
    """Above 0, of an option's value, parted by commas, each once; `rule` is what the error says."""
    numbers = text.split(",")
    if not all(number.isascii() and number.isdigit() and int(number) > 0 for number in numbers):
        raise ConfigError(f"{option} {text}: {rule}")
    return list(dict.fromkeys(map(int, numbers)))
