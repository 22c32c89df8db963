"""Reinforcement learning of language models on JAX: the models, the engine that serves them, the trainer.

    models/                 the decoder; folders, GGUF files and LoRA adapters, read and written
    engine/                 the embedded engine: continuous batching, new weights between two steps
    train.py, learner/      gymllm-train: rollouts, updates, publication; algorithms/, optimizer.py
    evaluate.py             gymllm-eval: any model on any environment
    serve/                  gymllm-serve: the engine for other programs, over HTTP
    config.py, cli.py       settings, and the command lines
    run_folder.py           what a run leaves behind; checkpoint.py, report.py

Nothing is imported here: `gymllm_trainers.models` and `gymllm_trainers.engine` are what programs use.
"""
