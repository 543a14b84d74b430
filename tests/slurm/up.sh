#!/bin/bash
# A Slurm cluster of two pretended nodes, n1 and n2, on this one machine, for tests.
# usage: up.sh DIR     Needs root and Debian's slurm-wlm and munge. Afterwards: export SLURM_CONF=DIR/slurm.conf
# Ports: PORT and the next two, from SLURM_TEST_PORT (16817).
set -euo pipefail
[ $# -eq 1 ] || { echo "usage: $0 DIR" >&2; exit 2; }
dir=$(realpath -m "$1")   # slurmctld and slurmd need an absolute path: a restart with a relative one loses steps
host=$(hostname -s)
port=${SLURM_TEST_PORT:-16817}
mkdir -p "$dir"/{state,spool-n1,spool-n2,log}

cat > "$dir/slurm.conf" <<CONF
ClusterName=test
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$port
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=cred_expire=5
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool-%n
SlurmctldPidFile=$dir/slurmctld.pid
SlurmdPidFile=$dir/slurmd-%n.pid
SlurmctldLogFile=$dir/log/slurmctld.log
SlurmdLogFile=$dir/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc=$dir/log/jobcomp.txt
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SlurmdParameters=config_overrides
SlurmdTimeout=20
MailProg=/bin/true
ReturnToService=2
KillWait=5
MinJobAge=3600
GresTypes=gpu
NodeName=n1 NodeHostname=$host NodeAddr=127.0.0.1 Port=$((port + 1)) CPUs=4 RealMemory=8000 Gres=gpu:2 State=UNKNOWN
NodeName=n2 NodeHostname=$host NodeAddr=127.0.0.1 Port=$((port + 2)) CPUs=4 RealMemory=8000 Gres=gpu:2 State=UNKNOWN
PartitionName=debug Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
CONF
# gres.conf wants device nodes: clones of /dev/null stand in for GPUs
for i in 0 1; do [ -e "$dir/gpu$i" ] || mknod "$dir/gpu$i" c 1 3; done
echo "NodeName=n[1-2] Name=gpu File=$dir/gpu[0-1]" > "$dir/gres.conf"
echo "CgroupPlugin=cgroup/v1" > "$dir/cgroup.conf"   # 22.05 refuses 'disabled'; without constraints it is never used

if ! pgrep -x munged > /dev/null; then
  install -d -o munge -g munge -m 755 /run/munge
  runuser -u munge -- /usr/sbin/munged
  touch "$dir/own-munged"
fi
for _ in $(seq 50); do munge -n 2> /dev/null | unmunge > /dev/null 2>&1 && break; sleep 0.1; done

export SLURM_CONF="$dir/slurm.conf"
/usr/sbin/slurmctld -f "$SLURM_CONF"
for node in n1 n2; do /usr/sbin/slurmd -f "$SLURM_CONF" -N "$node"; done
for _ in $(seq 100); do
  [ "$(sinfo -h -N -t idle -o %N 2> /dev/null | sort -u | wc -l)" -eq 2 ] && exit 0
  sleep 0.1
done
echo "the two nodes are not idle after 10 s: $(sinfo -h -N -o '%N %t %E' 2>&1); see $dir/log" >&2
exit 1
