"""The registry leaves a node that Ray drains, so that the node can end before its deadline, and replicas know how long
they may stay.
"""

import os
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(240)]

PROGRAM = """
import time, ray
from ray.cluster_utils import Cluster
from ray._private.state import actors
from ray._private.worker import global_worker
from ray.core.generated.autoscaler_pb2 import DrainNodeReason
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from kvrelay.cluster.registry.actor import RegistryActor
from kvrelay.cluster.registry.draining import CLOSE_S, time_to_stop_s
from kvrelay.cluster.registry.members import WorkerRecord
from kvrelay.cluster.registry.names import APP_NAME, NAMESPACE, registry_name

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 80_000_000})
drained = cluster.add_node(num_cpus=1, object_store_memory=80_000_000)
ray.init(address=cluster.address, log_to_driver=False)
cluster.wait_for_nodes()

def placed_on_drained(create):
    # a raylet hears of a new node some time after the GCS, and places elsewhere until then
    for _ in range(100):
        actor = create(NodeAffinitySchedulingStrategy(drained.node_id, soft=True))
        ray.get(actor.__ray_ready__.remote())
        [node_id] = [a["Address"]["NodeID"] for a in actors().values() if a["ActorID"] == actor._actor_id.hex()]
        if node_id == drained.node_id:
            return actor
        ray.kill(actor)
        time.sleep(0.2)
    raise AssertionError("nothing is placed on the second node")

registry = placed_on_drained(lambda there: ray.remote(RegistryActor).options(
    name=registry_name(APP_NAME), namespace=NAMESPACE, lifetime="detached", num_cpus=0, max_restarts=-1,
    scheduling_strategy=there,
).remote("secret", "127.0.0.1", None))

@ray.remote(num_cpus=0)
class Replica:
    async def time_to_stop_s(self, wanted_s):
        return await time_to_stop_s(wanted_s)

replica = placed_on_drained(lambda there: Replica.options(scheduling_strategy=there).remote())
assert ray.get(replica.time_to_stop_s.remote(1000.0)) == 1000.0
record = WorkerRecord("decode-a", "decode", "e", "127.0.0.1", 1, "n", 1)
ray.get(registry.heartbeat.remote(record))
deadline_ms = int(1000 * (time.time() + 120))
reason = DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION
assert global_worker.gcs_client.drain_node(drained.node_id, reason, "test", deadline_ms)[0]
begun_s = time.monotonic()
assert 0 < ray.get(replica.time_to_stop_s.remote(1000.0)) <= 120 - CLOSE_S
assert ray.get(replica.time_to_stop_s.remote(0.5)) == 0.5
ray.kill(replica)
while any(node["NodeID"] == drained.node_id and node["Alive"] for node in ray.nodes()):
    assert time.monotonic() - begun_s < 60, "the node is still there"  # its deadline alone is 120 s
    time.sleep(0.5)
while True:
    try:
        ray.get(registry.heartbeat.remote(record), timeout=10)
        break
    except ray.exceptions.RayError:
        assert time.monotonic() - begun_s < 90, "the registry does not answer"
        time.sleep(0.5)
assert ray.get(registry.join_settings.remote()).secret == b"secret"
print("moved")
ray.shutdown()
cluster.shutdown()
"""


def test_the_registry_moves_off_a_drained_node_with_the_clusters_secret():
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=200, env=environment)
    assert "moved" in done.stdout, f"{done.stdout}\n{done.stderr[-3000:]}"
