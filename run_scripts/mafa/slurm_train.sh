#!/usr/bin/env bash
# Trains on several nodes under Slurm, one task a GPU. From the root of the repository:
#
#   sbatch --nodes=2 --gpus-per-node=4 --ntasks-per-node=4 run_scripts/mafa/slurm_train.sh \
#     --cfg-path projects/mafa/train/albef_4m.yaml \
#     --options run.output_dir=/shared/albef_4m run.resume_ckpt_path=auto
#
# run.output_dir must lie on storage that all nodes see. Five minutes before the time limit, and when
# the job is preempted, the run saves its state and leaves with status 75; the job is then requeued,
# and goes on where it was. With run.resume_ckpt_path=auto a job that is submitted again does so too.
#SBATCH --job-name=mafa
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@300
#SBATCH --requeue
#SBATCH --output=slurm-%x-%j.log
#SBATCH --open-mode=append
set -euo pipefail

# Slurm runs a copy of this file, so the repository is where sbatch was called.
cd "$SLURM_SUBMIT_DIR"
[ -x .venv/bin/python ] && PYTHON="${PYTHON:-.venv/bin/python}"
PYTHON="${PYTHON:-python}"
MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
export MASTER_ADDR MASTER_PORT="${PORT:-29500}"

# srun does not take this over from the job by itself.
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"
# No launcher between: signals reach the ranks, and their exit status reaches this script. After the
# first rank has ended, the others have two minutes to end by themselves.
status=0
srun --kill-on-bad-exit=0 --wait=120 "$PYTHON" train.py "$@" || status=$?
[ "$status" -ne 75 ] || scontrol requeue "$SLURM_JOB_ID"
exit "$status"
