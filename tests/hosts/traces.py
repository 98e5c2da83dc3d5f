"""What a set of hosts has left on this machine."""

from pathlib import Path

from kvrelay.cluster.chaos.hosts.namespaces import Hosts


def traces(hosts: Hosts) -> list[str]:
    """Its links, namespaces, files and processes: none after `close`."""
    tag, folder = hosts.tag, str(hosts.folder)
    links = [path.name for path in Path("/sys/class/net").glob(f"{tag}*")]
    spaces = [path.name for path in Path("/run/netns").glob(f"{tag}*")]
    lines = [(path.parent.name, _command(path)) for path in Path("/proc").glob("[0-9]*/cmdline")]
    processes = [f"{pid}: {line}" for pid, line in lines if folder in line or f"{tag}v" in line]
    return links + spaces + processes + ([folder] if hosts.folder.exists() else [])


def _command(path: Path) -> str:
    try:
        return path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
