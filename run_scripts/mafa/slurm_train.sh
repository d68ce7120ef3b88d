#!/usr/bin/env bash
# Train on several nodes under Slurm, one task per GPU. From the root of the repository:
#
#   sbatch --nodes=2 --gpus-per-node=4 --ntasks-per-node=4 run_scripts/mafa/slurm_train.sh \
#     --cfg-path projects/mafa/train/albef_4m.yaml \
#     --options run.output_dir=/shared/albef_4m run.resume_ckpt_path=auto
#
# run.output_dir must be on storage shared by all nodes. Five minutes before the time limit, and when
# the job is preempted, the run saves a checkpoint and exits with status 75; the job is then requeued
# and resumes. With run.resume_ckpt_path=auto, a job that is submitted again resumes too.
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

# Slurm runs a copy of this file: find the repository by the folder where sbatch was called.
cd "$SLURM_SUBMIT_DIR"
[ -x .venv/bin/python ] && PYTHON="${PYTHON:-.venv/bin/python}"
PYTHON="${PYTHON:-python}"
MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
export MASTER_ADDR MASTER_PORT="${PORT:-29500}"

# srun does not inherit this from the job.
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"
# Without a launcher in between, signals reach the ranks, and their exit status reaches this script.
# After the first rank has exited, the others have two minutes to exit by themselves.
status=0
srun --kill-on-bad-exit=0 --wait=120 "$PYTHON" train.py "$@" || status=$?
[ "$status" -ne 75 ] || scontrol requeue "$SLURM_JOB_ID"
exit "$status"
