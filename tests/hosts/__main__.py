"""Hosts in namespaces by hand: `python -m tests.hosts --help`."""

import argparse
import os
import sys

from kvrelay.cluster.chaos.hosts.namespaces import PREFIX, HostError, Hosts, why_not


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.hosts", description="Several hosts on one machine.")
    parser.add_argument("--prefix", default=PREFIX, help=f"the network's first three numbers (default {PREFIX})")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("up", help="make COUNT hosts").add_argument("count", type=int)
    run = commands.add_parser("run", help="run a command on a host")
    run.add_argument("host", type=int)
    run.add_argument("words", nargs=argparse.REMAINDER, metavar="command")
    for name, text in {
        "crash": "kill all that runs on a host",
        "start": "bring a crashed host back",
        "cut": "take a host's link down",
        "mend": "take it up again",
        "slow": "limit a host's link, both ways",
        "fast": "undo slow",
    }.items():
        commands.add_parser(name, help=text).add_argument("host", type=int)
    slow = commands.choices["slow"]
    slow.add_argument("rate", nargs="?", default="10mbit")
    slow.add_argument("latency_s", nargs="?", type=float, default=0.1)
    commands.add_parser("down", help="remove everything")
    told = parser.parse_args()
    try:
        hosts = Hosts(getattr(told, "count", 0), told.prefix)
        _do(hosts, told)
    except HostError as error:
        sys.exit(f"{error}")


def _do(hosts: Hosts, told: argparse.Namespace) -> None:
    if told.command == "up":
        if why := why_not():
            raise HostError(why)
        hosts.up()
        print(f"hosts {hosts.address(1)} to {hosts.address(hosts.count)}, key {hosts.key}")
    elif told.command == "run":
        os.execvp("ssh", [*hosts.ssh(told.host), *told.words])
    elif told.command == "slow":
        hosts.slow(told.host, told.rate, told.latency_s)
    elif told.command == "down":
        hosts.close()
    else:
        getattr(hosts, told.command)(told.host)


if __name__ == "__main__":
    main()
