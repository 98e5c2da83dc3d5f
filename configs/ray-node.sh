#!/usr/bin/env bash
# A node of Ray in a container (compose.yaml): ray-node.sh ARGUMENTS of `ray start`
# Reads the secrets that are mounted. On SIGTERM a worker first leaves the cluster: Serve moves its replicas to other
# nodes, and they finish what they run, for at most KVRELAY_LEAVE_S seconds. The head stops at once.
set -euo pipefail

for name in KVRELAY_API_KEY KVRELAY_SECRET RAY_AUTH_TOKEN; do
    file="/run/secrets/${name,,}"
    if [[ -r "$file" ]]; then
        declare -x "$name=$(<"$file")"
    fi
done

ray start --block "$@" &
node=$!

stop() {
    trap '' TERM INT
    if [[ " $* " != *" --head "* ]]; then
        python -m kvrelay.cluster.launch.leave_node --within "${KVRELAY_LEAVE_S:-150}" || true
    fi
    kill -TERM "$node" 2>/dev/null || true
}
trap 'stop "$@"' TERM INT

status=0
wait "$node" || status=$?
while kill -0 "$node" 2>/dev/null; do # a signal ended the wait
    status=0
    wait "$node" || status=$?
done
exit "$status"
