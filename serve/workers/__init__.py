"""The ingress's side of the request plane: membership, links, dispatch, queries, pairing, audits.

May import kvrelay, router.
"""
