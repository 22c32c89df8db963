"""Programs that run in a grading sandbox. Nothing of gymllm is imported there, nor they here."""
