"""A policy's own settings, taken out of what `router.policy_options` holds and checked."""

from difflib import get_close_matches

from kvrelay.errors import ConfigError
from kvrelay.router.policies.base import Options


def no_more(policy: str, options: Options, known: tuple[str, ...] = ()) -> None:
    """Raises ConfigError for an option that the policy does not have, with the nearest that it has."""
    for name in options:
        if name not in known:
            near = get_close_matches(name, known, 1)
            meant = f": did you mean {near[0]}?" if near else f", it has {', '.join(known) or 'none'}"
            raise ConfigError(f"router.policy_options: policy {policy} has no option {name}{meant}")


def number(
    policy: str, options: Options, name: str, default: float, *, least: float = 0.0, most: float = float("inf")
) -> float:
    """An option's value, within its bounds. Raises ConfigError."""
    value = options.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise ConfigError(
            f"router.policy_options: {name} of policy {policy} is a number of {least:g} to {most:g}, not {value!r}"
        )
    return float(value)
