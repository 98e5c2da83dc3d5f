"""Errors of the cluster commands: one clear line each, shown without a traceback."""

from kvrelay.errors import KvrelayError


class ClusterError(KvrelayError):
    """The cluster cannot be started, reached or changed; the message says why and what to do."""
