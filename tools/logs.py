"""What the tools print beside their results."""

import logging
import sys


def log_to_stderr() -> None:
    """The package's messages as plain lines; of libraries, only what matters."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("leangrpo").setLevel(logging.INFO)
    for chatty in ("bitsandbytes", "diffusers"):  # warn about kernels nobody asked for, and empty lists of modules
        logging.getLogger(chatty).setLevel(logging.ERROR)
