"""The typed form of a recipe: every key a recipe may hold, its type, unit and meaning.

Values live in `recipes/`; a default stands here only where one value is right for nearly every run. A field without a default must come
from the recipe. `load.py` fills these classes, `validate.py` checks the rules between fields, `megatron.py` maps them to megatron-core.
"""

from dataclasses import dataclass, field
from typing import Optional

from omegaconf import MISSING

from hybrid_megatron.config.batch_plan import BatchPlan, batch_plan


@dataclass
class SoftmaxConfig:
    """Settings that the softmax mixers share."""

    rope_base: float = 10_000.0
    """Base of the rotary position embedding of heads with `position: rope`."""
    qk_norm: bool = False
    """RMSNorm of each head's queries and keys before RoPE; one weight for all heads of a layer."""
    output_gate: str = "none"
    """none, sigmoid or silu: what a projection of the layer's input passes through before it multiplies the heads' outputs."""


@dataclass
class AttentionConfig(SoftmaxConfig):
    """Settings of the mixer `attention`, whose heads see the whole context."""

    backend: str = "auto"
    """Kernel on CUDA: auto (cudnn, else flash, else the others), cudnn, flash, efficient, math, flex (FlexAttention) or te (Transformer
    Engine's choice); losses are the same but for rounding. Masked documents take flex in any case, and a CPU has one kernel."""


@dataclass
class SWAConfig(SoftmaxConfig):
    """Settings of the mixer `swa` (sliding-window attention)."""

    window: int = 128
    """Tokens that a token sees, itself included."""


@dataclass
class LinearConfig:
    """Settings that the linear mixers share, all but rwkv7."""

    rope_base: float = 10_000.0
    """Base of the rotary position embedding of heads with `position: rope`."""
    qk_norm: bool = False
    """RMSNorm of each head's queries and keys before RoPE; one weight for all heads of a layer."""
    output_gate: str = "silu"
    """none, sigmoid or silu: what a projection of the layer's input passes through before it multiplies the heads' normalised outputs."""
    short_conv: int = 0
    """Width in tokens of a causal convolution over each channel of q, k and v, followed by SiLU; 0: no convolution."""
    num_kv_heads: Optional[int] = None
    """Key and value heads of a layer full of these heads; null: each head has keys and values of its own, whatever attention layers do."""


@dataclass
class GLAConfig(LinearConfig):
    """Settings of the mixer `gla` (gated linear attention)."""

    gate_rank: int = 16
    """Width between the two matrices of the forget gate."""
    gate_temperature: float = 16.0
    """The log of the forget gate is divided by it: larger, slower forgetting."""


@dataclass
class GDNConfig(LinearConfig):
    """Settings of the mixer `gdn` (Gated DeltaNet)."""

    allow_neg_eigval: bool = False
    """Let beta range over (0, 2) instead of (0, 1), so that the state transition can have negative eigenvalues."""


@dataclass
class KDAConfig(LinearConfig):
    """Settings of the mixer `kda` (Kimi Delta Attention). Its output gate is made through a bottleneck of head_dim."""

    output_gate: str = "sigmoid"
    allow_neg_eigval: bool = False
    """As gdn's."""


@dataclass
class LightningConfig(LinearConfig):
    """Settings of the mixer `lightning` (linear attention with a fixed decay a head, as in HypeNet)."""

    qk_norm: bool = True
    output_gate: str = "sigmoid"


@dataclass
class Mamba2Config(LinearConfig):
    """Settings of the mixer `mamba2` (Mamba2 with a query and a key of each head, as in HypeNet)."""


@dataclass
class RWKV7Config:
    """Settings of the mixer `rwkv7`, which has RWKV-7's own norms and output gate."""

    absent = {
        "value_residual": "RWKV-7's would tie v of every layer to that of the first, and a layer of a hybrid stands by itself",
        **dict.fromkeys(("qk_norm", "output_gate"), "RWKV-7 has its own norms and output gate"),
        **dict.fromkeys(("short_conv", "num_kv_heads"), "RWKV-7 has a token shift for a convolution, and keys and values of each head"),
    }
    """No settings, but why there are none where one may look for them; setting_types.py says it."""
    rope_base: float = 10_000.0
    """Base of the rotary position embedding of heads with `position: rope`."""
    decay_rank: Optional[int] = None
    """Width between the two matrices of the decay; null: 2.5 sqrt(hidden_size) head_dim / 64, in multiples of 32."""
    rate_rank: Optional[int] = None
    """The same of the rate at which a state's rows are replaced; null: as for the decay."""
    gate_rank: Optional[int] = None
    """The same of the output gate; null: 5 sqrt(hidden_size), in multiples of 32."""


@dataclass
class KernelsConfig:
    """What computes on CUDA where no tokens are mixed; losses are the same but for rounding, and so are parameters and checkpoints. te is
    Transformer Engine, which must be installed (README). On a CPU torch computes whatever is asked for."""

    linear: str = "torch"
    """Products of the mixers' and the SwiGLU blocks' projections: torch (cuBLAS) or te. The output layer's are part of the loss."""
    norm: str = "triton"
    """RMSNorm before each block and after the last: triton (this project's) or te."""


@dataclass
class ModelConfig:
    """A Llama-style decoder: RMSNorm before each block, SwiGLU, no biases, untied embeddings."""

    num_layers: int = MISSING
    hidden_size: int = MISSING
    num_heads: int = MISSING
    """Query heads of a layer, of all its mixers together."""
    num_kv_heads: Optional[int] = None
    """Key and value heads of a layer full of attention or swa heads (grouped-query attention); null means `num_heads`."""
    head_dim: int = 128
    ffn_size: int = MISSING
    """Width of the SwiGLU block between its two projections."""
    vocab_size: int = MISSING
    """Rows of the embedding and of the output layer."""
    norm_eps: float = 1e-5
    init_std: float = 0.02
    """Standard deviation of the normal distribution that every projection and embedding is drawn from."""
    kernels: KernelsConfig = field(default_factory=KernelsConfig)
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    swa: SWAConfig = field(default_factory=SWAConfig)
    gla: GLAConfig = field(default_factory=GLAConfig)
    gdn: GDNConfig = field(default_factory=GDNConfig)
    kda: KDAConfig = field(default_factory=KDAConfig)
    lightning: LightningConfig = field(default_factory=LightningConfig)
    mamba2: Mamba2Config = field(default_factory=Mamba2Config)
    rwkv7: RWKV7Config = field(default_factory=RWKV7Config)


@dataclass
class HeadShare:
    """Some of the heads of a head-wise layer."""

    mixer: str = MISSING
    """Name of a mixer: attention, swa, gla, gdn, kda, lightning, mamba2 or rwkv7."""
    position: Optional[str] = None
    """rope or nope, as in PatternEntry."""
    share: int = 1
    """Its part of the heads: 3 beside another's 1 is three quarters of them."""


@dataclass
class PatternEntry:
    """One entry of `pattern`: layers of one mixer (`mixer`), or layers whose heads have different ones (`heads`)."""

    mixer: Optional[str] = None
    """Name of a mixer: attention, swa, gla, gdn, kda, lightning, mamba2 or rwkv7."""
    position: Optional[str] = None
    """rope or nope. attention must say which; swa and lightning have rope and the other mixers nope unless said otherwise."""
    heads: list[HeadShare] = field(default_factory=list)
    """Instead of `mixer`: the mixers that share the heads of one layer."""
    repeat: int = 1
    """Number of consecutive layers this entry stands for. The whole pattern is repeated to `model.num_layers`."""
    share: Optional[int] = None
    """Instead of `repeat`, in every entry or in none: its part of all layers, as one run of layers; nothing is repeated then."""


@dataclass
class ParallelConfig:
    """How the model and the batch are spread over processes; what is left over is data parallel."""

    tensor: int = 1
    """Ranks over which every projection and the vocabulary are split."""
    sequence: bool = False
    """Split norms and residuals over the tensor ranks, along the sequence."""
    context: int = 1
    """Ranks over which each sample's tokens are split (zig-zag, two chunks a rank)."""
    pipeline: int = 1
    """Stages into which the layers are cut."""
    virtual_pipeline: int = 1
    """Model chunks a pipeline stage holds (interleaved schedule, Narayanan et al., 2021, arXiv 2104.04473). More than 1 shortens the time
    that stages wait at the start and end of a step, at that many times the messages between them."""
    context_attention: str = "gather"
    """How full attention sees other context ranks' tokens: gather (every rank gets all keys and values) or all_to_all (every rank gets
    whole sequences of some of the heads)."""
    context_linear: str = "states"
    """The same for linear mixers: states (only the states between chunks travel) or all_to_all."""


@dataclass
class DataConfig:
    """Indexed datasets made by `python -m data_prep`; a path is a prefix: PREFIX.bin, PREFIX.idx, PREFIX.manifest.json."""

    train: str = MISSING
    valid: Optional[str] = None
    """Held-out documents; null turns validation off."""
    tokenizer: Optional[str] = None
    """Name, or path of the file, of the tokenizer that must have made the datasets; null accepts any that fits `model.vocab_size`."""
    cache_dir: Optional[str] = None
    """Folder of the index maps made by `data_prep build-cache`; null means a folder `cache` beside each dataset."""
    repeat: bool = True
    """Whether a token budget beyond the training data goes through it again; false: such a budget is refused."""
    whole_documents: bool = False
    """false: documents are joined and cut into samples. true: each sample is the beginning of one document, and only documents that fill
    one are used; for training and validation."""
    document_mask: bool = False
    """Keep attention and states from crossing the border between two documents of one sample."""


@dataclass
class OptimizerConfig:
    """AdamW. Norm weights, gates and decays have no weight decay."""

    peak_lr: float = MISSING
    weight_decay: float = MISSING
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    clip_grad: float = 1.0
    """Largest global gradient norm; a larger gradient is scaled down to it."""


@dataclass
class ScheduleConfig:
    """Learning rate and batch over tokens: linear warm-up to `optimizer.peak_lr`, then `shape`."""

    warmup_tokens: int = MISSING
    shape: str = "cosine"
    """cosine or linear: down to `min_lr` at the end of the token budget. constant: stays at the peak. wsd (warm-up, stable, decay): stays
    at the peak, and falls linearly to `min_lr` over the last `decay_tokens`."""
    decay_tokens: Optional[int] = None
    """wsd: tokens of its last, falling part."""
    min_lr: float = 0.0
    start_batch_tokens: Optional[int] = None
    """Tokens of the first step, where the batch grows to `train.batch_tokens`, in steps of this size (batch_plan.py); null: it is that from
    the first step on."""
    batch_warmup_tokens: int = 0
    """Tokens over which the batch grows."""


@dataclass
class LongCEConfig:
    """LongCE (Fang et al., 2025, arXiv 2410.23771): tokens that profit from long context weigh more in the loss.

    A token's weight is min(exp(short loss - loss), gamma), both losses by the model of the step and its short loss with a context of
    `window` + 1 to `window + stride` tokens; tokens whose context is not longer weigh 1 (ops/longce.py). The metric `loss` is then the
    weighted loss over the number of tokens, `lm_loss` the plain one, `longce_mean_weight` the mean weight of all tokens and
    `longce_at_gamma` the share at `gamma` of those behind the first `window` of each sample. Validation stays plain.
    """

    enabled: bool = False
    window: int = 4096
    """Tokens of short context that every scored token has before it (K in the paper). The first `window + stride` tokens of a sample
    weigh 1."""
    stride: int = 1024
    """Tokens scored by each short context; it divides train.context - window. The short contexts of a sample have about
    (window + stride) / stride times its tokens."""
    gamma: float = 5.0
    """Largest weight."""


@dataclass
class TrainConfig:
    """Token budget and batch of one stage."""

    tokens: int = MISSING
    """Token budget; the run ends with the step that reaches it."""
    context: int = MISSING
    """Tokens a sample."""
    batch_tokens: int = MISSING
    """Tokens a step, over all ranks; of the largest steps, where the batch grows."""
    micro_batch: int = MISSING
    """Samples a rank computes at once."""
    precision: str = "bf16"
    """bf16: bfloat16 parameters and activations with float32 master weights, gates, states, norm statistics and loss. fp32: all float32."""
    recompute: str = "none"
    """What the backward pass computes again instead of keeping it in memory; losses and gradients are the same. none. selective: the SwiGLU
    block of each layer, whose inner activations, the widest of a layer, cost FLOPs linear in the context, and the chunks' states of gdn.
    full: every layer, of which only the input is kept, for up to a third more FLOPs."""


@dataclass
class ValidationConfig:
    interval_steps: int = MISSING
    """Steps between two measurements; one more is made after the last step."""
    samples: int = MISSING
    """Samples of `data.valid` measured each time, always the same ones; fewer if the dataset holds fewer."""


@dataclass
class CheckpointConfig:
    interval_steps: int = MISSING
    """Steps between two rolling checkpoints, from which a run resumes under the same tensor, pipeline and virtual pipeline sizes. One more
    is made when SIGTERM or SIGUSR1 stops the run."""
    keep_last: int = 2
    """A rolling checkpoint is removed once so many newer ones, of either kind, are complete."""
    permanent_interval_steps: Optional[int] = None
    """Steps between two permanent checkpoints, from which a run resumes under any layout, and which are never removed; where both are due
    this one is made. null: none in between. One more is made after the last step, and when SIGINT (Ctrl-C) stops the run."""
    asynchronous: bool = True
    """Write while training goes on, from a copy of the state in host memory (`python -m launch plan` says how large it is; where there is
    no room for it, training waits, with a warning). false: training waits until all is written, and no copy is kept."""


@dataclass
class StabilityConfig:
    """What a run does about a step that looks wrong, before it changes any parameter (training/stability.py).

    stop: the run ends, keeping the parameters from before the step. skip: the step's batch is left out: no update, and everything goes on
    as if there had been one. warn: an event, a metric and a printed line, and the update is made. ignore: nobody looks.
    """

    non_finite: str = "stop"
    """stop or skip: a loss or a gradient norm that is NaN or infinite."""
    loss_spike: str = "warn"
    """ignore, warn, skip or stop: a loss above the mean of the last `window` steps by more than `sigmas` of their standard deviations."""
    grad_norm_spike: str = "warn"
    """The same for the gradient norm before clipping."""
    window: int = 128
    """Steps before the present one that it is compared with; nothing is a spike before half of them are there."""
    sigmas: float = 6.0
    max_skipped: int = 10
    """Most steps in a row that may be skipped for what they computed; one more stops the run."""
    skip_steps: list[list[int]] = field(default_factory=list)
    """Steps whose batches are left out unseen, as [first, last], counted as in metrics.jsonl: [[961, 976]]. A run that is resumed may have
    others than before behind the checkpoint that it goes on from."""


@dataclass
class TrackingConfig:
    log_interval: int = 10
    """Steps between two printed lines; `metrics.jsonl` holds every step."""
    wandb: str = "auto"
    """auto: online if this user is logged in and the server answers, else offline. online, offline, or disabled."""
    project: str = "hybrid-megatron"
    """wandb project."""
    entity: Optional[str] = None
    """wandb user or team that owns the project; null: the default of whoever is logged in."""
    group: Optional[str] = None
    """Runs that wandb shows together; a run of a study has the study's name unless set."""
    job_type: Optional[str] = None
    """What kind of run of its group it is; the recipe's stage, e.g. pretrain_4k, unless set."""
    tags: Optional[list[str]] = None
    """The recipe's words unless set."""


@dataclass
class WatchdogConfig:
    """Ends all processes of a run in which one hangs, so that it can be started again (training/watchdog.py).

    A limit is on the time without progress, not on a whole step: a phase of a step, or each of its micro-batches.
    """

    step_seconds: Optional[float] = 900.0
    """Longest time without progress, saving a checkpoint included; null: no watchdog, and operations between processes wait as long as they
    must, as a debugger needs it."""
    first_step_seconds: float = 1800.0
    """The same until the first step is done, in which a checkpoint is loaded and kernels are compiled and tuned."""


@dataclass
class InferenceConfig:
    """Settings that change how a trained model computes on long inputs; what acts on what: model/inference.py."""

    logit_scale: str = "none"
    """Factor on the logits of attention without position, inputs being longer than in training. log: ln L / ln L0 (L tokens of input, L0 in
    training); hype: ln(t + a) / ln a at position t; constant."""
    logit_scale_value: Optional[float] = None
    """hype: the base a. constant: the factor."""
    dynamic_ntk: bool = False
    """Raise the RoPE base of attention to base * (L / L0)^(d / (d - 2)) on an input of L > L0 tokens."""
    rope_window: Optional[int] = None
    """Tokens that attention with RoPE sees, instead of all."""
    swla_window: Optional[int] = None
    """Tokens that the states of linear mixers reach back over, at most."""
    swla_stride: Optional[int] = None
    """Steps in tokens in which that window moves; null: a quarter of it."""


@dataclass
class EvaluationConfig:
    """`python -m launch evaluate`: how well a trained run's checkpoint predicts held-out tokens, by position and length."""

    checkpoint: Optional[str] = None
    """Name of a checkpoint in the run folder, e.g. step_00000100; null: the newest complete one."""
    data: Optional[str] = None
    """Prefix of an indexed dataset of the run's own tokenizer; null: the run's data.valid."""
    lengths: Optional[list[int]] = None
    """Tokens a sample; null: train.context times 1, 2, 4, 8 and 16."""
    tokens: int = 1_048_576
    """Tokens predicted at each length, or all that the data holds; the same ones at every length that divides the longest one, since they
    are rounded down to whole samples of that (or up, to a single one)."""
    whole_documents: bool = False
    """false: the data is one stream of tokens, cut into samples. true: a sample begins where a document does, and only documents that hold
    one of the longest length are taken (books, as in PG19); shorter lengths see the beginnings of the same documents."""
    micro_batch: int = 1
    """Samples of the longest length that a rank computes at once; of a shorter length, as many as have as many tokens."""
    precision: Optional[str] = None
    """bf16 or fp32, as in train.precision; null: as trained."""
    name: Optional[str] = None
    """Of this evaluation and its files; null: the settings that are not as usual, e.g. plain or logit_scale=log,swla_window=4096."""
    output: Optional[str] = None
    """Folder for results; null: RUN_DIR/evaluation."""
    inference: InferenceConfig = field(default_factory=InferenceConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)


@dataclass
class LogitBaseConfig(EvaluationConfig):
    """`python -m launch choose-logit-base`: an evaluation at one length for each candidate; `lengths` counts only by its longest."""

    candidates: list[float] = field(default_factory=lambda: [100, 200, 300, 400, 500, 600, 700, 800, 900, 1000])
    """Bases a of inference.logit_scale=hype that are compared."""


@dataclass
class RunConfig:
    """One recipe is one stage is one run folder."""

    name: str = MISSING
    """Name of the run in messages and in wandb; taken from the recipe's words unless set."""
    run_dir: str = MISSING
    """Run folder; `runs/NAME` unless set, with a short hash where values were overridden."""
    seed: int = 1234
    """Seeds the initial parameters and the order of samples."""
    init_from: Optional[str] = None
    """Run folder or checkpoint whose parameters a fresh run starts from; optimizer, schedule, data and positions are this run's own. A run
    folder stands for its newest complete checkpoint. Whatever changes no parameter's shape may differ from the run that wrote it: context,
    data, rope_base, a layer's position (rope to nope is DRoPE). A run that resumes from a checkpoint of its own does not read it again."""
    model: ModelConfig = field(default_factory=ModelConfig)
    pattern: list[PatternEntry] = MISSING
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    longce: LongCEConfig = field(default_factory=LongCEConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    stability: StabilityConfig = field(default_factory=StabilityConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    watchdog: WatchdogConfig = field(default_factory=WatchdogConfig)

    @property
    def batch_plan(self) -> BatchPlan:
        """Tokens and samples of every step."""
        train, schedule = self.train, self.schedule
        return batch_plan(train.tokens, train.context, train.batch_tokens, schedule.start_batch_tokens, schedule.batch_warmup_tokens)

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.batch_plan.num_steps

    @property
    def batch_samples(self) -> int:
        """Samples of a full batch, over all ranks."""
        return self.train.batch_tokens // self.train.context
