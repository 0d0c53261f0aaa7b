"""What can be found wrong with the services of `reward` before one is called; no secret is repeated in a message."""

import os
import re
from urllib.parse import parse_qsl, urlsplit

from engine.config import HttpReward, JudgeReward
from engine.errors import Problem

_SECRET = re.compile(r"(?i)key|token|secret|passw|auth|sig")  # in the name of an address's parameter


def check_service(key: str, reward: HttpReward | JudgeReward, *, elsewhere: bool) -> list[Problem]:
    """Problems of one entry. elsewhere: the environment of this machine does not count."""
    problems = _check_judge(key, reward) if isinstance(reward, JudgeReward) else _check_url(f"{key}.url", reward.url)
    return problems if elsewhere else problems + _check_token(key, reward)


def check_pattern(key: str, pattern: str) -> list[Problem]:
    """Whether the pattern is a regular expression."""
    try:
        re.compile(pattern)
    except re.error as error:
        return [Problem(key, pattern, f"is no regular expression: {error}. Correct it; mind YAML's own escapes")]
    return []


def _check_judge(key: str, reward: JudgeReward) -> list[Problem]:
    problems = _check_url(f"{key}.base_url", reward.base_url)
    if "{response}" not in reward.template:
        remedy = "does not hold {response}, so the judge would not see what to judge; put it in"
        problems.append(Problem(f"{key}.template", reward.template, remedy))
    faults = check_pattern(f"{key}.pattern", reward.pattern)
    if not faults and re.compile(reward.pattern).groups != 1:
        faults = [Problem(f"{key}.pattern", reward.pattern, "needs exactly one group, around the number: (\\d+)")]
    if reward.low >= reward.high:
        faults.append(Problem(f"{key}.low", reward.low, f"must be below high, {reward.high:g}"))
    return problems + faults


def _check_url(key: str, url: str) -> list[Problem]:
    """An address that can be called and holds no secret; one that does is not repeated in the message."""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return [Problem(key, "***", "is no address; use http:// or https://, a host and a path")]
    if "@" in parts.netloc or any(_SECRET.search(name) for name, _ in parse_qsl(parts.query, keep_blank_values=True)):
        remedy = "holds a secret, which would be kept in run.json; give it by token_env, the name of a variable"
        return [Problem(key, f"{parts.scheme}://{parts.hostname or ''}/***", remedy)]
    if not usable:
        return [Problem(key, url, "is no address; use http:// or https://, a host and a path")]
    return []


def _check_token(key: str, reward: HttpReward | JudgeReward) -> list[Problem]:
    if reward.token_env is None or os.environ.get(reward.token_env):
        return []
    remedy = "there is no such environment variable; export it, here and wherever rewards are scored"
    return [Problem(f"{key}.token_env", reward.token_env, remedy)]
