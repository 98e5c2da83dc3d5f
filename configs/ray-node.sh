#!/usr/bin/env bash
# A node of Ray in a container (compose.yaml): ray-node.sh ARGUMENTS of `ray start`. Names the secrets that are mounted.
# Ray gets the container's SIGTERM: the node drains for at most RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S, so that Serve moves
# its replicas to other nodes and they finish what they run.
set -euo pipefail

# the names of files, not what they hold: a process's environment can be read
for variable in KVRELAY_API_KEY_FILE KVRELAY_SECRET_FILE RAY_AUTH_TOKEN_PATH; do
    file="${variable,,}"
    file="/run/secrets/${file%_*}"
    if [[ -r "$file" ]]; then
        declare -x "$variable=$file"
    fi
done

exec ray start --block "$@"
