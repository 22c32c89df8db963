"""`gymllm/Terminal-v0`: tasks in a terminal, each with a script that checks what was done.

env.py        the environment; tools.py: what an agent can call
task.py       what a task is, as JSON lines; harbor.py, dockerfile.py: as folders of Harbor's form
default_tasks.py   a small set, built in
building.py, images.py   a task's tree, made once; checking.py: the reward, from a fresh sandbox
screen.py     keys in, screen out; emulator.py, grid.py, keys.py: what a terminal shows, what a key sends
"""

ENV_ID = "gymllm/Terminal-v0"
