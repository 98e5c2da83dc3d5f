#!/usr/bin/env bash
# A node of Ray in a container (compose.yaml): ray-node.sh ARGUMENTS of `ray start`. Reads the secrets that are mounted.
# Ray gets the container's SIGTERM: the node drains for at most RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S, so that Serve moves
# its replicas to other nodes and they finish what they run.
set -euo pipefail

for name in KVRELAY_API_KEY KVRELAY_SECRET RAY_AUTH_TOKEN; do
    file="/run/secrets/${name,,}"
    if [[ -r "$file" ]]; then
        declare -x "$name=$(<"$file")"
    fi
done

exec ray start --block "$@"
