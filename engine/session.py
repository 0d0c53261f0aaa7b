"""Session: the worker groups of one run and the step they currently hold; the only object that tasks talk to."""

import json
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from engine.batch import Batch
from engine.config import CriticConfig, OptimizerConfig, RunConfig, SafeRLHFConfig
from engine.controller.group import WorkerGroup, busy_seconds
from engine.controller.worker import Worker
from engine.data.completions import Example
from engine.data.examplefile import load_examples
from engine.data.prepare import Prompt
from engine.data.promptfile import load_prompts
from engine.dataflows.find import find_dataflow
from engine.dataflows.roles import Learned, Progress, Roles
from engine.dataflows.sft import as_batch, fine_tune
from engine.device_memory import smaller_micro_batches
from engine.errors import DeviceMemoryError, DivergedError, StoreError
from engine.evaluation import evaluate_suite
from engine.experience import drawn_prompts, load_experience, prompt_batch, save_experience
from engine.guards import RATE, equal_scores, judge, lowers_rate
from engine.handover import HandOver
from engine.metrics import Metrics
from engine.placed import Workers
from engine.placement import place
from engine.retention import apply_retention
from engine.runs import Run, policy_folder, require_source
from engine.seeds import stream_rows
from engine.store import StepRef, step_path
from engine.unscored import check_unscored
from engine.utilisation import Resources, model_sizes, rollout_metrics, train_metrics
from engine.workers.critic import CriticWorker
from engine.workers.policy import PolicyWorker
from engine.workers.reference import ReferenceWorker
from engine.workers.reward import RewardWorker
from engine.workers.trained import TrainedWorker, optimizer_file

log = logging.getLogger(__name__)
START = "start"
CANARY_ROWS = 8
Listener = Callable[[str, int, int, Metrics], None]  # stage, step, steps planned, metrics


class Session:
    """Runs single steps of a run on its worker groups and commits their results.

    Every method looks for the committed step, brings the workers to the state of its parent, computes and commits.
    """

    def __init__(self, run: Run[RunConfig], listener: Listener | None = None) -> None:
        require_source(run)
        self.run = run
        self._listener = listener
        self._workers = Workers(lambda was_up: place(self.run, met_before=was_up))
        self._halved = False  # whether micro-batches are smaller than configured
        self._held: StepRef | None = None  # whose weights and optimiser the trained roles have
        self._served: StepRef | None = None  # whose weights the rollout engine has
        self._handover: HandOver | None = None
        self._scorers_checked = False
        self._loaded: dict[str, list[Prompt]] = {}  # of the prepared data, by file
        self._examples: list[Example] | None = None  # of the supervised stage, once they are asked for
        self._began = 0.0  # when the present step began
        self._sizes = model_sizes(run.source)
        self._flow = find_dataflow(run.config)

    def warm_up(self) -> None:
        """Begin starting the worker groups in the background; errors surface at the first step."""
        self._workers.warm_up()

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
            prompts = drawn_prompts(self._data("train.parquet"), self.run.config, iteration)
            batch = self._flow.make_experience(self._roles(), prompts, self.run.config)
            self._check_scores(path, batch)
            with self.run.store.commit(path, parent=parent) as draft:
                save_experience(batch, draft.folder)
                responses, tokens = int(batch.response_lengths.sum()), int(batch.lengths().sum())
                seconds, parallel = self._seconds(), self.run.config.rollout.tensor_parallel
                asked = batch.prompt_lengths[batch.sample_ids == 0]  # a prompt is computed once for all of its samples
                computed = responses + int(asked.sum())
                used = rollout_metrics(self._resources(), seconds, computed, self._sizes, parallel)
                draft.metrics = (_with_speed(seconds, responses) | used | self._elapsed()).values()
                draft.facts = {"samples": len(batch), "response_tokens": responses, "tokens": tokens}
        return draft.ref

    def train(self, iteration: int, experience: StepRef) -> StepRef:
        """Learn from one committed experience and commit the new weights."""
        run, checkpoint = self.run, self.run.config.checkpoint
        path = step_path("train", iteration)
        if done := run.store.committed(path, parent=experience):
            return done
        with self._guard():
            self._rest()
            self._hold(self._before(iteration, experience))
            learned = self._learn(iteration, experience)
            self._held = None  # the workers are ahead of the store until the commit succeeds
            due = iteration % checkpoint.every == 0 or iteration == run.config.iterations
            with run.store.commit(path, parent=experience) as draft:
                draft.facts = {"weights": due, "controllers": learned.progress.controllers}
                if self._halved:
                    draft.facts |= {"micro_batch_tokens": run.config.train.micro_batch_tokens}
                if due:
                    draft.facts |= self._save(draft.folder)
                seconds, epochs = self._seconds(), run.config.train.epochs
                tokens = epochs * run.store.manifest(experience).facts["tokens"]
                used = train_metrics(self._resources(), seconds, tokens, self._sizes)
                draft.metrics = (learned.metrics | seconds | used | self._elapsed()).values()
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
                        self._roles(),
                        rows,
                        limit,
                        config.seed,
                        draft.folder / suite.name,
                        partial(self._check_scores, f"{path}/{suite.name}"),
                    )
                draft.facts = {"suites": reports}
                draft.metrics = self._seconds().values()
        return draft.ref

    def close(self) -> None:
        """End all worker processes of the run; harmless when repeated."""
        self._held = self._served = self._handover = None
        self._scorers_checked = False
        self._workers.close()

    def _roles(self) -> Roles:
        return self._workers.roles()

    @contextmanager
    def _guard(self) -> Iterator[None]:
        """After any failure the workers' state is unknown: they are ended, and built again by the next attempt."""
        self._began = time.perf_counter()
        try:
            yield
        except DeviceMemoryError as error:
            self.close()
            self.run = replace(self.run, config=smaller_micro_batches(self.run.config, error, halved=self._halved))
            self._halved = True
            raise
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
            asked = prompt_batch(rows, range(len(rows)), 0, "canary")
            roles = self._roles()
            for scorers in (roles.reward, roles.cost):
                if scorers is not None:
                    scorers.call(RewardWorker.canary, asked)
            self._scorers_checked = True

    def _check_scores(self, step: str, batch: Batch) -> None:
        check_unscored(batch, self.run.config.max_unscored_share, self.run.store.folder, step)

    def _data(self, name: str) -> list[Prompt]:
        if name not in self._loaded:
            data = self.run.store.committed("data")
            if data is None:
                path = str(self.run.store.folder)
                raise StoreError("The run has no prepared data.", path=path, remedy="Resume the run.")
            self._loaded[name] = load_prompts(self.run.store.read(data) / name)
        return self._loaded[name]

    def _before(self, iteration: int, experience: StepRef) -> StepRef:
        """The step whose policy made the experience."""
        parent = self.run.store.manifest(experience).parent
        assert parent is not None
        return StepRef(START if iteration == 1 else step_path("train", iteration - 1), parent)

    def _learn(self, iteration: int, experience: StepRef) -> Learned:
        batch = load_experience(self.run.store.read(experience))
        before = self.run.store.manifest(self._before(iteration, experience))
        progress = Progress(iteration, before.facts.get("controllers", {}), self._demonstrations(iteration))
        guards, roles = self.run.config.guards, self._roles()
        if lowers_rate(guards):
            for trained in (roles.policy, *self._critics()):
                trained.call(TrainedWorker.scale_rate, progress.controllers.get(RATE, 1.0))
        learned = self._flow.learn(roles, batch, self.run.config, progress)
        if (score := equal_scores(learned.metrics.values())) is not None:
            log.warning("All scores of iteration %d are %g: they teach the policy nothing.", iteration, score)
        after = judge(guards, learned.metrics, learned.progress.controllers)
        return Learned(learned.metrics, Progress(iteration, after))

    def _demonstrations(self, iteration: int) -> Batch | None:
        """Rows of the supervised stage for every optimiser step of an epoch, from an endless stream of their own."""
        config, algorithm = self.run.config, self.run.config.algorithm
        if not isinstance(algorithm, SafeRLHFConfig) or algorithm.ptx_coef == 0:
            return None
        if self._examples is None:
            data = self.run.store.committed("data")
            assert data is not None
            self._examples = load_examples(self.run.store.read(data) / "sft.parquet")
        examples = self._examples
        count = algorithm.ptx_rows * config.train.mini_batches
        rows = stream_rows(len(examples), count, iteration - 1, config.seed, "demonstrations")
        batch = as_batch([examples[row] for row in rows])
        return batch.with_fields(mini_batch=torch.arange(count) // algorithm.ptx_rows)

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
        norms = {name: value for name, value in learned.metrics.values().items() if name.endswith("/grad_norm")}
        for name, now in norms.items():
            before = store.manifest(step).metrics.get(name)
            if before is None or abs(before - now) > 1e-4 * max(abs(before), 1e-12):
                raise DivergedError(
                    f"Repeating {step.path} from its experience gave {name} {now!r}; the run had {before!r}.",
                    remedy="The code, the libraries or the number of threads changed; continue where the run was made.",
                )

    def _load(self, step: StepRef) -> None:
        roles, config = self._roles(), self.run.config
        folder = policy_folder(self.run, step)
        steps = config.iterations * config.train.epochs * config.train.mini_batches
        started = step.path == START
        roles.policy.call(PolicyWorker.load, str(folder), "pretrained", config.train, config.policy_steps)
        if not started:
            roles.policy.call(PolicyWorker.load_optimizer, str(optimizer_file(folder)))
        for critic in self._critics():
            source = folder if started else folder.with_name(critic.role)
            critic.call(CriticWorker.load, str(source), "pretrained", self._critic_optimizer(), steps)
            if not started:
                critic.call(CriticWorker.load_optimizer, str(optimizer_file(source)))
        if roles.reference is not None:
            start = self.run.store.committed(START)
            assert start is not None
            roles.reference.call(ReferenceWorker.load, str(policy_folder(self.run, start)), "pretrained", None, 1)

    def _critics(self) -> list[WorkerGroup]:
        roles = self._roles()
        return [group for group in (roles.critic, roles.cost_critic) if group is not None]

    def _critic_optimizer(self) -> OptimizerConfig:
        train, algorithm = self.run.config.train, self.run.config.algorithm
        assert isinstance(algorithm, CriticConfig)
        return train.model_copy(update={"lr": algorithm.critic_lr or 10 * train.lr})

    def _save(self, folder: Path) -> dict[str, object]:
        roles, source = self._roles(), str(self.run.source)
        for critic in self._critics():
            critic.call(CriticWorker.save, str(folder / critic.role), source, True)
        return roles.policy.call(PolicyWorker.save, str(folder / "policy"), source, True)  # type: ignore[no-any-return]

    def _serve(self, step: StepRef) -> None:
        """Give the rollout engine the policy of `step` and prove by probing that it serves it."""
        if self._served == step:
            return
        self._served = None
        self._hold(step)
        version = int(self.run.store.manifest(step).facts.get("steps", 0)) if step.path != START else 0
        self._way().serve(version)
        self._served = step

    def _rest(self) -> None:
        """Let an engine that shares its GPU with the trainers give its memory back while they learn; built, it sleeps."""
        if self._served is not None and self._way().rest():
            self._served = None

    def _way(self) -> HandOver:
        if self._handover is None:
            self._handover = HandOver(self._roles(), self.run.config, self.run.key, vocabulary_size(self.run.source))
        return self._handover

    def _seconds(self) -> Metrics:
        """Wall seconds spent in each role's methods since last asked, and in any of them (time/busy_s)."""
        metrics, spans = Metrics(), []
        for group in self._roles().groups():
            for name, seconds in group.take_seconds().items():
                metrics = metrics.with_value(f"time/{name.replace('.', '_')}_s", seconds, "sum")
            spans += group.take_spans()
        return metrics.with_value("time/busy_s", busy_seconds(spans), "sum")

    def _elapsed(self) -> Metrics:
        return Metrics().with_value("time/step_s", time.perf_counter() - self._began, "sum")

    def _resources(self) -> dict[str, list[Resources]]:
        asked = {group.role: group.submit(Worker.resources) for group in self._roles().groups()}
        reports = {role: pending.result() for role, pending in asked.items()}
        self._seconds()  # asking is no phase of the iteration
        return reports

    def _tell(self, stage: str, step: int, steps: int, metrics: Metrics) -> None:
        if self._listener is not None:
            self._listener(stage, step, steps, metrics)


def _with_speed(seconds: Metrics, tokens: int) -> Metrics:
    return seconds.with_value("rollout/tokens_per_s", tokens / seconds["time/rollout_generate_s"])


def vocabulary_size(source: Path) -> int:
    """Number of token ids that the model of this folder knows."""
    return int(json.loads((source / "config.json").read_text())["vocab_size"])
