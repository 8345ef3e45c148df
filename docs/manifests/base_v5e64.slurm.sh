#!/bin/bash
#SBATCH --job-name=base-v5e64
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --partition=gpu
#SBATCH --comment=capibara-job=base-v5e64,capibara-spec=6d3a2fe61818c52d,capibara-launch=0,capibara-attempt=0,capibara-failures=0,capibara-spent=0
#SBATCH --output=base-v5e64-%j.log
#SBATCH --open-mode=append
#SBATCH --signal=B:TERM@330
#SBATCH --requeue

set -uo pipefail
export JAX_LOCAL_DEVICE_IDS=0,1,2,3,4,5,6,7

# JAX finds the other nodes by Slurm's variables. The step gets SIGTERM before the job's time ends.
# To the processes of the step: srun itself would kill them when it gets the signal.
trap 'capibara_signalled=1; scancel --signal=TERM "$SLURM_JOB_ID"' TERM
# Its exit code comes through a pipe: that of `wait` is lost if a signal comes at the same moment.
exec 4>&1
exec 3< <(trap : TERM; srun --kill-on-bad-exit=0 python -m capibara.launch staged --url=/shared/jobs/base-v5e64/e3b0c44298fc1c14 --sha256=e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855 --restarts=10 --grace=300 --reports=/shared/jobs/base-v5e64/reports/0-0 -- train --gin_file=base_v5e64.gin '--gin_bindings=Plan.slice = "8xh100-8"' '--gin_bindings=Trainer.model_dir = "/shared/runs/base_v5e64"' >&4 4>&- < /dev/null; echo $?)
capibara_step=$!
# A signal ends `wait`; then the step saves a checkpoint, and is waited for again.
while capibara_signalled=""; wait "$capibara_step"; [ -n "$capibara_signalled" ]; do :; done
read -r capibara_code <&3 || capibara_code=1
if (( capibara_code == 75 || capibara_code == 143 )) && (( ${SLURM_RESTART_COUNT:-0} < 10 )); then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$capibara_code"
