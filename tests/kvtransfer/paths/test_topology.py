"""Topology: what a fake sysfs says about NICs, GPUs and NUMA nodes, and which paths that speaks for."""

import msgspec
import pytest

from kvrelay.kvtransfer.transports.topology import (
    Nic,
    PciDevice,
    Topology,
    discover,
    rank_paths,
    rdma_nics,
    this_machine,
    ucx_devices,
)

pytestmark = pytest.mark.pure


ALL = ["loopback", "shm", "nixl", "tcp"]


class Sysfs:
    """Writes the few files that are read, where Linux has them."""

    def __init__(self, root):
        self.root = root

    def write(self, path, text):
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    def device(self, *path, node=-1):
        """A PCI device below host bridge and bridges; returns its folder."""
        folder = self.root / "devices" / "/".join(path)
        self.write(folder.relative_to(self.root) / "numa_node", node)
        link = self.root / "bus/pci/devices" / path[-1]
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(folder)
        return folder

    def _of_class(self, kind, name, device):
        folder = (device or self.root / "devices/virtual") / kind / name
        folder.mkdir(parents=True, exist_ok=True)
        if device is not None:
            (folder / "device").symlink_to(device)
        link = self.root / "class" / kind / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(folder)
        return folder.relative_to(self.root)

    def rdma(self, name, device, rate="200 Gb/sec (4X HDR)", state="4: ACTIVE"):
        folder = self._of_class("infiniband", name, device)
        self.write(folder / "ports/1/rate", rate)
        self.write(folder / "ports/1/state", state)

    def ethernet(self, name, device=None, state="up", kind=1):
        folder = self._of_class("net", name, device)
        for file, text in (("operstate", state), ("type", kind)):
            self.write(folder / file, text)

    def node(self, number, cores):
        self.write(f"devices/system/node/node{number}/cpulist", cores)


def dgx(root, host="dgx-1", process="p", cores=(0,)):
    """Two sockets; each has a PCIe switch with two GPUs and a NIC for each, and a storage NIC at the root."""
    sysfs = Sysfs(root)
    sysfs.node(0, "0-55,112-167")
    sysfs.node(1, "56-111,168-223")
    gpus = []
    for node, bridge in ((0, "0a"), (1, "8a")):
        switch = (f"pci0000:{bridge}", f"0000:{bridge}:01.0", f"0000:{bridge[0]}b:00.0")
        for slot in (0, 1):
            gpu = f"0000:{bridge[0]}{'f' if slot else 'e'}:00.0"
            sysfs.device(*switch, f"0000:{bridge[0]}c:0{4 + slot}.0", gpu, node=node)
            gpus.append(gpu)
            nic = sysfs.device(*switch, f"0000:{bridge[0]}c:0{slot}.0", f"0000:{bridge[0]}d:0{slot}.0", node=node)
            sysfs.rdma(f"mlx5_{2 * node + slot}", nic)
    storage = sysfs.device("pci0000:0a", "0000:0a:02.0", "0000:20:00.0", node=0)
    sysfs.rdma("mlx5_9", storage, rate="400 Gb/sec (4X NDR)")
    sysfs.rdma("mlx5_8", sysfs.device("pci0000:8a", "0000:8a:03.0", "0000:90:00.0", node=1), state="1: DOWN")
    sysfs.ethernet("eno1", sysfs.device("pci0000:30", "0000:30:00.0", "0000:31:00.0", node=0))
    sysfs.ethernet("docker0")
    sysfs.ethernet("lo", kind=772)
    return discover(
        root,
        host=host,
        process=process,
        cores=cores,
        gpu_addresses=gpus,
        addresses={"eno1": ["10.0.0.7"], "docker0": ["172.17.0.1"]},
    )


def cloud_vm(root, host="vm-1", process="p"):
    sysfs = Sysfs(root)
    sysfs.node(0, "0-3")
    virtio = sysfs.device("pci0000:00", "0000:00:03.0", node=-1) / "virtio2"
    virtio.mkdir()
    sysfs.ethernet("eth0", virtio)
    sysfs.ethernet("lo", kind=772, state="unknown")
    return discover(root, host=host, process=process, cores=(0, 1), addresses={"eth0": ["192.0.2.9"]})


# ---- discovery


def test_a_dgx_like_host_is_read(tmp_path):
    found = dgx(tmp_path, cores=(56, 57))
    assert {nic.name: (nic.kind, nic.is_up, nic.gbit_per_s, nic.numa_node) for nic in found.nics} == {
        "mlx5_0": ("rdma", True, 200.0, 0),
        "mlx5_1": ("rdma", True, 200.0, 0),
        "mlx5_2": ("rdma", True, 200.0, 1),
        "mlx5_3": ("rdma", True, 200.0, 1),
        "mlx5_8": ("rdma", False, 200.0, 1),
        "mlx5_9": ("rdma", True, 400.0, 0),
        "eno1": ("ethernet", True, 0.0, -1),
        "docker0": ("ethernet", True, 0.0, -1),
    }
    assert found.nics[0].pci_path == ["pci0000:0a", "0000:0a:01.0", "0000:0b:00.0", "0000:0c:00.0", "0000:0d:00.0"]
    assert [(gpu.name, gpu.numa_node) for gpu in found.gpus] == [
        ("cuda:0", 0),
        ("cuda:1", 0),
        ("cuda:2", 1),
        ("cuda:3", 1),
    ]
    assert found.numa_node == 1


def test_cores_on_several_nodes_have_no_node_in_common(tmp_path):
    assert dgx(tmp_path, cores=(0, 56)).numa_node == -1


def test_a_plain_cloud_vm_is_read(tmp_path):
    found = cloud_vm(tmp_path)
    assert [(nic.name, nic.is_up, nic.addresses) for nic in found.nics] == [("eth0", True, ["192.0.2.9"])]
    assert (found.gpus, found.numa_node) == ([], 0)


def test_an_empty_sysfs_is_no_error(tmp_path):
    found = discover(tmp_path, host="h", process="p", cores=(0,), gpu_addresses=["0000:01:00.0"])
    assert (found.nics, found.numa_node, found.gpus[0].pci_path) == ([], -1, [])


def test_this_machine_is_read_and_fits_into_a_handshake():
    found = this_machine()
    assert found.host and found.process
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(found), type=Topology) == found
    assert this_machine() is found


# ---- choosing NICs


def names(nics):
    return [nic.name for nic in nics]


def test_each_gpu_takes_the_nics_of_its_own_switch(tmp_path):
    machine = dgx(tmp_path)
    assert [names(rdma_nics(machine, f"cuda:{index}")) for index in range(4)] == [
        ["mlx5_0", "mlx5_1"],
        ["mlx5_0", "mlx5_1"],
        ["mlx5_2", "mlx5_3"],
        ["mlx5_2", "mlx5_3"],
    ]


def test_host_memory_takes_the_fastest_nics_of_the_workers_node(tmp_path):
    assert names(rdma_nics(dgx(tmp_path), "cpu")) == ["mlx5_9", "mlx5_0", "mlx5_1"]


def test_a_nic_that_is_down_is_never_chosen(tmp_path):
    assert "mlx5_8" not in names(rdma_nics(dgx(tmp_path, cores=(56,)), "cpu"))


def test_a_gpu_without_a_card_of_its_own_takes_those_of_its_host_bridge_and_then_of_its_node():
    gpu = PciDevice(name="cuda:0", numa_node=1, pci_path=["pci0:8a", "0:8a:01.0", "0:8b:00.0"])
    bridge = Nic(name="a", kind="rdma", is_up=True, numa_node=1, pci_path=["pci0:8a", "0:8a:02.0"])
    node = Nic(name="b", kind="rdma", is_up=True, numa_node=1, pci_path=["pci0:9a"], gbit_per_s=400.0)
    far = Nic(name="c", kind="rdma", is_up=True, numa_node=0, pci_path=["pci0:0a"], gbit_per_s=400.0)
    for nics, chosen in (([far, node, bridge], "a"), ([far, node], "b"), ([far], "c")):
        assert names(rdma_nics(Topology(host="h", process="p", nics=nics, gpus=[gpu]), "cuda:0")) == [chosen]


def test_a_much_slower_nic_is_no_rail_beside_a_fast_one():
    nics = [
        Nic(name=name, kind="rdma", is_up=True, gbit_per_s=rate, numa_node=0)
        for name, rate in [("a", 100.0), ("b", 400.0)]
    ]
    machine = Topology(host="h", process="p", numa_node=0, nics=nics)
    assert names(rdma_nics(machine, "cpu")) == ["b"]


def test_ucx_gets_the_gpus_nics_and_the_ethernet_device_of_the_workers_own_address(tmp_path):
    assert ucx_devices(dgx(tmp_path), "cuda:3", "10.0.0.7") == ["mlx5_2:1", "mlx5_3:1", "eno1"]


def test_of_several_ethernet_devices_ucx_gets_the_one_with_the_workers_address():
    nics = [
        Nic(name=name, kind="ethernet", is_up=True, addresses=[ip])
        for name, ip in [("eth0", "10.0.0.1"), ("br0", "10.9.0.1")]
    ]
    machine = Topology(host="h", process="p", nics=nics)
    assert ucx_devices(machine, "cpu", "10.9.0.1") == ["br0"]
    assert ucx_devices(machine, "cpu", "10.77.0.1") == []  # behind an address that no device has: UCX's own choice


def test_where_there_is_no_choice_ucx_is_left_alone(tmp_path):
    assert ucx_devices(cloud_vm(tmp_path), "cpu", "192.0.2.9") == []


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_a_worker_at_a_loopback_address_uses_no_card_at_all(tmp_path, host):
    assert ucx_devices(dgx(tmp_path), "cuda:0", host) == ["lo"]


# ---- ranking


def ranked(source, target, source_device="cpu", target_device="cpu", offers=ALL):
    return dict(rank_paths(source, target, source_device, target_device, offers))


def test_one_process_before_one_host_before_sockets(tmp_path):
    machine = cloud_vm(tmp_path)
    assert rank_paths(machine, machine, "cpu", "cpu", ALL) == [
        ("loopback", "same process"),
        ("shm", "same host"),
        ("tcp", "TCP on one host"),
    ]


def test_another_process_of_the_host_is_not_reached_by_loopback(tmp_path):
    source = cloud_vm(tmp_path)
    assert "loopback" not in ranked(source, msgspec.structs.replace(source, process="q"))


def test_an_unknown_host_is_nobodys_neighbour(tmp_path):
    machine = cloud_vm(tmp_path, host="")
    assert list(ranked(machine, machine, offers=["loopback", "shm", "tcp"])) == ["tcp"]


def test_without_rdma_nixl_is_left_out_where_sockets_serve_and_else_its_danger_is_named(tmp_path):
    """Over UCX's TCP a target that is killed can abort the source."""
    source, target = cloud_vm(tmp_path / "a"), cloud_vm(tmp_path / "b", host="vm-2")
    assert rank_paths(source, target, "cpu", "cpu", ALL) == [("tcp", "TCP")]
    ((name, why),) = rank_paths(source, target, "cuda:0", "cuda:0", ["cuda_ipc", "nixl"])  # sockets read no GPU
    assert name == "nixl" and "a target that dies in a read can take the source down; not encrypted" in why
    assert list(ranked(source, target, offers=["nixl"])) == ["nixl"]  # by name


def test_rdma_goes_before_tcp_and_names_both_nics(tmp_path):
    source, target = dgx(tmp_path / "a"), dgx(tmp_path / "b", host="dgx-2")
    assert rank_paths(source, target, "cuda:0", "cuda:2", ["nixl", "tcp"]) == [
        ("nixl", "RDMA mlx5_0, 200 Gb/s, to mlx5_2, 200 Gb/s; not encrypted, for a private network"),
        ("tcp", "TCP"),
    ]


def test_rdma_on_one_side_only_is_no_rdma(tmp_path):
    source, target = dgx(tmp_path / "a"), cloud_vm(tmp_path / "b")
    assert list(ranked(source, target)) == ["tcp"]


def test_gpus_of_one_host_go_through_ucx(tmp_path):
    machine = dgx(tmp_path)
    assert ranked(machine, machine, "cuda:0", "cuda:3", ["nixl"]) == {"nixl": "same host, through UCX"}


def test_gpus_of_one_host_go_over_cuda_ipc_and_then_through_ucx(tmp_path):
    source, offers = dgx(tmp_path), ["cuda_ipc", "nixl"]
    target = msgspec.structs.replace(source, process="q")
    assert rank_paths(source, target, "cuda:0", "cuda:3", offers) == [
        ("cuda_ipc", "same host"),
        ("nixl", "same host, through UCX"),
    ]
    assert list(ranked(source, source, offers=offers)) == ["nixl"]  # a process cannot open its own handle
    elsewhere = msgspec.structs.replace(target, host="dgx-2")
    assert list(ranked(source, elsewhere, "cuda:0", "cuda:3", offers)) == ["nixl"]


def test_a_gpu_that_is_not_known_is_ranked_by_the_rest(tmp_path):
    source, target = dgx(tmp_path / "a"), dgx(tmp_path / "b", host="dgx-2")
    assert "RDMA mlx5_9, 400 Gb/s, to mlx5_0" in ranked(source, target, "cuda:9", "cuda:0", ["nixl"])["nixl"]


def test_containers_of_one_kernel_are_offered_only_what_their_namespaces_allow(tmp_path):
    source = msgspec.structs.replace(
        cloud_vm(tmp_path), within={"shm": "net1", "cuda_ipc": "ipc1", "nixl": "all1", "tcp": "net1"}
    )
    pod = msgspec.structs.replace(source, process="q", within={**source.within, "cuda_ipc": "ipc2", "nixl": "all2"})
    assert list(ranked(source, pod, offers=["shm", "cuda_ipc", "tcp", "nixl"])) == ["shm", "tcp"]
    other = msgspec.structs.replace(pod, within=dict.fromkeys(source.within, "other"))
    assert rank_paths(source, other, "cpu", "cpu", ["shm", "tcp", "nixl"])[0] == ("tcp", "TCP")
    assert list(ranked(source, other)) == ["tcp"]


def test_this_machine_names_the_namespaces_of_each_transport():
    found = this_machine()
    assert found.within["shm"].startswith(found.host)
    assert "net:[" in found.within["shm"]
    assert "net:[" not in found.within["cuda_ipc"]
