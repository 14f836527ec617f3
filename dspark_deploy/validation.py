"""What pydantic found wrong with a file, as lines for the person who has it.

Not covered: profiles, whose faults name file and line (`profile.loading`).
"""

from __future__ import annotations

from pydantic import ValidationError


def fault_lines(error: ValidationError) -> list[str]:
    """One line per fault: where in the document, and what should be there."""
    return [
        f"{'.'.join(map(str, fault['loc'])) or 'the whole'}: {fault['msg'].removeprefix('Value error, ')}"
        for fault in error.errors(include_url=False)
    ]
