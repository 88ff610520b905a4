"""What is measured on the day a GPU is there, in one go: see gpu_check.sh."""
