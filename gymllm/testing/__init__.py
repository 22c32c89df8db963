"""What gymllm's own tests use and third parties may too."""

from gymllm.testing.env_conformance import RULES as RULES
from gymllm.testing.env_conformance import check_env_conformance as check_env_conformance
from gymllm.testing.env_conformance import check_rule as check_rule

__all__ = ["RULES", "check_env_conformance", "check_rule"]
