"""What tests of the cluster's store share."""

import pytest

from tests.cluster.store.store_nodes import Nodes


@pytest.fixture
def make_nodes():
    made = []

    def make_nodes(**options):
        made.append(Nodes(**options))
        return made[-1]

    yield make_nodes
    for nodes in made:
        nodes.close()
