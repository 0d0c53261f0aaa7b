"""Options of `algorithm`: one section per algorithm, with only the knobs that it uses and the defaults of its paper."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from engine.trainconfig import NUMBER, Coefficient, NonNegativeInt, PositiveFloat, PositiveInt, Real, Section, Share

Aggregation = Literal["sequence-mean", "token-mean", "fixed"]
ClipLow = Annotated[float, NUMBER, Field(gt=0.0, lt=1.0)]


class CorrectionConfig(Section):
    """Importance weights for the gap between sampler and trainer (metrics are always on)."""

    mode: Literal["none", "token", "icepop", "sequence", "geometric"] = "none"
    cap: PositiveFloat = 2.0
    floor: Coefficient | None = None


class OnlineConfig(Section):
    """What every algorithm has that learns from its own samples, and what the rest of the engine has to know of it."""

    surrogate: ClassVar[str] = "ppo"  # kind of engine.algorithms.losses.policy_loss
    compares_samples: ClassVar[bool] = False  # learns from differences between the samples of a prompt
    on_policy: ClassVar[bool] = False  # one optimiser step per experience, no ratio
    critics: ClassVar[tuple[str, ...]] = ()  # roles that it trains beside the policy

    entropy_coef: Coefficient = 0.0
    correction: CorrectionConfig = CorrectionConfig()
    max_logprob_gap: PositiveFloat = 1.0  # mean |sampler - trainer| in nats above which a step stops

    @property
    def rounds(self) -> int:
        """At most so many times the prompts of an iteration are drawn."""
        return 1

    @property
    def needs_reference(self) -> bool:
        """Whether the frozen start policy has to score responses."""
        return any(self.model_dump(include={"kl_coef", "kl_loss_coef"}).values())

    @property
    def policy_loss_options(self) -> dict[str, Any]:
        """What the algorithm sets of the arguments of engine.algorithms.losses.policy_loss."""
        options = self.model_dump(include={"clip_low", "clip_high", "dual_clip", "aggregation"})
        return {"kind": self.surrogate, **options}


class RatioConfig(OnlineConfig):
    """A ratio clipped to 1 - clip_low .. 1 + clip_high."""

    clip_low: ClipLow = 0.2
    clip_high: PositiveFloat = 0.2


class ClippedConfig(RatioConfig):
    """The same for every token, with a bound on what a bad token with a large ratio costs."""

    dual_clip: Annotated[float, NUMBER, Field(gt=1.0)] | None = None


class KLLossConfig(Section):
    """Distance to the start policy as a term of the loss."""

    kl_loss_coef: Coefficient = 0.0
    kl_loss_kind: Literal["k1", "k2", "k3", "abs"] = "k3"


class KLRewardConfig(Section):
    """Distance to the start policy as a penalty on the reward of every token."""

    kl_coef: Coefficient = 0.0
    kl_target: PositiveFloat | None = None  # nats per response; set = adaptive coefficient
    kl_horizon: PositiveInt = 10_000  # samples, of the adaptive coefficient


class CriticConfig(Section):
    """Generalised advantage estimation and the critic behind it."""

    gamma: Share = 1.0
    lam: Share = 0.95
    value_clip: PositiveFloat | None = 0.2
    critic_lr: PositiveFloat | None = None  # None = 10 x train.lr
    critic_warmup: NonNegativeInt = 0  # iterations in which only the critics learn


class ConstraintConfig(Section):
    """The Lagrange multiplier that holds the mean cost (`cost`) at its limit: log lambda += lr (mean cost - limit)."""

    cost_limit: Real = 0.0  # positive costs are harmful
    multiplier_init: PositiveFloat = 1.0
    multiplier_lr: Coefficient = 0.1
    multiplier_max: PositiveFloat = 5.0


class PPOConfig(ClippedConfig, KLRewardConfig, CriticConfig):
    """Proximal policy optimisation with a critic (Schulman et al. 2017; Ouyang et al. 2022)."""

    critics: ClassVar[tuple[str, ...]] = ("critic",)
    name: Literal["ppo"] = "ppo"
    aggregation: Aggregation = "token-mean"


class GRPOConfig(ClippedConfig, KLLossConfig):
    """Group relative policy optimisation (Shao et al. 2024)."""

    compares_samples: ClassVar[bool] = True
    name: Literal["grpo"] = "grpo"
    scale: Literal["std", "none"] = "std"
    aggregation: Aggregation = "sequence-mean"


class DrGRPOConfig(ClippedConfig, KLLossConfig):
    """GRPO without its biases (Liu et al. 2025): no division by the spread, none by the length."""

    compares_samples: ClassVar[bool] = True
    name: Literal["dr_grpo"] = "dr_grpo"
    aggregation: Literal["fixed"] = "fixed"


class RLOOConfig(ClippedConfig, KLLossConfig):
    """REINFORCE with the other samples as baseline (Ahmadian et al. 2024)."""

    compares_samples: ClassVar[bool] = True
    name: Literal["rloo"] = "rloo"
    loss: Literal["clip", "reinforce"] = "clip"
    aggregation: Aggregation = "sequence-mean"

    @property
    def policy_loss_options(self) -> dict[str, Any]:
        """Without a ratio for `loss: reinforce`."""
        if self.loss == "reinforce":
            return {"kind": "reinforce", "aggregation": self.aggregation}
        return super().policy_loss_options


class ReMaxConfig(ClippedConfig, KLLossConfig):
    """REINFORCE with the score of the greedy response as baseline (Li et al. 2024)."""

    name: Literal["remax"] = "remax"
    aggregation: Aggregation = "token-mean"


class ReinforcePlusPlusConfig(ClippedConfig, KLRewardConfig):
    """REINFORCE++ (Hu 2025): whitened rewards to go."""

    name: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"
    gamma: Share = 1.0
    aggregation: Aggregation = "token-mean"


class ReinforcePlusPlusBaselineConfig(ClippedConfig, KLLossConfig):
    """REINFORCE++ with the group mean as baseline (Hu 2025)."""

    compares_samples: ClassVar[bool] = True
    name: Literal["reinforce_plus_plus_baseline"] = "reinforce_plus_plus_baseline"
    aggregation: Aggregation = "token-mean"


class OPOConfig(OnlineConfig):
    """On-policy optimisation with the baseline of least variance (Hao et al. 2025)."""

    surrogate: ClassVar[str] = "reinforce"
    compares_samples: ClassVar[bool] = True
    on_policy: ClassVar[bool] = True
    name: Literal["opo"] = "opo"
    aggregation: Aggregation = "token-mean"


class GPGConfig(OnlineConfig):
    """Group policy gradient (Chu et al. 2025): neither ratio nor clip."""

    surrogate: ClassVar[str] = "reinforce"
    compares_samples: ClassVar[bool] = True
    name: Literal["gpg"] = "gpg"
    aggregation: Aggregation = "token-mean"


class DAPOConfig(ClippedConfig):
    """Decoupled clip and dynamic sampling (Yu et al. 2025)."""

    compares_samples: ClassVar[bool] = True
    name: Literal["dapo"] = "dapo"
    clip_high: PositiveFloat = 0.28
    aggregation: Literal["token-mean"] = "token-mean"
    max_refills: NonNegativeInt = 3  # times that prompts are drawn again in place of groups without spread
    overlong_buffer: PositiveInt | None = None  # tokens before the longest response where the penalty begins; None = no

    @property
    def rounds(self) -> int:
        """The first draw and its refills."""
        return 1 + self.max_refills


class GSPOConfig(RatioConfig, KLLossConfig):
    """Group sequence policy optimisation (Zheng et al. 2025): one ratio per response."""

    surrogate: ClassVar[str] = "gspo"
    compares_samples: ClassVar[bool] = True
    name: Literal["gspo"] = "gspo"
    clip_low: ClipLow = 3e-4
    clip_high: PositiveFloat = 4e-4
    aggregation: Literal["sequence-mean"] = "sequence-mean"


class CISPOConfig(OnlineConfig):
    """Clipped importance weights instead of clipped updates (MiniMax-M1 2025); the low side is open."""

    surrogate: ClassVar[str] = "cispo"
    compares_samples: ClassVar[bool] = True
    name: Literal["cispo"] = "cispo"
    clip_high: PositiveFloat = 4.0
    aggregation: Aggregation = "token-mean"


class GMPOConfig(OnlineConfig, KLLossConfig):
    """Geometric-mean policy optimisation (Zhao et al. 2025); ratios clipped to e^-clip_low .. e^clip_high."""

    surrogate: ClassVar[str] = "gmpo"
    compares_samples: ClassVar[bool] = True
    name: Literal["gmpo"] = "gmpo"
    clip_low: PositiveFloat = 0.4
    clip_high: PositiveFloat = 0.4
    aggregation: Literal["sequence-mean"] = "sequence-mean"


class SafeRLHFConfig(ClippedConfig, KLRewardConfig, CriticConfig, ConstraintConfig):
    """PPO under a limit on the mean cost, with a critic for each (Safe RLHF, Dai et al. 2024)."""

    critics: ClassVar[tuple[str, ...]] = ("critic", "cost_critic")
    name: Literal["safe_rlhf"] = "safe_rlhf"
    aggregation: Aggregation = "token-mean"
    ptx_coef: Coefficient = 0.0  # weight of the likelihood of the rows of `sft`, which the policy is not to forget
    ptx_rows: PositiveInt = 32  # of each optimiser step


class SafeGRPOConfig(ClippedConfig, KLLossConfig, ConstraintConfig):
    """GRPO under a limit on the mean cost: the same mix of group-normalised score and cost, no critic."""

    compares_samples: ClassVar[bool] = True
    name: Literal["safe_grpo"] = "safe_grpo"
    aggregation: Aggregation = "sequence-mean"


class CustomConfig(ClippedConfig, KLLossConfig):
    """A dataflow of your own: a module with `make_experience` and `learn`, by import path (CONTRIBUTING.md)."""

    name: Literal["custom"] = "custom"
    dataflow: Annotated[str, Field(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$")]
    aggregation: Aggregation = "token-mean"
    options: dict[str, Any] = Field(default_factory=dict)  # checked by the module's class `Options`


AlgorithmConfig = Annotated[
    PPOConfig
    | GRPOConfig
    | DrGRPOConfig
    | RLOOConfig
    | ReMaxConfig
    | ReinforcePlusPlusConfig
    | ReinforcePlusPlusBaselineConfig
    | OPOConfig
    | GPGConfig
    | DAPOConfig
    | GSPOConfig
    | CISPOConfig
    | GMPOConfig
    | SafeRLHFConfig
    | SafeGRPOConfig
    | CustomConfig,
    Field(discriminator="name"),
]
