"""Every policy by its name in `router.policy`. Pure."""

from collections.abc import Callable
from difflib import get_close_matches

from kvrelay.errors import ConfigError
from kvrelay.router.policies.base import Options, Policy
from kvrelay.router.policies.cost import CostModel
from kvrelay.router.policies.dynamo import Dynamo
from kvrelay.router.policies.joint import Joint
from kvrelay.router.policies.least_loaded import LeastLoaded
from kvrelay.router.policies.llm_d import LlmD
from kvrelay.router.policies.mooncake import Mooncake
from kvrelay.router.policies.power_of_two import PowerOfTwo
from kvrelay.router.policies.prefix_affinity import PrefixAffinity
from kvrelay.router.policies.queue_plus_prefill import QueuePlusPrefill
from kvrelay.router.policies.random_choice import RandomChoice
from kvrelay.router.policies.round_robin import RoundRobin
from kvrelay.router.policies.session import Session
from kvrelay.router.policies.sglang import Sglang
from kvrelay.settings.router import RouterSettings

_CLASSES: tuple[type[Policy], ...] = (
    Joint, RandomChoice, RoundRobin, LeastLoaded, PowerOfTwo, Session, PrefixAffinity, Sglang, Dynamo, Mooncake, LlmD,
    QueuePlusPrefill,
)  # fmt: skip
POLICIES: dict[str, Callable[[Options], Policy]] = {each.name: each for each in _CLASSES}


def policy_of(settings: RouterSettings, model: CostModel) -> Policy:
    """The one that the settings name, with its options. Raises ConfigError for what is not known."""
    if settings.policy not in POLICIES:
        near = get_close_matches(settings.policy, POLICIES, 1) or sorted(POLICIES)
        raise ConfigError(f"router.policy: there is no {settings.policy}: did you mean {', '.join(near)}?")
    options = dict(settings.policy_options)
    return Joint(options, model) if settings.policy == Joint.name else POLICIES[settings.policy](options)
