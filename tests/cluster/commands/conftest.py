"""Fixtures shared with the serving tests: an ingress over fake workers."""

from tests.serve.conftest import make_cluster, serve_http

__all__ = ["make_cluster", "serve_http"]
