"""Session: the worker groups of one run and the step they currently hold; the only object that tasks talk to."""

import importlib
import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from engine.backends.weight_sync import LOGPROB_BOUNDS, exchange_folder, probe_sequences, retract, verify_served
from engine.batch import Batch
from engine.config import OptimizerConfig, PPOConfig
from engine.data.examplefile import load_examples
from engine.data.prepare import Prompt
from engine.data.promptfile import load_prompts
from engine.dataflows.roles import Learned, Progress, Roles
from engine.dataflows.sft import fine_tune
from engine.errors import DivergedError, StoreError
from engine.evaluation import evaluate_suite
from engine.experience import load_experience, prompt_batch, save_experience
from engine.metrics import Metrics
from engine.placement import Placed, place
from engine.retention import apply_retention
from engine.runs import Run
from engine.seeds import stream_rows
from engine.store import StepRef, step_path
from engine.workers.critic import CriticWorker
from engine.workers.policy import PolicyWorker
from engine.workers.reference import ReferenceWorker
from engine.workers.reward import RewardWorker
from engine.workers.rollout import RolloutWorker
from engine.workers.trained import optimizer_file

START = "start"
CANARY_ROWS = 8
Listener = Callable[[str, int, int, Metrics], None]  # stage, step, steps planned, metrics


class Session:
    """Runs single steps of a run on its worker groups and commits their results.

    Every method looks for the committed step, brings the workers to the state of its parent, computes and commits.
    """

    def __init__(self, run: Run, listener: Listener | None = None) -> None:
        self.run = run
        self._listener = listener
        self._executor = ThreadPoolExecutor(1)
        self._starting: Future[Placed] | None = None
        self._held: StepRef | None = None  # whose weights and optimiser the trained roles have
        self._served: StepRef | None = None  # whose weights the rollout engine has
        self._scorers_checked = False
        self._flow = importlib.import_module(f"engine.dataflows.{run.config.algorithm.name}")

    def warm_up(self) -> None:
        """Begin starting the worker groups in the background; errors surface at the first step."""
        if self._starting is None:
            # The thread is kept until close: an embedded cluster ends with the thread that started it.
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="placement")
            self._starting = self._executor.submit(place, self.run)

    def start(self, data: StepRef) -> StepRef:
        """Commit the start checkpoint (`start/`): the base model, or the one made from it by supervised fine-tuning."""
        run, config = self.run, self.run.config
        if done := run.store.committed(START, parent=data):
            return done
        with self._guard(), run.store.commit(START, parent=data) as draft:
            if config.sft is None and config.model.init == "pretrained":
                draft.facts = {"folder": str(run.source)}
            else:
                draft.metrics = self._make_start(data).values()
                saved = self._roles().policy.call(
                    PolicyWorker.save, str(draft.folder / "policy"), str(run.source), False
                )
                draft.facts = {"folder": None, **saved}
        return draft.ref

    def rollout(self, iteration: int, parent: StepRef) -> StepRef:
        """Generate, score and commit the experience of an iteration with the policy committed in `parent`."""
        path = step_path("rollout", iteration)
        if done := self.run.store.committed(path, parent=parent):
            return done
        with self._guard():
            self._check_scorers()
            self._serve(parent)
            batch = self._flow.make_experience(self._roles(), self._prompts(iteration), self.run.config)
            with self.run.store.commit(path, parent=parent) as draft:
                save_experience(batch, draft.folder)
                draft.metrics = _with_speed(self._seconds(), int(batch.response_lengths.sum())).values()
                draft.facts = {"samples": len(batch), "response_tokens": int(batch.response_lengths.sum())}
        return draft.ref

    def train(self, iteration: int, experience: StepRef) -> StepRef:
        """Learn from one committed experience and commit the new weights."""
        run, checkpoint = self.run, self.run.config.checkpoint
        path = step_path("train", iteration)
        if done := run.store.committed(path, parent=experience):
            return done
        with self._guard():
            self._hold(self._before(iteration, experience))
            learned = self._learn(iteration, experience)
            self._held = None  # the workers are ahead of the store until the commit succeeds
            due = iteration % checkpoint.every == 0 or iteration == run.config.iterations
            with run.store.commit(path, parent=experience) as draft:
                draft.facts = {"weights": due, "controllers": learned.progress.controllers}
                if due:
                    draft.facts |= self._save(draft.folder)
                draft.metrics = (learned.metrics | self._seconds()).values()
            self._held = draft.ref
        apply_retention(run.store, iteration, checkpoint, run.config.gate.suite)
        return draft.ref

    def evaluate(self, iteration: int, policy: StepRef) -> StepRef:
        """Greedy answers of a committed policy on every suite, as a committed report; iteration 0 = start checkpoint.

        facts of the manifest: {"suites": {name: {"score_mean": float | None, "rows": int, "unscored": int, ...}}}.
        """
        path = step_path("evaluation", iteration)
        if done := self.run.store.committed(path, parent=policy):
            return done
        config = self.run.config
        with self._guard():
            self._check_scorers()
            self._serve(policy)
            with self.run.store.commit(path, parent=policy) as draft:
                reports = {}
                for suite in config.evaluation.suites:
                    limit = suite.max_response_tokens or config.rollout.max_response_tokens
                    rows = self._data(f"suite-{suite.name}.parquet" if suite.data else "eval.parquet")[: suite.max_rows]
                    reports[suite.name] = evaluate_suite(
                        self._roles(), rows, limit, config.seed, draft.folder / suite.name
                    )
                draft.facts = {"suites": reports}
                draft.metrics = self._seconds().values()
        return draft.ref

    def close(self) -> None:
        """End all worker processes of the run; harmless when repeated."""
        self._held = self._served = None
        self._scorers_checked = False
        starting, self._starting = self._starting, None
        if starting is None:
            return
        if starting.exception() is None:
            starting.result().close()
        self._executor.shutdown()

    def _roles(self) -> Roles:
        self.warm_up()
        assert self._starting is not None
        return self._starting.result().roles

    @contextmanager
    def _guard(self) -> Iterator[None]:
        """After any failure the workers' state is unknown: they are ended, and built again by the next attempt."""
        try:
            yield
        except Exception:
            self.close()
            raise

    def _make_start(self, data: StepRef) -> Metrics:
        run, sft = self.run, self.run.config.sft
        policy = self._roles().policy
        steps = sft.steps if sft else 1
        policy.call(PolicyWorker.load, str(run.source), run.config.model.init, sft or run.config.train, steps)
        if sft is None:
            return Metrics()
        examples = load_examples(run.store.read(data) / "sft.parquet")
        return fine_tune(
            policy, examples, sft, run.config.seed, lambda step, metrics: self._tell("sft", step, steps, metrics)
        )

    def _check_scorers(self) -> None:
        """Once per set of workers: the scorers must tell a right from a wrong answer through the path training uses."""
        if not self._scorers_checked:
            rows = self._data("train.parquet")[:CANARY_ROWS]
            self._roles().reward.call(RewardWorker.canary, prompt_batch(rows, range(len(rows)), 0, "canary"))
            self._scorers_checked = True

    def _prompts(self, iteration: int) -> Batch:
        config = self.run.config
        prompts, size = self._data("train.parquet"), config.train.prompts_per_iteration
        rows = stream_rows(len(prompts), size, iteration - 1, config.seed, "prompts")
        positions = range((iteration - 1) * size, iteration * size)
        return prompt_batch([prompts[row] for row in rows], positions, config.seed, "rollout")

    def _data(self, name: str) -> list[Prompt]:
        data = self.run.store.committed("data")
        if data is None:
            raise StoreError("The run has no prepared data.", path=str(self.run.store.folder), remedy="Resume the run.")
        return load_prompts(self.run.store.read(data) / name)

    def _before(self, iteration: int, experience: StepRef) -> StepRef:
        """The step whose policy made the experience."""
        parent = self.run.store.manifest(experience).parent
        assert parent is not None
        return StepRef(START if iteration == 1 else step_path("train", iteration - 1), parent)

    def _learn(self, iteration: int, experience: StepRef) -> Learned:
        batch = load_experience(self.run.store.read(experience))
        before = self.run.store.manifest(self._before(iteration, experience))
        progress = Progress(iteration, before.facts.get("controllers", {}))
        learned: Learned = self._flow.learn(self._roles(), batch, self.run.config, progress)
        return learned

    def _hold(self, step: StepRef) -> None:
        """Bring the trained roles to exactly the state committed in `step`."""
        if self._held == step:
            return
        self._held = None
        iteration = 0 if step.path == START else int(step.path.split("/")[1])
        store = self.run.store
        if step.path != START and (not store.manifest(step).facts["weights"] or store.is_pruned(step)):
            self._replay(iteration, step)
        else:
            self._load(step)
        self._held = step

    def _replay(self, iteration: int, step: StepRef) -> None:
        """Redo one training step from its committed experience, because its weights were not kept."""
        store = self.run.store
        experience = store.committed(step_path("rollout", iteration))
        if experience is None or store.manifest(step).parent != experience.manifest_sha256:
            raise StoreError(
                f"The experience that {step.path} learned from is gone.", remedy="Resume from an earlier step."
            )
        self._hold(self._before(iteration, experience))
        learned = self._learn(iteration, experience)
        before, now = store.manifest(step).metrics["train/grad_norm"], learned.metrics["train/grad_norm"]
        if before is None or abs(before - now) > 1e-4 * max(abs(before), 1e-12):
            raise DivergedError(
                f"Repeating {step.path} from its experience gave gradient norm {now!r}; the run had {before!r}.",
                remedy="The code, the libraries or the number of threads changed; continue where the run was made.",
            )

    def _load(self, step: StepRef) -> None:
        roles, config = self._roles(), self.run.config
        folder = policy_folder(self.run, step)
        steps = config.iterations * config.train.epochs * config.train.mini_batches
        started = step.path == START
        roles.policy.call(PolicyWorker.load, str(folder), "pretrained", config.train, steps)
        if not started:
            roles.policy.call(PolicyWorker.load_optimizer, str(optimizer_file(folder)))
        if roles.critic is not None:
            critic = folder if started else folder.with_name("critic")
            roles.critic.call(CriticWorker.load, str(critic), "pretrained", self._critic_optimizer(), steps)
            if not started:
                roles.critic.call(CriticWorker.load_optimizer, str(optimizer_file(critic)))
        if roles.reference is not None:
            start = self.run.store.committed(START)
            assert start is not None
            roles.reference.call(ReferenceWorker.load, str(policy_folder(self.run, start)), "pretrained", None, 1)

    def _critic_optimizer(self) -> OptimizerConfig:
        train, algorithm = self.run.config.train, self.run.config.algorithm
        assert isinstance(algorithm, PPOConfig)
        return train.model_copy(update={"lr": algorithm.critic_lr or 10 * train.lr})

    def _save(self, folder: Path) -> dict[str, object]:
        roles, source = self._roles(), str(self.run.source)
        if roles.critic is not None:
            roles.critic.call(CriticWorker.save, str(folder / "critic"), source, True)
        return roles.policy.call(PolicyWorker.save, str(folder / "policy"), source, True)  # type: ignore[no-any-return]

    def _serve(self, step: StepRef) -> None:
        """Give the rollout engine the policy of `step` and prove by probing that it serves it."""
        if self._served == step:
            return
        self._served = None
        self._hold(step)
        roles, config = self._roles(), self.run.config
        version = int(self.run.store.manifest(step).facts.get("steps", 0)) if step.path != START else 0
        handle = roles.policy.call(PolicyWorker.publish, str(exchange_folder(self.run.key)), version)
        try:
            roles.rollout.call(RolloutWorker.receive, handle)
        finally:
            retract(handle)
        probes = probe_sequences(vocabulary_size(self.run.source), config.seed)
        trained = roles.policy.call(PolicyWorker.probe, probes)
        for served in roles.rollout.call(RolloutWorker.probe, probes):
            verify_served(
                served,
                trained,
                bound=LOGPROB_BOUNDS[config.model.dtype],
                served_version=handle.version,
                trained_version=version,
            )
        self._served = step

    def _seconds(self) -> Metrics:
        """Wall seconds spent in each role's methods since last asked."""
        metrics = Metrics()
        roles = self._roles()
        for group in (roles.policy, roles.rollout, roles.reward, roles.reference, roles.critic):
            for name, seconds in group.take_seconds().items() if group is not None else ():
                metrics = metrics.with_value(f"time/{name.replace('.', '_')}_s", seconds, "sum")
        return metrics

    def _tell(self, stage: str, step: int, steps: int, metrics: Metrics) -> None:
        if self._listener is not None:
            self._listener(stage, step, steps, metrics)


def _with_speed(seconds: Metrics, tokens: int) -> Metrics:
    return seconds.with_value("rollout/tokens_per_s", tokens / seconds["time/rollout_generate_s"])


def vocabulary_size(source: Path) -> int:
    """Number of token ids that the model of this folder knows."""
    return int(json.loads((source / "config.json").read_text())["vocab_size"])


def policy_folder(run: Run, step: StepRef) -> Path:
    """Complete Hugging Face folder (config, weights, tokenizer, chat template) of a start or train step."""
    base = run.store.manifest(step).facts.get("folder")
    return Path(base) if base else run.store.read(step) / "policy"
