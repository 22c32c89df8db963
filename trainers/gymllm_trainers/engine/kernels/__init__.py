"""The engine's matrix products and attention in C, for CPUs.

XLA's own are made for the large batches of training: with a few rows they read weights at a fraction of
the memory's bandwidth, and bfloat16 slower still, and what they sum in which order depends on the shape.
These read weights in place, once, and give a row the same bits whatever else is in the batch.

    build.py        compiles the C files at their first use, into the user's cache
    calls.py        `Kernels`: the same functions as XLA's, as calls that can be traced
    common.*        vectors, XLA's foreign function interface and its threads
    functions.h     functions of vectors
    linear.*        x @ kernel
    attention.*     attention over the paged cache, and writing to it
    trunk.c         every layer of a dense decoder, in one call
    sample.c        tokens from hidden states
    packed_attention.c  attention of the trainer's packed rows, and its gradient
"""

from gymllm_trainers.engine.kernels.build import build as build
from gymllm_trainers.engine.kernels.calls import Kernels as Kernels
from gymllm_trainers.engine.kernels.calls import TrunkInputs as TrunkInputs
from gymllm_trainers.engine.kernels.calls import TrunkShape as TrunkShape
from gymllm_trainers.engine.kernels.calls import load as load
from gymllm_trainers.engine.kernels.calls import unavailable as unavailable

__all__ = ["Kernels", "TrunkInputs", "TrunkShape", "build", "load", "unavailable"]
