"""What gymllm's own tests use and third parties may too."""
