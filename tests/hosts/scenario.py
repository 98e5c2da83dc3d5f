"""What a user does with a cluster on several hosts, step by step, each timed: up, deploy, verify, scale, faults, down.

    python -m tests.hosts.scenario [--prefix 10.77.1]

As root. Every step checks what it claims, and raises where that does not hold; `Scenario.table` has their times. From
the first deployment to the end of the cluster a client sends one request after the other: none may fail in any step.
The model is a tiny random checkpoint in float32 that only the head has: other hosts fetch it from there.
"""

import argparse
import contextlib
import re
import shlex
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvrelay import __version__
from kvrelay.cluster.chaos.hosts.namespaces import PREFIX, HostError, Hosts, why_not
from kvrelay.cluster.verify.prompts import expected_tokens, make_prompts
from kvrelay.engine.checkpoints.tiny import tiny_checkpoint
from tests.hosts.ray_hosts import WORKER_PORTS, RayHosts, firewall_table, refuses
from tests.hosts.steady_client import SteadyClient

NUM_OUTPUT = 24
ENGINE_NICENESS = 5  # where it is pinned to cores
LONG = 1200  # tokens of a stream that a fault meets
MODEL = "/root/tiny"
OTHER_VERSION, OTHER_CODE = "9.9.9", "/root/kvrelay-source"  # there `ray up` puts this checkout


def check(holds: object, what: str) -> None:
    """Raise HostError unless it holds."""
    if not holds:
        raise HostError(f"does not hold: {what}")


def tokens(answers: Sequence[dict[str, Any]]) -> list[list[int]]:
    """The tokens of each answer."""
    return [answer["choices"][0]["token_ids"] for answer in answers]


@dataclass(frozen=True, slots=True)
class Step:
    """`requests`, `failed`: the steady client's that ended meanwhile."""

    name: str
    seconds: float
    requests: int = 0
    failed: int = 0

    def row(self) -> str:
        """Its line in the table, as Markdown."""
        return f"| {self.name} | {self.seconds:.3f} | {self.requests} | {self.failed} |"


class Scenario:
    """Three hosts: `ray up` of two, the third joins. Steps are called in order."""

    def __init__(self, ray: RayHosts, folder: Path) -> None:
        self.ray, self.hosts, self.folder = ray, ray.hosts, folder
        self.steps: list[Step] = []
        self.args: dict[str, Any] = {
            "model": {"source": MODEL, "dtype": "float32", "served_name": "tiny"},
            "engine": {"kv_memory": "64MiB", "num_threads": 1},
            "router": {"policy": "round_robin", "local_prefill_tokens": 0},  # a fault on any host meets streams
            "cluster": {"worker_ports": "{}-{}".format(*WORKER_PORTS), "cores_per_worker": 1},
        }
        self.client = SteadyClient(lambda: tokens([ray.complete(self._body([3, 1, 4, 1, 5, 9, 2, 6], 8))])[0])

    @contextlib.contextmanager
    def timed(self, step: str) -> Iterator[None]:
        """Record and print how long a step takes, and what the steady client saw. None of its requests may fail."""
        began_s, requests, failed = time.monotonic(), self.client.requests, self.client.failed
        yield
        seconds = time.monotonic() - began_s
        self._record(Step(step, seconds, self.client.requests - requests, self.client.failed - failed))
        check(not self.client.failed, f"no request fails: {self.client.first_failure}")

    def _record(self, step: Step) -> None:
        self.steps.append(step)
        print(step.row(), flush=True)

    def table(self) -> str:
        """The steps, as Markdown."""
        head = ["| step | s | requests meanwhile | failed |", "|---|---|---|---|"]
        return "\n".join([*head, *(step.row() for step in self.steps)])

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
        with self.timed("from the start of kvrelay deploy to a cold request's first token"):
            with self.timed("kvrelay deploy, 1P+2D"):
                shown = self.ray.deploy(self.args, ingress=1, prefill=1, decode=2)
            with contextlib.closing(self.ray.stream(self._body([5, 6, 7, 8] * 10, 1))) as chunks:
                next(chunks)
        check("disaggregated path works" in shown and f"{self.ray.url}/v1" in shown, f"deploy names the API: {shown}")
        places = self.ray.workers()
        decode = {host for name, host in places.items() if name.startswith("decode")}
        check(len(decode) == 2, f"decode workers are on two hosts: {places}")
        self.fetched_once(2)

    def fetched_once(self, host: int) -> None:
        """A host without the model has fetched it once, from the head, however many replicas started there."""
        folders = self.hosts.run(host, "sh", "-c", "ls -d ~/.cache/kvrelay/checkpoints/tiny-fetched-*").split()
        found = f"fetching .* MB from {self.hosts.address(1)}:"
        logs = "/tmp/ray/session_latest/logs/serve/replica_kvrelay_*"
        replicas = self.hosts.run(host, "sh", "-c", f"grep -l {shlex.quote(found)} {logs}").split()
        check(len(folders) == 1 == len(replicas), f"host {host} has fetched the model once: {folders}, {replicas}")
        rows = self.ray.request("/api/v0/actors?filter_keys=class_name&filter_predicates=%3D&filter_values=ModelHost")
        names = [actor["name"] for actor in rows["data"]["result"]["result"]]  # they have ended
        named = re.compile(r"kvrelay-model-host-\w{16}-for-(ingress|prefill|decode)-\w+")
        is_named = all(map(named.fullmatch, names)) and len(set(names)) == len(names) > 0
        check(is_named, f"the actors that gave the model to host {host} have names: {names}")

    def priorities(self) -> None:
        """Ray's processes run at normal priority (its own default is nice 15), and of a worker's threads only those
        of its engine below it.
        """
        for host in (1, 2):
            lines = self.hosts.run(host, "ps", "-eLo", "pid,lwp,ni,args").splitlines()[1:]
            threads = [line.split(maxsplit=3) for line in lines if " ray::" in line]
            main = [(args, nice) for pid, thread, nice, args in threads if pid == thread]
            check(any("ServeReplica:kvrelay:decode" in args for args, _ in main), f"a worker is on host {host}: {main}")
            check(all(nice == "0" for _, nice in main), f"every process of host {host} has priority 0: {main}")
            nice = {(int(nice), "ServeReplica:kvrelay:" in args) for _, _, nice, args in threads}
            check(
                nice <= {(0, True), (0, False), (ENGINE_NICENESS, True)}, f"on host {host} engines alone yield: {nice}"
            )

    def refusals(self) -> None:
        """`kvrelay deploy` ends with status 1 and the one line that matters: beside the application that runs, one
        whose replica has another version of kvrelay, then one whose model is nowhere.
        """
        package = f"{OTHER_CODE}/kvrelay/__init__.py"
        self.hosts.run(2, "sed", "-i", f's/^__version__ = .*/__version__ = "{OTHER_VERSION}"/', package)
        there = {"num_cpus": 0.1, "resources": {f"node:{self.hosts.address(2)}": 0.01}}
        other = {"decode": {"ray_actor_options": {**there, "runtime_env": {"env_vars": {"PYTHONPATH": OTHER_CODE}}}}}
        with self.timed("kvrelay deploy, another version on one host"):
            line = self._refused(self.args, options=other)
        named = (
            f"has kvrelay {OTHER_VERSION} on host {self.hosts.address(2)}, but kvrelay {__version__} was deployed from"
        )
        is_named = (
            line.startswith("kvrelay: VersionMismatch: decode-") and f" {named} host {self.hosts.prefix}." in line
        )
        check(is_named, f"both versions and hosts are named: {line}")
        with self.timed("kvrelay deploy, a model that is nowhere"):
            line = self._refused(self.args | {"model": {"source": "/root/nowhere"}})
        check(re.match(r"kvrelay: ModelNotFound: .*/root/nowhere", line), f"the model is named: {line}")
        self.ray.remove("other")

    def _refused(self, args: dict[str, Any], **options: Any) -> str:
        """The line with which the deployment of an application `other` fails, aggregated: two replicas are enough."""
        args = args | {"cluster": args["cluster"] | {"prefill": 0}}
        with pytest.raises(HostError, match=r"^`kvrelay deploy .*`: status 1\n") as refused:
            self.ray.deploy(args, app_name="other", ingress=1, decode=1, **options)
        shown = str(refused.value)
        lines = [line for line in shown.splitlines() if line.startswith("kvrelay: ")]
        check(len(lines) == 1 and "Traceback" not in shown, f"one line says why: {shown}")
        return lines[0]

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

    def role(self) -> None:
        """A decode worker becomes a prefill worker and returns, while the client's requests run."""
        name = min(name for name in self.ray.workers() if name.startswith("decode"))
        for role in ("prefill", "decode"):
            with self.timed(f"kvrelay role {role}"):
                shown = self.ray.kvrelay("role", name, role)
            found = re.search(rf"{name}: \w+ -> {role} in ([\d.]+) s", shown)
            check(found, f"the change is reported: {shown}")
            self._record(Step(f"kvrelay role {role}, the change itself", float(found[1])))
            now = {one["worker_id"]: one["info"]["role"] for one in self.ray.status()["workers"]}
            check(now[name] == role, f"{name} is a {role} worker: {now}")

    def scale_down(self) -> None:
        """One of two decode workers leaves."""
        with self.timed("kvrelay scale to 2P+1D"):
            shown = self.ray.kvrelay("scale", "--decode", "1")
        check(" has left after " in shown and "now at decode 1" in shown, f"scale ends with the count: {shown}")
        check(self._counts() == {"prefill": 2, "decode": 1}, f"so many run: {self.ray.workers()}")

    def crash(self) -> None:
        """A host that decodes is killed while streams run there; they go on with the same tokens. Then it comes back.

        Streams that all run elsewhere, as after a missed heartbeat, are followed by others.
        """
        host, workers = self._off_head("decode")[-1], self.ray.workers()
        was_met = False

        def crash() -> None:
            nonlocal was_met
            if was_met := self._streams_on(host) > 0:
                self.hosts.crash(host)

        for first in (10, 50, 60):
            _, attempts = self._long_streams("streams through a crash", first, crash)
            if was_met:
                break
        check(attempts > 1, f"the crash of host {host} met a stream: {workers}")

        def is_replaced() -> bool:
            hosts = self.ray.workers().values()
            return len(hosts) == 4 and self.hosts.address(host) not in hosts

        with self.timed("replace the crashed host's workers"):
            self.ray.until(is_replaced, 150, "2P+2D on the other hosts")
        self.fetched_once({2: 3, 3: 2}[host])
        with self.timed("bring the host back"):
            self.hosts.start(host)
            self.ray.join(host)
            self.ray.await_nodes(3)

    def _streams_on(self, host: int) -> int:
        """Long streams that decode there and have most of their tokens before them."""
        here = {name for name, address in self.ray.workers().items() if address == self.hosts.address(host)}
        live = [one for one in self.ray.requests() if one["is_live"] and one["decode"] in here]
        return sum(one["max_tokens"] == LONG and one["tokens"] < LONG / 2 for one in live)

    def _counts(self) -> dict[str, int]:
        return dict(Counter(name.partition("-")[0] for name in self.ray.workers()))

    def cut(self) -> None:
        """A link is cut for some seconds while streams run, and mended. A worker there that has just missed a heartbeat
        gets no streams that moment: then the link is cut again.
        """
        host = self._off_head("decode")[0]

        def cut() -> None:
            self.hosts.cut(host)
            time.sleep(4.0)
            self.hosts.mend(host)

        for first in (20, 30, 40):
            longest_s, attempts = self._long_streams("streams through a link cut for 4 s", first, cut)
            is_met = longest_s > 1.0 or attempts > 1
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

    def _long_streams(self, name: str, first: int, fault: Any) -> tuple[float, int]:
        """Four streams at once, with the tokens that they have without the fault, which comes once each of them has
        begun. Returns the longest gap between two chunks in seconds, and the most attempts that one of them took.

        No two prompts begin alike, nor with tokens of another call's, and none was computed before: the streams go to
        all workers, not to one that has them cached.
        """
        bodies = [self._body([first + number, 8, 7, 6] * 20, LONG) for number in range(4)]
        with self.timed(name):
            found, longest_s, attempts = self._streams(bodies, fault)
        check(found == tokens(self._answers(bodies)), "streams continue with the same tokens")
        return longest_s, attempts

    def _streams(self, bodies: Sequence[dict[str, Any]], fault: Any) -> tuple[list[list[int]], float, int]:
        gaps, attempts = [0.0], [1]
        begun = threading.Barrier(len(bodies) + 1, timeout=60.0)

        def run(body: dict[str, Any]) -> list[int]:
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
            attempts.append(chunk["kvrelay"]["attempts"])
            return answer

        with ThreadPoolExecutor(len(bodies)) as pool:
            running = [pool.submit(run, body) for body in bodies]
            begun.wait()
            fault()
            return [one.result() for one in running], max(gaps), max(attempts)

    def _off_head(self, role: str) -> list[int]:
        """The hosts other than the head that have a worker of the role."""
        places = {host for name, host in self.ray.workers().items() if name.startswith(role)}
        return [host for host in (3, 2) if self.hosts.address(host) in places]


def run(ray: RayHosts, folder: Path) -> Scenario:
    """All steps in order."""
    scenario = Scenario(ray, folder)
    scenario.up()
    scenario.deploy()
    with scenario.client:
        scenario.verify("1P+2D on 2 hosts")
        scenario.priorities()
        scenario.commands()
        scenario.refusals()
        scenario.paths()
        scenario.scale()
        scenario.ports()
        scenario.verify("2P+2D on 3 hosts")
        scenario.role()
        scenario.crash()
        scenario.cut()
        scenario.scale_down()
        scenario.slow()
        scenario.verify("2P+1D after the faults")
    scenario.down()
    return scenario


def main() -> None:
    """Run all steps and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefix", default=PREFIX, help=f"the hosts' network, three numbers (default {PREFIX})")
    given = parser.parse_args()
    if why := why_not():
        sys.exit(f"no hosts here: {why}")
    with tempfile.TemporaryDirectory() as folder, Hosts(3, given.prefix) as hosts:
        scenario = run(RayHosts(hosts, Path(folder) / "laptop"), Path(folder))
    print(scenario.table())


if __name__ == "__main__":
    main()
