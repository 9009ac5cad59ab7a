"""Python runs this file at the start of each process that has its folder on PYTHONPATH."""

import os

from servd.trace import recorder

if recorder.FOLDER in os.environ:
    recorder.CallRecorder().start()
