"""Every policy by its name in `router.policy`. Pure."""

from collections.abc import Callable
from difflib import get_close_matches

from kvrelay.config import RouterSettings
from kvrelay.errors import ConfigError
from kvrelay.router.cost import CostModel
from kvrelay.router.policies.base import Options, Policy
from kvrelay.router.policies.joint import Joint

POLICIES: dict[str, Callable[[Options], Policy]] = {
    "joint": Joint,
}


def policy_of(settings: RouterSettings, model: CostModel) -> Policy:
    """The one that the settings name, with its options. Raises ConfigError for what is not known."""
    if settings.policy not in POLICIES:
        near = get_close_matches(settings.policy, POLICIES, 1) or sorted(POLICIES)
        raise ConfigError(f"router.policy: there is no {settings.policy}: did you mean {', '.join(near)}?")
    options = dict(settings.policy_options)
    return Joint(options, model) if settings.policy == Joint.name else POLICIES[settings.policy](options)
