"""Policies by their value of `router.policy`: a name of ours, or the path of a class of one's own. Pure."""

from difflib import get_close_matches
from importlib import import_module

from kvrelay.errors import ConfigError
from kvrelay.router.policies.base import CostModel, RoutingPolicy
from kvrelay.router.policies.joint import Joint
from kvrelay.router.policies.selection import LeastLoaded, PowerOfTwo, PrefixAffinity, RoundRobin, Session
from kvrelay.settings.router import RouterSettings

POLICIES: dict[str, type[RoutingPolicy]] = {
    policy.name: policy for policy in (Joint, RoundRobin, LeastLoaded, PowerOfTwo, PrefixAffinity, Session)
}


def build_policy(settings: RouterSettings, model: CostModel) -> RoutingPolicy:
    """The policy that the settings name, with its options. Raises ConfigError for an unknown policy or option."""
    policy = _imported(settings.policy) if ":" in settings.policy else POLICIES.get(settings.policy)
    if policy is None:
        near = get_close_matches(settings.policy, POLICIES, 1) or [*sorted(POLICIES), "module:Class"]
        raise ConfigError(f"router.policy: there is no {settings.policy}: did you mean {', '.join(near)}?")
    return policy.build(dict(settings.policy_options), model)


def _imported(path: str) -> type[RoutingPolicy]:
    """The class at `module:Class`. Raises ConfigError."""
    module, _, name = path.partition(":")
    try:
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"router.policy: {path} cannot be imported: {error}") from error
    if not (isinstance(found, type) and issubclass(found, RoutingPolicy)):
        raise ConfigError(f"router.policy: {path} is no subclass of {RoutingPolicy.__module__}.RoutingPolicy")
    return found
