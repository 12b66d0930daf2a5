"""Our executor as on a GPU, without one: steps are launched, waited for in another thread, settled late.

python -m tests.rig.late_executor --model FOLDER --listen unix:PATH
"""

import sys

from executor import __main__ as service
from rpc.server import main
from tests.rig.fake_device import FakeDevice


def run() -> None:
    from executor import selection

    selection.accelerator_of = lambda _: FakeDevice()  # the device is the CPU in a GPU's clothes
    sys.argv += ["--device", "cpu", "--attention", "reference"]
    main(service.PROG, service.run)


if __name__ == "__main__":
    run()
