"""The registry without Ray."""

from types import SimpleNamespace

from kvrelay.cluster.registry.actor import RegistryActor


class RegistryHandle:
    """Calls the actor's methods as Ray's handle does; `error` is raised instead."""

    def __init__(self):
        self.actor, self.error, self.num_calls = RegistryActor("secret", None, None), None, 0

    def __getattr__(self, name):
        async def remote(*arguments):
            self.num_calls += 1
            if self.error is not None:
                raise self.error
            return await getattr(self.actor, name)(*arguments)

        return SimpleNamespace(remote=remote)
