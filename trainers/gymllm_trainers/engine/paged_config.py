from gymllm_trainers.engine.config import EngineConfig as EngineConfig
