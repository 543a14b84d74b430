#!/bin/bash
# Ends the cluster that up.sh started in DIR, with the jobs that still run there.
# usage: down.sh DIR
set -uo pipefail
[ $# -eq 1 ] || { echo "usage: $0 DIR" >&2; exit 2; }
dir=$(realpath -m "$1")
export SLURM_CONF="$dir/slurm.conf"
mapfile -t jobs < <(squeue -h -o %A 2> /dev/null)
[ "${#jobs[@]}" -eq 0 ] || scancel "${jobs[@]}" 2> /dev/null
for _ in $(seq 100); do [ -z "$(squeue -h 2> /dev/null)" ] && break; sleep 0.1; done

pids=()
for file in "$dir"/slurmd-n1.pid "$dir"/slurmd-n2.pid "$dir"/slurmctld.pid; do
  [ -f "$file" ] && pids+=("$(cat "$file")")
done
[ -e "$dir/own-munged" ] && pids+=("$(pgrep -x -o munged)")
for pid in "${pids[@]}"; do kill "$pid" 2> /dev/null; done
for _ in $(seq 100); do
  alive=0
  for pid in "${pids[@]}"; do   # a zombie that nobody reaps has ended
    case $(ps -o stat= -p "$pid") in "" | Z*) ;; *) alive=1 ;; esac
  done
  [ "$alive" -eq 0 ] && exit 0
  sleep 0.1
done
echo "still running after 10 s: ${pids[*]}" >&2
exit 1
