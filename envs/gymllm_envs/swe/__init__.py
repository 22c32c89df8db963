"""`gymllm/SWE-v0`: faults in real repositories, mended by an agent, judged by tests that it never sees.

task.py       a task and its file
patching.py   unified diffs
"""
