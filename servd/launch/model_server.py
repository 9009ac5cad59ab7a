"""The server of one model behind the gateway: the process tree of `servd serve`, as a child process
that ends with its parent.
"""

import logging
import os
import signal
import sys

from servd import launch
from servd.base import log
from servd.base.errors import ConfigError
from servd.config import Config
from servd.ipc.child import read_start
from servd.ipc.start_messages import StartModel


def main() -> None:
    newest: list[Config] = []

    def reload(config: Config) -> None:
        newest[:] = [config]
        os.kill(os.getpid(), signal.SIGHUP)

    newest.append(read_start(StartModel, reload).config)
    log.setup("servd", newest[0].observability)
    try:
        sys.exit(launch.run_server(lambda: newest[0]))
    except ConfigError as error:
        logging.getLogger("servd").error("%s: %s", newest[0].model.model, error)
        sys.exit(2)


if __name__ == "__main__":
    main()
