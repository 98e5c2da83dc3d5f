"""Several hosts on one machine, whose links are cut, slowed or made one-way, and that crash.

A host is a network namespace on a bridge, with pid, mount, host name and ipc namespaces, /tmp, /dev/shm, a home
folder (an overlay over the user's) and an sshd of its own. It knows the names of the others and asks no name server.
Names of links and folders derive from the network prefix, so that several sets exist side by side. Linux, root,
iproute2, openssh-server and rsync are needed; Ray itself is not.

`python -m tests.hosts --help` is the same by hand.
"""

import contextlib
import hashlib
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from kvrelay.cluster.errors import ClusterError

PREFIX = "10.77.1"
_ROOT = Path("/var/tmp")  # not /tmp: each host mounts one of its own over it
_TOOLS = ("ip", "tc", "sshd", "ssh", "ssh-keygen", "rsync", "unshare", "setsid", "mount")
_START_S = 15.0
_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"  # where Debian keeps ip, tc and sshd
_SSHD = """\
Port 22
ListenAddress {address}
HostKey {folder}/hostkey
AuthorizedKeysFile {folder}/authorized_keys
StrictModes no
PasswordAuthentication no
PermitRootLogin yes
MaxStartups 100
PidFile none
UsePAM no
AcceptEnv *
Subsystem sftp internal-sftp
"""
_BOOT = """\
set -e
hostname {name}
mkdir -p {folder}/home {folder}/work
mount -t overlay overlay -o lowerdir={home},upperdir={folder}/home,workdir={folder}/work {home}
{kept}
mount --rbind {folder}/tmp /tmp
mount --bind {folder}/hosts /etc/hosts
mount --bind {folder}/resolv.conf /etc/resolv.conf
mount -t tmpfs -o size=2g tmpfs /dev/shm
exec {sshd} -D -f {folder}/sshd_config -E {folder}/sshd.log
"""


class HostError(ClusterError):
    """A host could not be made or reached, or a command on it failed."""


def why_not() -> str | None:
    """Why hosts cannot be made here; None when they can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "hosts in namespaces need root on Linux"
    if missing := [tool for tool in _TOOLS if shutil.which(tool, path=_PATH) is None]:
        return f"these programs are missing: {', '.join(missing)}"
    name = f"kvtry{os.getpid()}"
    try:
        _call("ip", "netns", "add", name)
        _call("ip", "link", "add", f"{name}v", "type", "veth", "peer", "name", "eth0", "netns", name)
        _call(
            *f"ip netns exec {name} unshare -m -u -i -p -f --mount-proc --kill-child mount -t tmpfs x /dev/shm".split()
        )
    except HostError as error:
        return f"namespaces are not permitted here: {error}"
    finally:
        for command in (f"ip link del {name}v", f"ip netns del {name}"):
            with contextlib.suppress(HostError):
                _call(*command.split())
    return None


class Hosts:
    """`count` hosts at `prefix`.1, .2, …; the machine itself is `prefix`.254 on their network.

    `up` (or entering the context) first removes what an earlier set with the prefix left; `close` removes every
    process, namespace, link, mount and file. Hosts count from 1.
    """

    def __init__(self, count: int, prefix: str = PREFIX) -> None:
        """Raises HostError when prefix is not three numbers."""
        parts = prefix.split(".")
        if len(parts) != 3 or not all(part.isdigit() and int(part) < 256 for part in parts):
            raise HostError(f"{prefix}: the prefix is the first three numbers of an IPv4 address, such as {PREFIX}")
        self.count, self.prefix = count, prefix
        self.tag = "kv" + hashlib.blake2b(prefix.encode(), digest_size=3).hexdigest()  # names of links are short
        self.folder = _ROOT / f"kvrelay-hosts-{prefix}"
        self.key = self.folder / "key"
        self.environment: dict[str, str] = {}  # of commands that run on hosts

    def address(self, host: int) -> str:
        """The IP address of a host."""
        return f"{self.prefix}.{host}"

    # ---- up and down

    def __enter__(self) -> Self:
        self.up()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def up(self) -> None:
        """Make the hosts, and wait until each answers by ssh. Raises HostError, after undoing what was made."""
        self.close()
        try:
            self.folder.mkdir(parents=True)
            Path("/run/sshd").mkdir(exist_ok=True)
            _call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.key))
            _call("ip", "link", "add", self.tag, "type", "bridge")
            _call("ip", "addr", "add", f"{self.prefix}.254/24", "dev", self.tag)
            _call("ip", "link", "set", self.tag, "up")
            for host in self._all():
                self._connect(host)
                self._boot(host)
            for host in self._all():
                self._await_ssh(host)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Remove every process, namespace, link, mount and file of this prefix. Idempotent."""
        for name in self._namespaces():
            _end(name)
            with contextlib.suppress(HostError):
                _call("ip", "netns", "del", name)
        for path in sorted(Path("/sys/class/net").glob(f"{self.tag}*"), key=lambda path: -len(path.name)):
            with contextlib.suppress(HostError):  # a veth ends with its peer's namespace, sooner or later
                _call("ip", "link", "del", path.name)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _all(self) -> range:
        return range(1, self.count + 1)

    def _name(self, host: int) -> str:
        return f"{self.tag}h{host}"

    def _namespaces(self) -> list[str]:
        folder = Path("/run/netns")
        return sorted(path.name for path in folder.glob(f"{self.tag}h*")) if folder.is_dir() else []

    def _connect(self, host: int) -> None:
        name, link = self._name(host), f"{self.tag}v{host}"
        _call("ip", "netns", "add", name)
        _call("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", name)
        _call("ip", "link", "set", link, "master", self.tag, "up")
        for command in (
            "link set lo up",
            f"addr add {self.address(host)}/24 dev eth0",
            "link set eth0 up",
            f"route add default via {self.prefix}.254",
        ):
            _call("ip", "-n", name, *command.split())

    def _boot(self, host: int) -> None:
        """Start the host's sshd as the first process of its namespaces; it ends with all that runs there."""
        folder = self.folder / f"h{host}"
        (folder / "tmp").mkdir(parents=True, exist_ok=True)
        (folder / "tmp").chmod(0o1777)
        if not (folder / "hostkey").exists():
            _call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "hostkey"))
        shutil.copy(f"{self.key}.pub", folder / "authorized_keys")
        (folder / "sshd_config").write_text(_SSHD.format(address=self.address(host), folder=folder))
        names = ["127.0.0.1 localhost", *(f"{self.address(other)} host{other}" for other in self._all())]
        (folder / "hosts").write_text("\n".join(names) + "\n")
        (folder / "resolv.conf").write_text("nameserver 127.0.0.1\n")  # none: other names fail at once, not after 10 s
        # what runs there stays visible where it lies in /tmp itself: the checkout, its Python
        kept = {path for path in (Path(__file__).parents[3], Path(sys.prefix)) if path.is_relative_to("/tmp")}
        places = [(path, folder / "tmp" / path.relative_to("/tmp")) for path in sorted(kept)]
        script = _BOOT.format(
            name=f"host{host}",
            folder=folder,
            home=Path.home(),
            sshd=shutil.which("sshd", path=_PATH),
            kept="\n".join(f"mkdir -p {place} && mount --bind {path} {place}" for path, place in places),
        )
        unshare = ["unshare", "-m", "-u", "-i", "-p", "-f", "--mount-proc", "--kill-child"]
        command = ["ip", "netns", "exec", self._name(host), *unshare, "sh", "-c", script]
        _spawn(command, folder / "boot.log")

    def _await_ssh(self, host: int) -> None:
        until = time.monotonic() + _START_S
        while True:
            try:
                socket.create_connection((self.address(host), 22), timeout=1.0).close()
                return
            except OSError as error:
                if time.monotonic() > until:
                    log = (self.folder / f"h{host}" / "boot.log").read_text(errors="replace").strip()
                    raise HostError(f"host {host} did not start: {log or error}") from error
                time.sleep(0.05)

    # ---- commands

    def ssh(self, host: int) -> list[str]:
        """The ssh command line up to the command that runs there."""
        options = ("StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "LogLevel=ERROR", "ConnectTimeout=10")
        dashed = [part for option in options for part in ("-o", option)]
        return ["ssh", "-F", "none", *dashed, "-i", str(self.key), f"root@{self.address(host)}"]

    def run(self, host: int, *command: str, timeout_s: float = 120.0) -> str:
        """What the command prints. Raises HostError with its output when it fails or takes longer."""
        return printed(
            [*self.ssh(host), self._line(command)], f"`{shlex.join(command)}` on host {host}", timeout_s=timeout_s
        )

    def _line(self, command: Sequence[str]) -> str:
        assigned = [f"{name}={value}" for name, value in self.environment.items()]
        return shlex.join([*(["env", *assigned] if assigned else []), *command])

    def num_processes(self, host: int) -> int:
        """How many processes run there, sshd included; 0 while it is down."""
        return len(_pids(self._name(host)))

    # ---- faults

    def crash(self, host: int) -> None:
        """Kill all that runs there at once; its files stay. Peers see a link that is up and ports that refuse."""
        _end(self._name(host))

    def start(self, host: int) -> None:
        """Bring a crashed host back: files as they were, nothing running but sshd. Raises HostError."""
        self._boot(host)
        self._await_ssh(host)

    def cut(self, host: int) -> None:
        """Take its link down: packets are lost both ways, and no connection hears of it."""
        _call("ip", "link", "set", f"{self.tag}v{host}", "down")

    def mend(self, host: int) -> None:
        """Take its link up again."""
        _call("ip", "link", "set", f"{self.tag}v{host}", "up")

    def deafen(self, host: int, to: int) -> None:
        """Lose what `host` sends `to` another one, whose own packets arrive. No sender hears of it."""
        nowhere = "02:00:00:00:00:01"  # no host has this address, so all drop what is sent to it
        self._neighbour("replace", host, to, "lladdr", nowhere, "nud", "permanent")

    def reconcile(self, host: int, to: int) -> None:
        """Undo `deafen`."""
        self._neighbour("del", host, to)

    def _neighbour(self, what: str, host: int, to: int, *how: str) -> None:
        _call("ip", "-n", self._name(host), "neigh", what, self.address(to), "dev", "eth0", *how)

    def slow(self, host: int, rate: str, latency_s: float) -> None:
        """Limit its link, both ways: `rate` as tc writes it ("10mbit"), and so much latency in each direction."""
        self.fast(host)
        link, near, far = (f"{self.tag}{kind}{host}" for kind in "vab")
        if latency_s:
            _call("ip", "link", "add", near, "type", "veth", "peer", "name", far)
            _call("ip", "link", "set", far, "master", self.tag, "up")
            _call("ip", "link", "set", near, "promisc", "on", "up")
            _call("ip", "link", "set", link, "nomaster", "promisc", "on")
            _spawn([sys.executable, str(Path(__file__).with_name("slow_link.py")), link, near, str(latency_s)])
        limit = f"root tbf rate {rate} burst 32kbit latency 400ms"
        _call("tc", "qdisc", "replace", "dev", link, *limit.split())
        _call("tc", "-n", self._name(host), "qdisc", "replace", "dev", "eth0", *limit.split())

    def fast(self, host: int) -> None:
        """Undo `slow`."""
        link = f"{self.tag}v{host}"
        for command in (f"tc qdisc del dev {link} root", f"tc -n {self._name(host)} qdisc del dev eth0 root"):
            with contextlib.suppress(HostError):  # it was not slow
                _call(*command.split())
        if Path(f"/sys/class/net/{self.tag}a{host}").exists():
            _call("ip", "link", "del", f"{self.tag}a{host}")  # the forwarder ends with its device
            _call("ip", "link", "set", link, "master", self.tag, "promisc", "off")


def printed(command: Sequence[str], what: str, *, timeout_s: float, **options: Any) -> str:
    """What a command prints, stderr too. Raises HostError, which begins with `what`, when it fails."""
    output: dict[str, Any] = {
        "stdin": subprocess.DEVNULL,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.STDOUT,
        "text": True,
    }
    try:
        done = subprocess.run(command, timeout=timeout_s, **output, **options)
    except subprocess.TimeoutExpired as error:
        raise HostError(f"{what}: not over after {timeout_s:.0f} s") from error
    if done.returncode:
        raise HostError(f"{what}: status {done.returncode}\n{done.stdout[-6000:]}")
    return str(done.stdout)


def _call(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PATH": _PATH}, timeout=30)
    if done.returncode:
        raise HostError(f"`{shlex.join(command)}`: {done.stderr.strip() or f'status {done.returncode}'}")
    return done.stdout


def _spawn(command: Sequence[str], log: Path = Path(os.devnull)) -> None:
    """Start a process that outlives this one and has no parent here."""
    with log.open("wb") as output:
        subprocess.run(
            ["setsid", "--fork", *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, "PATH": _PATH},
            check=True,
        )


def _pids(namespace: str) -> list[int]:
    try:
        return [int(pid) for pid in _call("ip", "netns", "pids", namespace).split()]
    except HostError:
        return []


def _end(namespace: str) -> None:
    """Kill what runs in a namespace, and wait until it is gone."""
    until = time.monotonic() + _START_S
    while pids := _pids(namespace):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > until:
            raise HostError(f"processes of {namespace} do not end: {pids}")
        time.sleep(0.02)
