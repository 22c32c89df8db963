"""Models: their shape, the decoder, and the files they come from and go to."""

from gymllm_trainers.models.config import DecoderConfig as DecoderConfig
from gymllm_trainers.models.decoder import Decoder as Decoder
from gymllm_trainers.models.decoder import LoRAParam as LoRAParam
from gymllm_trainers.models.decoder import merge_adapters as merge_adapters
from gymllm_trainers.models.hub import Params as Params
from gymllm_trainers.models.load import LoadedModel as LoadedModel
from gymllm_trainers.models.load import build_decoder as build_decoder
from gymllm_trainers.models.load import load_model as load_model
from gymllm_trainers.models.peft import choose_linears as choose_linears
from gymllm_trainers.models.peft import load_adapters as load_adapters
from gymllm_trainers.models.peft import save_adapters as save_adapters
from gymllm_trainers.models.save import decoder_params as decoder_params
from gymllm_trainers.models.save import save_model as save_model
from gymllm_trainers.models.sharding import make_mesh as make_mesh
from gymllm_trainers.models.sharding import param_shardings as param_shardings
from gymllm_trainers.models.sharding import shard_decoder as shard_decoder
from gymllm_trainers.models.tiny import random_decoder as random_decoder
from gymllm_trainers.models.tiny import tiny_config as tiny_config

__all__ = [
    "Decoder",
    "DecoderConfig",
    "LoRAParam",
    "LoadedModel",
    "Params",
    "build_decoder",
    "choose_linears",
    "decoder_params",
    "load_adapters",
    "load_model",
    "make_mesh",
    "merge_adapters",
    "param_shardings",
    "random_decoder",
    "save_adapters",
    "save_model",
    "shard_decoder",
    "tiny_config",
]
