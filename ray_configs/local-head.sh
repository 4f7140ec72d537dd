#!/bin/sh
# A Ray head on this machine alone, with the jobs API, for `ray job submit` and `--address`. Ended by `ray stop`.
#
#   . ray_configs/local-head.sh        (sourced, so that later commands of this shell have the token)
#
# The jobs API runs whatever it is sent: it listens on 127.0.0.1 and asks for the token.
# RAY_worker_niceness=0: Ray runs workers at low priority otherwise, and a measurement then waits for all else on the machine.

export RAY_AUTH_MODE=token
export RAY_AUTH_TOKEN="${RAY_AUTH_TOKEN:-$(python3 -c 'import secrets; print(secrets.token_hex(16))')}"
export RAY_USAGE_STATS_ENABLED=0
export RAY_worker_niceness=0

ray start --head --node-ip-address=127.0.0.1 --port="${RAY_PORT:-6379}" --dashboard-host=127.0.0.1 --dashboard-port="${RAY_JOBS_PORT:-8265}" \
    --disable-usage-stats
