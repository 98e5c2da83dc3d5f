"""Requests for JSON with the standard library's HTTP, and addresses as users write them."""

import http.client
import json
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import urlsplit

from kvrelay.cluster.errors import ClusterError, RequestRefused, ServerUnreachable
from kvrelay.errors import ConfigError


def server_root(text: str, *, default_port: int | None = None) -> str:
    """The root URL of a server's address as users write it: host:port, or a URL that may end in /v1.

    `default_port` is for a host alone. Raises ConfigError: the text is no address.
    """
    url = text if "://" in text else f"http://{text}"
    problem = ConfigError(f"{text!r} is not a server's address; write for example http://127.0.0.1:8000")
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        if default_port is not None and "://" not in text and parts.port is None:
            url = f"{url.rstrip('/')}:{default_port}"
    except ValueError as error:  # a port that is no number or too large, half an IPv6 address
        raise problem from error
    if not is_address or any(character.isspace() or not character.isprintable() for character in url):
        raise problem
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def request_json(method: str, url: str, body: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    """The JSON answer. Options and errors as of `request_text`; ClusterError, too, because the answer is no JSON."""
    text = request_text(method, url, body, **options)
    try:
        return dict(json.loads(text or "{}"))
    except (ValueError, TypeError) as error:
        start = text.strip()[:80]
        raise ClusterError(f"{url}: is another server at this address? It answers {start!r}") from error


def request_text(
    method: str,
    url: str,
    body: dict[str, Any] | None = None,
    *,
    headers: dict[str, str] | None = None,
    timeout_s: float,
) -> str:
    """The answer. Raises ServerUnreachable, or RequestRefused with the status and the server's error message."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json", **(headers or {})}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            return str(answer.read().decode(errors="replace"))
    except urllib.error.HTTPError as error:
        text = error.read().decode(errors="replace")
        try:
            text = json.loads(text)["error"]["message"]
        except (ValueError, KeyError, TypeError):
            text = text.strip()
            if text.startswith("Traceback"):  # Ray's dashboard
                text = text.splitlines()[-1]
            text = text[:200] or str(error)
        raise RequestRefused(url, text, error.code) from error
    except (ValueError, http.client.HTTPException) as error:
        raise ClusterError(f"{url} does not answer: {error}") from error
    except OSError as error:
        raise ServerUnreachable(f"{url} does not answer: {getattr(error, 'reason', error)}") from error


def auth_headers(api_key: str | None) -> dict[str, str]:
    return {"authorization": f"Bearer {api_key}"} if api_key else {}
