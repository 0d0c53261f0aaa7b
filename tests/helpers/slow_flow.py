"""A flow that takes its time, as a process that can be killed: `python -c "from tests.helpers.slow_flow import slow; slow()"`."""

import time

from prefect import flow


@flow
def slow() -> None:
    time.sleep(600)
