"""What every test needs."""

import signal

# A shell starts background jobs with Ctrl-C ignored, and children inherit that: no test of it could pass.
signal.signal(signal.SIGINT, signal.default_int_handler)
