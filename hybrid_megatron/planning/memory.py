"""Memory of one GPU, from what the code keeps: tensors alone, as torch.cuda.max_memory_allocated counts them.

Letters: t tokens of a micro-batch on a rank, h hidden size, f FFN size, V vocabulary, e bytes of an activation, T tensor ranks, S = T
under sequence parallelism and 1 without, P parameters of this rank, R ranks of data times context.

Against runs on H200s: README.md, "What was measured".
"""

from collections.abc import Iterable
from dataclasses import dataclass

from hybrid_megatron.model.mixers import MIXERS
from hybrid_megatron.model.pattern import Layer
from hybrid_megatron.model.unit_order import UnitOrder
from hybrid_megatron.ops.linear_cross_entropy import chunk_tokens
from hybrid_megatron.planning.layout import Layout

GIB = 2**30
OPTIMIZER_STEP = "optimizer step"


@dataclass(frozen=True)
class RankParams:
    """Parameters that one rank holds."""

    usual: int
    """In the type of `train.precision`."""
    float32: int
    """In float32 whatever the precision: decays and biases of gates."""
    largest: int
    """Of one tensor."""

    @property
    def total(self) -> int:
        return self.usual + self.float32


@dataclass(frozen=True)
class Memory:
    """Bytes on each GPU of one pipeline stage."""

    stage: int
    weights: int
    """e P, and 4 for a float32 parameter: megatron-core's parameter buffer."""
    gradients: int
    """4 P: the float32 buffer that gradients are added up and reduced in."""
    optimizer: int
    """Share of the distributed optimizer: 12 P / R under bf16 (master weights and two moments in float32), 8 P / R for parameters that are
    float32 themselves."""
    activations: int
    """Kept for the backward pass by all micro-batches in flight, and megatron-core's buffer under sequence parallelism."""
    context: int
    """Of them, what context parallelism adds: keys and values of other ranks, summaries, states."""
    in_flight: int
    """Micro-batches, or passes of model chunks, whose activations are kept at once."""
    moments: dict[str, int]
    """What the most demanding moments need beside all that is named above."""

    @property
    def peak_moment(self) -> str:
        return max(self.moments, key=lambda moment: self.at(moment))

    @property
    def peak(self) -> int:
        return self.at(self.peak_moment)

    def at(self, moment: str) -> int:
        """All that is in memory at a moment. The optimizer steps when no activation is left."""
        activations = 0 if moment == OPTIMIZER_STEP else self.activations
        return self.weights + self.gradients + self.optimizer + activations + self.moments[moment]


def memory(layout: Layout) -> list[Memory]:
    """Of each pipeline stage."""
    return [_of_stage(layout, stage) for stage in range(layout.config.parallel.pipeline)]


def peak_memory(layout: Layout) -> int:
    """Bytes of the GPU that needs most."""
    return max(stage.peak for stage in memory(layout))


def _of_stage(layout: Layout, stage: int) -> Memory:
    params, element, chunks = rank_params(layout, stage), layout.element, layout.chunks(stage)
    kept = [kept_by_chunk(layout, chunk) for chunk in chunks]
    passes = passes_in_flight(layout, stage)
    last = stage == layout.config.parallel.pipeline - 1
    layers = {layer.groups: layer for chunk in chunks for layer in chunk}.values()
    moments = {"backward of a layer": max(backward_bytes(layout, layer) for layer in layers)}
    if last:
        moments["loss"] = loss_bytes(layout)
    # The norm of the gradients is taken in float64, one parameter's share after the other.
    moments[OPTIMIZER_STEP] = 8 * min(params.largest, -(-params.total // layout.shards))
    activations = sum(count * bytes_ for count, bytes_ in zip(passes, kept)) + gathered_bytes(layout)
    context = 0
    if layout.config.train.recompute != "full":
        context = sum(count * sum(_context(layout, layer) for layer in chunk) for count, chunk in zip(passes, chunks))
    master = 12 if element == 2 else 8
    return Memory(
        stage,
        weights=element * params.usual + 4 * params.float32,
        gradients=4 * params.total,
        optimizer=-(-(master * params.usual + 8 * params.float32) // layout.shards),
        activations=activations,
        context=context,
        in_flight=sum(passes),
        moments=moments,
    )


# --- parameters -----------------------------------------------------------------------------------------------------------------


def rank_params(layout: Layout, stage: int) -> RankParams:
    """Of one rank of a stage: projections and inner parameters / T, norms and shared projections whole; the embedding / T on the first
    stage, the output layer / T and the last norm on the last."""
    model, tensor = layout.config.model, layout.config.parallel.tensor
    usual = float32 = 0
    largest = [0]
    for layer in (layer for chunk in layout.chunks(stage) for layer in chunk):
        order = UnitOrder(model, layer.groups)
        matrices = [order.rows * model.hidden_size // tensor, order.columns * model.hidden_size // tensor]
        matrices += [2 * model.ffn_size * model.hidden_size // tensor, model.ffn_size * model.hidden_size // tensor]
        usual += sum(matrices) + order.shared * model.hidden_size + 2 * model.hidden_size
        largest.append(max(matrices))
        for group in layer.groups:
            mixer = MIXERS[group.mixer]
            whole, split32 = mixer.whole_params(model, group), mixer.float32_params(model, group) // tensor
            usual += whole + (mixer.inner_params(model, group) - whole) // tensor - split32
            float32 += split32
    vocabulary = model.vocab_size * model.hidden_size // tensor
    if stage == 0:
        usual += vocabulary
        largest.append(vocabulary)
    if stage == layout.config.parallel.pipeline - 1:
        usual += vocabulary + model.hidden_size
        largest.append(vocabulary)
    return RankParams(usual, float32, max(largest))


# --- activations ----------------------------------------------------------------------------------------------------------------


def passes_in_flight(layout: Layout, stage: int) -> list[int]:
    """For each model chunk of a stage, the forward passes whose backward pass is still to come, at most.

    One without a pipeline. 1F1B: pipeline - stage, or all micro-batches if they are fewer. Interleaved with v chunks:
    2 (pipeline - stage - 1) + (v - 1) pipeline passes before the first backward pass, and one more; `pipeline` micro-batches go through
    one chunk, then as many through the next.
    """
    stages, chunks = layout.config.parallel.pipeline, layout.config.parallel.virtual_pipeline
    ahead = stages - stage - 1
    if chunks > 1:
        ahead = 2 * ahead + (chunks - 1) * stages
    in_flight = min(ahead + 1, layout.micro_batches * chunks)
    counts = [0] * chunks
    for number in range(in_flight):
        counts[number // stages % chunks] += 1
    return counts


def kept_by_chunk(layout: Layout, layers: Iterable[Layer]) -> int:
    """Of one micro-batch, for the backward pass of the chunk: its layers', and what a pipeline stage hands on (h t e / S)."""
    handed_on = _residual(layout) if layout.config.parallel.pipeline > 1 else 0
    return handed_on + sum(kept_by_layer(layout, layer) for layer in layers)


def gathered_bytes(layout: Layout) -> int:
    """The one buffer, h t e, into which megatron-core gathers the inputs of projections under sequence parallelism; it stays."""
    return _residual(layout) * layout.residual_share if layout.config.parallel.sequence else 0


def kept_by_layer(layout: Layout, layer: Layer) -> int:
    """none: all. selective: all but the inside of the SwiGLU block and what mixers compute again. full: the layer's input, h t e / S."""
    recompute = layout.config.train.recompute
    if recompute == "full":
        return _residual(layout)
    again = mlp_bytes(layout) + recomputed_bytes(layout, layer) if recompute == "selective" else 0
    return layer_bytes(layout, layer) - again


def layer_bytes(layout: Layout, layer: Layer) -> int:
    """What a layer keeps with nothing recomputed: both norms, the input projection's weight in block order, the mixers, what the output
    projection takes, unless that is the output of a mixer's kernel as it is, the SwiGLU block."""
    model, parallel = layout.config.model, layout.config.parallel
    order = UnitOrder(model, layer.groups)
    weight = order.computed_rows(parallel.tensor) * model.hidden_size * layout.element
    first, *others = layer.groups
    as_it_is = not others and parallel.context == 1 and MIXERS[first.mixer].keeps_its_output(model)
    joined = 0 if as_it_is else order.columns // parallel.tensor * layout.local_tokens * layout.element
    return 2 * norm_bytes(layout) + weight + mixer_bytes(layout, layer) + joined + mlp_bytes(layout)


def norm_bytes(layout: Layout) -> int:
    """A norm's input and output, the second being the input of the projection after it (2 h t e / S), and a float32 a token."""
    return 2 * _residual(layout) + 4 * layout.local_tokens // layout.residual_share


def mlp_bytes(layout: Layout) -> int:
    """Inside the SwiGLU block 3 f t e / T: gate and up in one tensor, and their product."""
    return 3 * layout.config.model.ffn_size // layout.config.parallel.tensor * layout.local_tokens * layout.element


def recomputed_bytes(layout: Layout, layer: Layer) -> int:
    """Of the mixers, what is not kept under selective recomputation, / T."""
    model, tokens, element = layout.config.model, layout.local_tokens, layout.element
    again = sum(MIXERS[group.mixer].recomputed_bytes(model, group, tokens, element) for group in layer.groups)
    return again // layout.config.parallel.tensor


def mixer_bytes(layout: Layout, layer: Layer) -> int:
    """The mixers' own `activation_bytes` / T (what tensor ranks keep whole: whole), what context parallelism or pieces side by side
    add, and under sequence parallelism the gathered input, h t e, for mixers that project it themselves."""
    model, tensor, tokens, element = layout.config.model, layout.config.parallel.tensor, layout.local_tokens, layout.element
    mixers = [(MIXERS[group.mixer], group) for group in layer.groups]
    whole = sum(mixer.whole_activation_bytes(model, group, tokens, element) for mixer, group in mixers)
    kept = sum(mixer.activation_bytes(model, group, tokens, element) for mixer, group in mixers)
    split = (kept - whole) // tensor
    gathered = layout.residual_share > 1 and any(mixer.takes_input for mixer, _ in mixers)
    passed_on = _context(layout, layer) + _pieces(layout, layer)
    return split + whole + (_residual(layout) * layout.residual_share if gathered else 0) + passed_on


def _context(layout: Layout, layer: Layer) -> int:
    config = layout.config
    if config.parallel.context == 1:
        return 0
    arguments = (config.train.context, config.parallel, layout.element)
    kept = sum(MIXERS[group.mixer].context_kept_bytes(config.model, group, *arguments) for group in layer.groups)
    return config.train.micro_batch * kept


def _pieces(layout: Layout, layer: Layer) -> int:
    config = layout.config
    if config.parallel.context > 1:
        return 0
    arguments = (config.train.micro_batch, config.train.context, config.parallel.tensor)
    return sum(MIXERS[group.mixer].pieces_kept_bytes(config.model, group, *arguments) for group in layer.groups)


def _residual(layout: Layout) -> int:
    return layout.config.model.hidden_size * layout.local_tokens * layout.element // layout.residual_share


# --- moments --------------------------------------------------------------------------------------------------------------------


def backward_bytes(layout: Layout, layer: Layer) -> int:
    """The backward pass of one layer, beside all that was kept: what is computed again, and gradients.

    In the SwiGLU block the product is freed before the gradients of gate and up, 2 f t e / T, join its own: 2 f t e / T more than was kept.
    In the mixers, then without the block's 3 f t e / T, each kept tensor has a gradient of its size at most. In both the gradients of the
    residual and of the layer's input, the second gathered over tensor ranks.
    """
    recompute, mlp = layout.config.train.recompute, mlp_bytes(layout)
    whole = layer_bytes(layout, layer) - _residual(layout)
    again_in_block = {"none": 0, "selective": mlp, "full": whole}[recompute]
    again_in_mixers = {"none": -mlp, "selective": recomputed_bytes(layout, layer), "full": whole - mlp}[recompute]
    gradients = _residual(layout) + _residual(layout) * layout.residual_share
    return gradients + max(again_in_block + 2 * mlp // 3, again_in_mixers + mixer_bytes(layout, layer))


def loss_bytes(layout: Layout) -> int:
    """The last norm and the cross entropy (ops/linear_cross_entropy.py), at its products or in its backward pass.

    In both the norm's input and output, h t e / S each, gathered h t e, and the gradient of the hidden states h t e. Before, a chunk of
    logits in float32, whose place their gradient takes; after, what stands for the weight's gradient, e h V / T.
    """
    config, tensor = layout.config, layout.config.parallel.tensor
    words = config.model.vocab_size // tensor
    gathered = _residual(layout) * layout.residual_share
    hidden = norm_bytes(layout) + gathered * (2 if layout.residual_share > 1 else 1)
    chunk = words * min(chunk_tokens(words), layout.local_tokens)
    return hidden + max(4 * chunk, layout.element * words * config.model.hidden_size)
