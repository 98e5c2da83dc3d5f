"""Which cluster a command addresses: the given URLs, or those of a cluster that runs on this machine."""

from collections.abc import Iterator
from contextlib import contextmanager

from kvrelay.cluster.errors import ServerUnreachable
from kvrelay.cluster.launch import state_file
from kvrelay.cluster.launch.probe import server_root

DEFAULT_API = "http://127.0.0.1:8000"
DEFAULT_DASHBOARD = "http://127.0.0.1:8265"


def endpoints(url: str | None, dashboard: str | None) -> tuple[str, str]:
    """API and dashboard URL: as given, else those of this machine's newest matching cluster, else the defaults.

    Raises:
        ConfigError: a given URL is no address.
    """
    url, dashboard = url and server_root(url), dashboard and server_root(dashboard)
    for known in state_file.running():
        if url in (None, known.api_url) and dashboard in (None, known.dashboard_url):
            return known.api_url, known.dashboard_url
    return url or DEFAULT_API, dashboard or DEFAULT_DASHBOARD


def other_clusters(api_url: str) -> str | None:
    """A line that lists this machine's other clusters; None when there are none."""
    urls = [known.api_url for known in state_file.running() if known.api_url != api_url]
    return f"also running here: {', '.join(urls)} (choose with --url)" if urls else None


@contextmanager
def hint_to_start() -> Iterator[None]:
    """Add how to start a cluster to an error that none answers, where `kvrelay serve` has started none here."""
    try:
        yield
    except ServerUnreachable as error:
        if state_file.running():
            raise
        raise ServerUnreachable(
            f"{error}. Start a cluster with `kvrelay serve`, or give its address with --url"
        ) from error
