"""What gymllm's own tests use and third parties may too."""

from gymllm.testing.env_conformance import check_env_conformance as check_env_conformance

__all__ = ["check_env_conformance"]
