"""The parser of every command. An error is one sentence on stderr and exit code 2, as in services."""

import argparse
from typing import Any, NoReturn

from chairlift.flag_numbers import integer, number


class Parser(argparse.ArgumentParser):
    """argparse without the page of usage before each complaint, and with words for a wrong number."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.register("type", int, integer)
        self.register("type", float, number)

    def error(self, message: str) -> NoReturn:
        """Ends the process with a sentence."""
        self.exit(2, f"{self.prog}: {message.removeprefix('argument ')} (see {self.prog} --help)\n")
