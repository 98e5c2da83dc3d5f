"""What a user does with a cluster on several hosts, step by step, each timed: up, deploy, verify, scale, faults, down.

Every step checks what it claims, and raises where that does not hold; `Scenario.times` is the table. The model is a
tiny random checkpoint in float32 that only the head has: other hosts fetch it from there.
"""

import contextlib
import re
import socket
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvrelay import __version__
from kvrelay.cluster.chaos.hosts.namespaces import HostError, Hosts, why_not
from kvrelay.cluster.verify.prompts import expected_tokens, make_prompts
from kvrelay.engine.checkpoints.tiny import tiny_checkpoint
from tests.hosts.ray_hosts import WORKER_PORTS, RayHosts, firewall_table, refuses

NUM_OUTPUT = 24
LONG = 1200  # tokens of a stream that a fault meets
MODEL = "/root/tiny"


def check(holds: object, what: str) -> None:
    """Raise HostError unless it holds."""
    if not holds:
        raise HostError(f"does not hold: {what}")


def tokens(answers: Sequence[dict[str, Any]]) -> list[list[int]]:
    """The tokens of each answer."""
    return [answer["choices"][0]["token_ids"] for answer in answers]


class Scenario:
    """Three hosts: `ray up` of two, the third joins. Steps are called in order."""

    def __init__(self, ray: RayHosts, folder: Path) -> None:
        self.ray, self.hosts, self.folder = ray, ray.hosts, folder
        self.times: dict[str, float] = {}
        self.args: dict[str, Any] = {
            "model": {"source": MODEL, "dtype": "float32", "served_name": "tiny"},
            "engine": {"kv_memory": "64MiB", "num_threads": 1},
            "router": {"policy": "round_robin", "local_prefill_tokens": 0},  # a fault on any host meets streams
            "cluster": {"worker_ports": "{}-{}".format(*WORKER_PORTS), "cores_per_worker": 1},
        }
        self._long: list[int] = []

    @contextlib.contextmanager
    def timed(self, step: str) -> Iterator[None]:
        """Record and print how long a step takes."""
        began_s = time.monotonic()
        yield
        self.times[step] = time.monotonic() - began_s
        print(f"{step}: {self.times[step]:.1f} s", flush=True)

    def table(self) -> str:
        """The steps and their times, as Markdown."""
        rows = [f"| {step} | {seconds:.1f} |" for step, seconds in self.times.items()]
        return "\n".join(["| step | s |", "|---|---|", *rows])

    # ---- steps

    def up(self) -> None:
        """`ray up` and `ray attach`; nobody without the token gets in."""
        with self.timed("ray up, 2 hosts"):
            self.ray.up([2])
        with self.timed("ray attach, a line typed in"):
            shown = self.ray.attach("echo $((6 * 7)) $(hostname) $(kvrelay version)")
        check(f"42 host1 {__version__}" in shown, f"the terminal is the head's: {shown}")
        check(refuses(lambda: self.ray.request("/nodes?view=summary", token="")), "no token is refused")
        check(refuses(lambda: self.ray.request("/nodes?view=summary", token="0" * 64)), "a wrong one is refused")

    def deploy(self) -> None:
        """1P+2D over two hosts, the model on the head alone."""
        tiny_checkpoint("llama", self.folder / "tiny", num_hidden_layers=8, hidden_size=128)
        self.copy_model(1)
        with self.timed("deploy 1P+2D"):
            shown = self.ray.deploy(self.args, ingress=1, prefill=1, decode=2)
        check("disaggregated path works" in shown and f"{self.ray.url}/v1" in shown, f"deploy names the API: {shown}")
        with self.timed("first token"):
            next(self.ray.stream(self._body([5, 6, 7, 8] * 10, 1)))
        places = self.ray.workers()
        decode = {host for name, host in places.items() if name.startswith("decode")}
        check(len(decode) == 2, f"decode workers are on two hosts: {places}")

    def commands(self) -> None:
        """`kvrelay status`, `doctor` and `bench` from the laptop, which has Ray's token, and `ray exec` of one."""
        with self.timed("kvrelay status, doctor, bench"):
            status, doctor = self.ray.kvrelay("status"), self.ray.kvrelay("doctor")
            options = "--allow-remote --requests 8 --input-tokens 32 --output-tokens 8 --token-range 3:250"
            bench = self.ray.kvrelay("bench", *options.split())
        with self.timed("ray exec of kvrelay status"):
            there = self.ray.exec("kvrelay status")
        for shown in (status, there):
            check(shown.count("HEALTHY, 2 of 2 running") == 1, f"status counts the decode workers: {shown}")
        lines = [f"{self.hosts.address(host)}: kvrelay {__version__}, " for host in (1, 2)]
        check(all(line in doctor for line in lines), f"doctor lists both hosts: {doctor}")
        check("\n2 ok\n" in doctor, f"doctor finds both pairs well: {doctor}")
        check("8 sent: 8 ok, 0 rejected (429), 0 failed" in bench, f"bench counts answers: {bench}")
        with pytest.raises(HostError, match=r"status 1\n.*asks for Ray's token"):
            self.ray.local("env", f"HOME={self.folder}", "kvrelay", "status", "--address", self.ray.head)

    def copy_model(self, host: int) -> None:
        """Put the checkpoint's folder on a host."""
        target = f"root@{self.hosts.address(host)}:{MODEL}/"
        ssh = " ".join(self.hosts.ssh(host)[:-1])
        self.ray.local("rsync", "-a", "-e", ssh, f"{self.folder / 'tiny'}/", target)

    def verify(self, name: str) -> None:
        """Greedy tokens over HTTP equal Hugging Face's, for the prompts of `kvrelay verify`."""
        prompts = make_prompts(lambda text: list(text.encode()), max_model_len=512, num_output=NUM_OUTPUT)
        expected = expected_tokens(self.folder / "tiny", prompts, NUM_OUTPUT)
        with self.timed(f"verify {name}, {len(prompts)} prompts"):
            found = tokens(self._answers([self._body(prompt.token_ids, NUM_OUTPUT) for prompt in prompts]))
        for prompt, answer, wanted in zip(prompts, found, expected, strict=True):
            check(answer == wanted, f"{prompt.name}: {answer} instead of {wanted}")
        wrong = [*expected[0][:-1], expected[0][-1] ^ 1]
        check(found[0] != wrong, "the control differs")

    def paths(self) -> None:
        """Between hosts KV takes TCP, and no path of one host is proposed, tried or named as a problem. Workers answer
        nobody without TLS.
        """
        status = self.ray.status()
        listed = [path for pair in status["pairs"] for path in pair["paths"]]
        check(any(path["path"] == "tcp" and path["is_chosen"] for path in listed), f"KV takes TCP: {listed}")
        check(not [path for path in listed if path["problem"]], f"no path has a problem: {listed}")
        for worker in status["workers"]:
            host, _, port = worker["address"].rpartition(":")
            with socket.create_connection((host, int(port)), timeout=30) as plain:
                plain.sendall(bytes(40))
                check(plain.recv(8) == b"kvrelayT", f"{worker['worker_id']} speaks TLS alone")

    def ports(self) -> None:
        """Open to other hosts are the ports of the docs' firewall table, all those that the cluster file pins among
        them, and one more of each replica: Serve's gRPC between deployments, at any port.
        """
        named = firewall_table()
        for host, kind in ((1, "head"), (2, "worker"), (3, "worker")):
            found = self.ray.listening(host)
            other = {port: users for port, users in found.items() if not any(port in ports for ports in named)}
            replicas = set(re.findall(r'"ray::ServeRepli",pid=(\d+)', " ".join(other.values())))
            check(len(replicas) == len(other), f"the firewall table names what listens on host {host}: {other}")
            check(self.ray.pinned(kind) <= set(found), f"Ray listens on its pinned ports on host {host}: {found}")

    def scale(self) -> None:
        """A third host joins by `ray start`, which needs the token; then 2P+2D."""
        with self.timed("ray start on a third host"):
            self.ray.join(3)
            self.ray.await_nodes(3)
        with pytest.raises(HostError, match="InvalidAuthToken"):
            self.ray.on_host(3, f"RAY_AUTH_TOKEN={'0' * 64} ray health-check --address {self.ray.head}:6379")
        with self.timed("kvrelay scale to 2P+2D"):
            shown = self.ray.kvrelay("scale", "--prefill", "2")
        check("now at prefill 2" in shown, f"scale ends with the count: {shown}")
        check(self._counts() == {"prefill": 2, "decode": 2}, f"so many run: {self.ray.workers()}")

    def scale_down(self) -> None:
        """One of two decode workers leaves."""
        with self.timed("kvrelay scale to 2P+1D"):
            shown = self.ray.kvrelay("scale", "--decode", "1")
        check(" has left after " in shown and "now at decode 1" in shown, f"scale ends with the count: {shown}")
        check(self._counts() == {"prefill": 2, "decode": 1}, f"so many run: {self.ray.workers()}")

    def crash(self) -> None:
        """A host with workers is killed while streams run; they go on with the same tokens. Then it comes back."""
        body = self._body([9, 8, 7, 6] * 20, LONG)
        (self._long,) = tokens(self._answers([body]))
        retries = self.metric("kvrelay_request_retries_total")
        with self.timed("streams through a crash"):
            found, _ = self._streams(body, 4, lambda: self.hosts.crash(2))
        check(all(answer == self._long for answer in found), "streams continue with the same tokens")
        check(self.metric("kvrelay_request_retries_total") > retries, "the crash met a stream")
        with self.timed("replace the crashed host's workers"):
            self.ray.until(self._is_replaced, 150, "2P+2D on the other hosts")
        with self.timed("bring the host back"):
            self.hosts.start(2)
            self.ray.join(2)
            self.ray.await_nodes(3)

    def _is_replaced(self) -> bool:
        hosts = self.ray.workers().values()
        return len(hosts) == 4 and self.hosts.address(2) not in hosts

    def _counts(self) -> dict[str, int]:
        return dict(Counter(name.partition("-")[0] for name in self.ray.workers()))

    def cut(self) -> None:
        """A link is cut for some seconds while streams run, and mended. A worker there that has just missed a heartbeat
        gets no streams that moment: then the link is cut again.
        """
        host, retries = self._off_head("decode")[0], self.metric("kvrelay_request_retries_total")

        def cut() -> None:
            self.hosts.cut(host)
            time.sleep(4.0)
            self.hosts.mend(host)

        for _ in range(3):
            with self.timed("streams through a link cut for 4 s"):
                found, longest_s = self._streams(self._body([9, 8, 7, 6] * 20, LONG), 4, cut)
            check(all(answer == self._long for answer in found), "streams continue with the same tokens")
            is_met = longest_s > 1.0 or self.metric("kvrelay_request_retries_total") > retries
            if is_met:
                break
        check(is_met, f"a cut met a stream: {self.ray.workers()}, host {host}, the longest gap is {longest_s:.2f} s")

    def slow(self) -> None:
        """Requests succeed over a link of 10 Mbit/s and 100 ms each way, which their KV crosses."""
        host = (self._off_head("decode") or self._off_head("prefill"))[0]
        prompts = [[11 + index, 12, 13, 14] * 60 for index in range(6)]
        bodies = [self._body(prompt, NUM_OUTPUT) for prompt in prompts]
        self.hosts.slow(host, "10mbit", 0.1)
        with self.timed("6 requests, a link of 10 Mbit/s + 100 ms"):
            slow = self._answers(bodies)
        self.hosts.fast(host)
        check(any(one["kvrelay"]["transfer"]["transport"] == "tcp" for one in slow), f"KV crosses the link: {slow}")
        with self.timed("the same 6 requests, at full speed"):
            check(tokens(self._answers(bodies)) == tokens(slow), "the same tokens")

    def down(self) -> None:
        """`ray down` ends Ray on the head; on the others it ends by itself, without a head. Its two agents there try to
        report that for another minute, and are not waited for.
        """
        with self.timed("ray down"):
            self.ray.down()
        with self.timed("Ray has ended on every host"):
            self.ray.until(lambda: not any(map(self._has_ray, (1, 2, 3))), 90, "Ray has ended on every host")

    def _has_ray(self, host: int) -> bool:
        lines = self.hosts.run(host, "ps", "-eo", "args").splitlines()
        return any(re.search(r"raylet|gcs_server|ray::(?!\w+Agent)", line) for line in lines)

    # ---- requests

    def _body(self, prompt: Sequence[int], num_tokens: int) -> dict[str, Any]:
        limits = {"max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        return {"model": "tiny", "prompt": list(prompt), **limits}

    def _answers(self, bodies: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        with ThreadPoolExecutor(4) as pool:
            return list(pool.map(self.ray.complete, bodies))

    def _streams(self, body: dict[str, Any], count: int, fault: Any) -> tuple[list[list[int]], float]:
        """The tokens of so many streams at once, and the longest gap between two chunks in seconds; the fault comes
        once each of them has begun.
        """
        gaps = [0.0]
        begun = threading.Barrier(count + 1, timeout=60.0)

        def run(_: int) -> list[int]:
            answer: list[int] = []
            last_s = 0.0
            for number, chunk in enumerate(self.ray.stream(body, timeout_s=90.0)):
                if number == 0:
                    begun.wait()
                    last_s = time.monotonic()
                gaps.append(time.monotonic() - last_s)
                last_s = time.monotonic()
                check("error" not in chunk, f"a stream failed: {chunk}")
                answer += [token for choice in chunk["choices"] for token in choice.get("token_ids") or ()]
            return answer

        with ThreadPoolExecutor(count) as pool:
            running = [pool.submit(run, index) for index in range(count)]
            begun.wait()
            fault()
            return [one.result() for one in running], max(gaps)

    def _off_head(self, role: str) -> list[int]:
        """The hosts other than the head that have a worker of the role."""
        places = {host for name, host in self.ray.workers().items() if name.startswith(role)}
        return [host for host in (3, 2) if self.hosts.address(host) in places]

    def metric(self, name: str) -> float:
        """The sum of a metric's samples."""
        with urllib.request.urlopen(f"{self.ray.url}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))


def run(ray: RayHosts, folder: Path) -> Scenario:
    """All steps in order."""
    scenario = Scenario(ray, folder)
    scenario.up()
    scenario.deploy()
    scenario.verify("1P+2D on 2 hosts")
    scenario.commands()
    scenario.paths()
    scenario.scale()
    scenario.ports()
    scenario.verify("2P+2D on 3 hosts")
    scenario.crash()
    scenario.cut()
    scenario.scale_down()
    scenario.slow()
    scenario.verify("2P+1D after the faults")
    scenario.down()
    return scenario


def main() -> None:
    """Run all steps and print the table: `python -m tests.hosts.scenario`, as root."""
    if why := why_not():
        sys.exit(f"no hosts here: {why}")
    with tempfile.TemporaryDirectory() as folder, Hosts(3) as hosts:
        scenario = run(RayHosts(hosts, Path(folder) / "laptop"), Path(folder))
    print(scenario.table())


if __name__ == "__main__":
    main()
