"""`chairlift` as the documents' command blocks find it while they are tested.

A server is there already: what would start a service has its flags read by that service's own settings, and
what asks a router asks the one that is there. Everything else is the command itself.
"""

import importlib
import os
import sys

from chairlift import __main__ as command_line
from rpc.settings import load

SETTINGS = {
    "serve": ("chairlift.serve", "ServeSettings"),
    "router": ("router.config", "RouterSettings"),
    "scheduler": ("scheduler.config", "SchedulerSettings"),
    "executor": ("executor.config", "ExecutorSettings"),
}
ASKING = {"generate", "explain"}

command, *flags = sys.argv[1:]
if command in SETTINGS:
    module, name = SETTINGS[command]
    load(getattr(importlib.import_module(module), name), flags, prog=f"chairlift {command}")
    sys.exit(0)
if command in ASKING and "--address" not in flags:
    flags += ["--address", os.environ["STAND_IN_ROUTER"]]
sys.exit(command_line.main([command, *flags]))
