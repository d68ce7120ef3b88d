#!/usr/bin/env bash
# Trains on several nodes under Slurm: one launcher a node, one process a GPU. From the root of
# the repository:
#
#   sbatch --nodes=2 --gpus-per-node=4 run_scripts/mafa/slurm_train.sh \
#     --cfg-path projects/mafa/train/albef_4m.yaml \
#     --options run.output_dir=/shared/albef_4m run.resume_ckpt_path=auto
#
# run.output_dir must lie on storage that all nodes see. With run.resume_ckpt_path=auto a job that is
# requeued, or submitted again after its time limit, goes on from the newest checkpoint there.
#SBATCH --job-name=mafa
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=32
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --output=slurm-%x-%j.log
#SBATCH --open-mode=append
set -euo pipefail

# Slurm runs a copy of this file, so the repository is where sbatch was called.
cd "$SLURM_SUBMIT_DIR"
[ -x .venv/bin/python ] && PYTHON="${PYTHON:-.venv/bin/python}"
PYTHON="${PYTHON:-python}"
GPUS="${GPUS:-${SLURM_GPUS_ON_NODE:-1}}"
PORT="${PORT:-29500}"
first_host="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"

# srun does not take this over from the job by itself.
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"
srun "$PYTHON" -m torch.distributed.run \
  --nnodes="$SLURM_NNODES" --nproc_per_node="$GPUS" \
  --rdzv_id="$SLURM_JOB_ID" --rdzv_backend=c10d --rdzv_endpoint="$first_host:$PORT" \
  train.py "$@"
