#!/bin/sh
# One campaign as a Ray job, from a checkout (files that git ignores are not uploaded). Arguments are those of `hotpass compile`:
#
#   sh ray_configs/submit.sh --model smollm2-135m --traffic chat --budget 5m --out /data/campaign
#
# Give --out a place that outlives the job: the job's working directory does not. RAY_JOBS is the address of the jobs API.

set -e
cd "$(dirname "$0")/.."
exec ray job submit --address "${RAY_JOBS:-http://127.0.0.1:8265}" --working-dir . -- hotpass compile "$@"
