"""Workers lost are counted by role; workers that leave are not."""

import asyncio


def losses(cluster):
    return {str(role): count for role, count in cluster.dispatcher.workers.losses.items() if count}


async def without(cluster, worker_id):
    async with asyncio.timeout(10):
        workers = cluster.dispatcher.workers
        await workers.wait_for(lambda d: worker_id not in {info.worker_id for info, _ in d.live_workers()})


async def test_a_worker_that_dies_is_counted_once_and_one_that_leaves_is_not(make_cluster):
    cluster = await make_cluster(decode=3)
    members = [link.member for link, _ in cluster.dispatcher.workers.all_links()]
    cluster.dispatcher.workers.set_members([member for member in members if member.worker_id != "d2"])
    await without(cluster, "d2")
    await cluster.decode[2].aclose()
    assert losses(cluster) == {}
    await cluster.decode[1].kill()
    await without(cluster, "d1")
    assert losses(cluster) == {"decode": 1}
    await cluster.dispatcher.workers.aclose()
    assert losses(cluster) == {"decode": 1}
    text = (await cluster.client.get("/metrics")).text
    assert 'kvrelay_worker_losses_total{role="decode"} 1.0' in text
    assert 'kvrelay_worker_losses_total{role="prefill"} 0.0' in text
