"""`make audit`: what the public advisories say of what is installed, or that they could not be asked.

Exit code 0: nothing is known of any of them. 1: something is, and is listed. 2: not all could be asked about.
"""

import json
import subprocess
import sys
from typing import Any

_SECONDS = 300
_OURS = "chairlift"


def main() -> int:
    """Asks; returns the exit code."""
    command = [sys.executable, "-m", "pip_audit", "--format", "json", "--progress-spinner", "off"]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
        return verdict(json.loads(asked.stdout)["dependencies"])
    except subprocess.TimeoutExpired:
        reason = f"no answer after {_SECONDS} s"
    except (ValueError, KeyError):  # it ended otherwise than by an answer
        reason = (asked.stderr.strip().splitlines() or [f"pip-audit ended with {asked.returncode}"])[-1]
    return _not_asked(reason)


def verdict(dependencies: list[dict[str, Any]]) -> int:
    """Tells what was answered; returns the exit code."""
    others = [one for one in dependencies if one["name"] != _OURS]
    unknown = [one["name"] for one in others if "skip_reason" in one]
    found = [(one, advisory) for one in others for advisory in one.get("vulns", [])]
    for one, advisory in found:
        fixed = ", ".join(advisory["fix_versions"]) or "none yet"
        print(f"{one['name']} {one['version']}: {advisory['id']} (fixed in: {fixed})")
    if found:
        return 1
    if unknown:
        return _not_asked(
            f"{len(unknown)} of {len(others)} packages got no answer ({', '.join(unknown[:5])} …)"
        )
    print(f"audit: no advisory is known of any of {len(others)} packages")
    return 0


def _not_asked(reason: str) -> int:
    print(f"audit: the advisories could not be asked, so nothing is known: {reason}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
