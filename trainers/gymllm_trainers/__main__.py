"""`python -m gymllm_trainers`: as `gymllm-train`."""

from gymllm_trainers.cli import train

if __name__ == "__main__":
    raise SystemExit(train())
